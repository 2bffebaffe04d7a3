"""Published numbers of the paper and of others, as data, and their readers."""
