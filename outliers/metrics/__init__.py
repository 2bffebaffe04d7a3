"""Metrics of a subject: their records, and a file each with how it is measured."""
