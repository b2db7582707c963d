"""Parts of `transcribe`: voice detection, windows of long audio, merging of their texts, and results."""
