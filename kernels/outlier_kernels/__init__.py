"""Int8 kernels for the schemes of `outliers`; `reference` states each of them in plain torch."""
