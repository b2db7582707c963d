"""The files of a checkpoint: index and weights, publishers' layouts, stored formats, adapters, tokenizers, GGUF."""
