"""The family kimi_audio: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("KimiAudio", "KimiAudioProcessingInfo"),
    },
    features=(
        "Kimi-Audio: `transcribe`; Whisper's encoder (the checkpoint's folder `whisper-large-v3`), rows stacked by "
        "four; two streams of tokens, summed; text output only"
    ),
    limits="10 minutes per audio item; without the codes of GLM-4-Voice's tokenizer, which the publisher adds to the rows",
)
