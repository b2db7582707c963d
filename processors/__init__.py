"""Input processing: one file per model family, chat templates and tokenizers."""
