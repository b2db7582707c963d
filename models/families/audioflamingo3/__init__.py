"""The family audioflamingo3: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "AudioFlamingo3ForConditionalGeneration": ("AudioFlamingo3", "AudioFlamingo3ProcessingInfo"),
        "MusicFlamingoForConditionalGeneration": ("MusicFlamingo", "AudioFlamingo3ProcessingInfo"),
    },
    features="`transcribe`; windows of 30 s, rows averaged in pairs; Music Flamingo rotates rows by their time",
    limits="10 minutes per audio item, Music Flamingo 20",
)
