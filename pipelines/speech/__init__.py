"""Parts of `transcribe`: voice detection, windows of long audio, their merging, and the results."""
