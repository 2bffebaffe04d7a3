"""GGUF files: their header, their tensors, and the rotary scaling that transformers leaves out."""

from outliers.models.gguf.header import read_header
from outliers.models.gguf.reader import check_tensors, read_config, read_tensors, read_tokenizer

__all__ = ["check_tensors", "read_config", "read_header", "read_tensors", "read_tokenizer"]
