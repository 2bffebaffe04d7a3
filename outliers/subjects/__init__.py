"""Subjects of measurements: models with their inputs and their loss, one file for each family."""
