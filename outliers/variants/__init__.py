"""Variants, changes to a model before it is measured: schemes, ablations, planted outliers, several at once.

Each stands for the layers of a resident model, or for that one of a streamed model whose turn it is (see
`outliers.models.stream.Variant`); each can be pickled, and so travels to the machines of a cluster; and each has a
writing, its `name`, which `outliers.variant` reads. A variant is one file here, and its row in `written.py`.
"""
