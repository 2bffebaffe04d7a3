"""One file a table or figure: its section, its figures, its keys and published values, its findings.

A finding is a sentence, and there only if it is beyond its scatter.

`ARTEFACTS` of a file are what an experiment may show, by name: tables and figures of the paper, and `remedies`. Nothing
here imports torch, which drawing again does without.
"""
