"""Specifications of experiments: their kinds, their files, and the checks before one runs."""
