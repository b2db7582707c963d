"""Products of quantised weights in Triton."""
