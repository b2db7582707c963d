"""The family whisper: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Whisper", "WhisperProcessingInfo"),
    },
    features="`transcribe`; encoder-decoder: cross-attention, language and task tokens, timestamp rules",
    limits="30 s per audio item of a prompt",
    other_tests="tiny.en's real weights on real speech",
)
