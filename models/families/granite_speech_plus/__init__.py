"""The family granite_speech_plus: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("GraniteSpeechPlus", "granite_speech:GraniteSpeechProcessingInfo")},
    features="`transcribe`; Granite Speech, whose query transformer also reads earlier states of the conformer",
)
