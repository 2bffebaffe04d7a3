"""Plans: files that assign a scheme to each projection of a model, in our format and in those of other libraries."""
