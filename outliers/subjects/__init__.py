"""Subjects of measurements: models with their inputs and their own loss, a file a family."""
