"""Tokenizers as publishers ship them, converted for the `tokenizers` library."""
