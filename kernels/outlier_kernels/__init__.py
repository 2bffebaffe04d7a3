"""Int8 kernels for the schemes of `outliers`; `reference` defines in plain torch what each of them computes."""
