"""GGUF files: their header, their tensors, and the rotary scaling that transformers leaves out."""
