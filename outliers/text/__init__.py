"""Texts: from named sources, files and Python objects to blocks of token ids."""
