"""WHAT an input is: types, geometry, positions, media decoding, items, fields, hashing, the registry. No model, no engine."""
