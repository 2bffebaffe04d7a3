"""The command `python -m outliers.get`."""
