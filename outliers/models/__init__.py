"""Models: where they are found, how they are loaded, and the names of their parts."""
