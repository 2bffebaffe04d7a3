"""Tables and figures that experiments show (`artefacts.py`), with what the paper and others published beside them."""
