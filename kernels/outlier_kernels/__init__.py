"""Int8 kernels for the schemes of `outliers`; `reference` states what each of them computes in plain torch."""
