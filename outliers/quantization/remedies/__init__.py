"""Remedies that lower the cost of quantization; a file each."""
