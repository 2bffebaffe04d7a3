"""Cells in stages: which cells follow from the rows of those before them."""
