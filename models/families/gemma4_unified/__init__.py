"""The family gemma4_unified: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Gemma4Unified", "Gemma4UnifiedProcessingInfo"),
    },
    features=(
        "Gemma 4 12B: no encoders; squares of 48 pixels and 40 ms of samples are projected to rows; `transcribe`; "
        "sizes, times and options as in Gemma 4"
    ),
    limits="30 s per audio item",
)
