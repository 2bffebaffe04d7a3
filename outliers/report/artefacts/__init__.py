"""One file a table or figure: its section, its figures, its keys and published values.

`ARTEFACTS` of a file are those of the paper, by name. Nothing here imports torch, which drawing again does without.
"""
