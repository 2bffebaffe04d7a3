"""Remedies, which lower the cost of quantization; a file each."""
