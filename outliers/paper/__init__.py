"""What experiments show, by name (`artefacts.py`), with what the paper and others published beside it."""
