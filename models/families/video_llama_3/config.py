"""Constants that the input processing and the model of VideoLLaMA3 share."""

MERGES = {"image": 1, "video": 2}
"""Patches along a side of the square that makes one row."""
MAX_RATIO = 16
"""Rows of a video before compression per row that is left, at most."""
