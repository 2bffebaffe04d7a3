"""Traces: from forward hooks to streaming statistics to outlier features."""
