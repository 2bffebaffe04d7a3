"""Schemes, the quantized linear layer, and the conversion of a whole model."""
