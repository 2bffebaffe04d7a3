"""Variants, changes of a model before it is measured: schemes, ablations, planted outliers, or several at once.

A variant changes all layers of a resident model, or the current layer of a streamed one (see
`outliers.models.stream.Variant`). It can be pickled, and so sent to other machines of a cluster. It has a text form,
its `name`, which `outliers.variant` parses. Each variant is one file here and a row in `written.py`.
"""
