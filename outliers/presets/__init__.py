"""The experiments: which cells each command measures, one file for each command."""
