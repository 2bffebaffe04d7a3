"""GGUF files: their headers, tensors and tokenizers, and the rotary scaling that transformers does not read."""

from outliers.models.gguf.reader import (
    MODEL_TYPES,
    check_tensors,
    read_config,
    read_tensors,
    stored_type,
    unread_fields,
)
from outliers.models.gguf.tokenizer import read_tokenizer

__all__ = [
    "MODEL_TYPES",
    "check_tensors",
    "read_config",
    "read_tensors",
    "read_tokenizer",
    "stored_type",
    "unread_fields",
]
