"""Plans: under which scheme each projection of a model is, as a file of ours and of other libraries."""
