"""Hooks to streaming statistics to outlier features."""
