"""GGUF files: their header, their tensors, and the rotary scaling that transformers leaves out."""

from outliers.models.gguf.reader import check_tensors, read_config, read_tensors, read_tokenizer, stored_type

__all__ = ["check_tensors", "read_config", "read_tensors", "read_tokenizer", "stored_type"]
