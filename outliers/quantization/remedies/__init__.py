"""What can be done so that quantization costs less; a file each."""
