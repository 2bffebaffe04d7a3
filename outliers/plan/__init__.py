"""The command `python -m outliers.plan`."""
