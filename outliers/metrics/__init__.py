"""Metrics: their records, and a file for the measurement of each."""
