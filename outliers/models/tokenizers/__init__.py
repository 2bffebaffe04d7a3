"""Tokenizers of folders and repositories: their files, their limits, and which file counts if they disagree."""

from outliers.models.tokenizers.folder import check_size, read_folder_tokenizer

__all__ = ["check_size", "read_folder_tokenizer"]
