"""The family granite_speech: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("GraniteSpeech", "GraniteSpeechProcessingInfo"),
    },
    features="`transcribe`; conformer, query transformer over windows of rows; LoRA adapter for prompts with audio",
)
