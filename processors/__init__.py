"""WHAT a model wants to be fed: one file per family, chat templates and tokenizers."""
