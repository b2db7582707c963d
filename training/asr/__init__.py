"""tiny-asr: speech data, model, training, export and evaluation."""
