"""Sources of models, and the names of their parts."""
