"""Rows to tables and figures; no model is needed here."""
