"""Documents to token blocks."""
