"""The family qwen2_audio: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Qwen2Audio", "Qwen2AudioProcessingInfo"),
    },
    features="`transcribe`; Whisper's tower, rows averaged in pairs",
    limits="30 s per audio item",
)
