"""Inputs: data types, geometry, positions, media decoding, items, fields, hashing, caches and the model registry."""
