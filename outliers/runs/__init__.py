"""Cells to rows: what is asked, planned, measured once, and kept."""
