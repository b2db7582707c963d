"""GGUF files: their metadata, tensors, tokenizer and image settings, under the names of the Hub's layout."""
