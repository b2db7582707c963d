"""Places that keep tensors by the hash of their content: encoder rows and KV blocks, for this engine and for others."""
