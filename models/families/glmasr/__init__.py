"""The family glmasr: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("GlmAsr", "GlmAsrProcessingInfo"),
    },
    features="`transcribe`; rotary positions in the tower, rows stacked by four",
    limits="630 s per audio item",
)
