"""The command `python -m outliers.measure`."""
