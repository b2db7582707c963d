"""The family qwen3_asr: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Qwen3ASR", "Qwen3ASRProcessingInfo"),
    },
    features="`transcribe`; linear M-RoPE",
)
