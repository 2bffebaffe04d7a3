"""Experiments: their fields, their files, and the checks before one runs."""
