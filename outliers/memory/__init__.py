"""The command `python -m outliers.memory`."""
