"""Sections of rows of several metrics; those of one metric are in `outliers.views`."""
