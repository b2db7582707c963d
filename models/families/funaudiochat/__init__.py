"""The family funaudiochat: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("FunAudioChat", "FunAudioChatProcessingInfo"),
    },
    features="Fun-Audio-Chat: `transcribe`; five tokens per second of audio; text output only",
    limits="30 s per audio item, or as the preprocessor says",
    takes_any_stack=True,
)
