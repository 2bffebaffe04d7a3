"""The views of single metrics, a file each: rows to tables, figures and findings."""
