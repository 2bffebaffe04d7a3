"""The command `python -m outliers.training`."""
