"""One file a table or figure of the paper: its published numbers, and which cells it shows; `beyond.py` has the others.

`ARTEFACTS` of a file are what an experiment may show, by name. Nothing here imports torch, which drawing again does
without.
"""
