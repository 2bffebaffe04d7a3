"""Tables and figures that experiments show (`artefacts.py`), beside the numbers that the paper and others published."""
