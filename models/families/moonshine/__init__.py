"""The family moonshine: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "MoonshineForConditionalGeneration": ("Moonshine", "MoonshineProcessingInfo"),
        "MoonshineStreamingForConditionalGeneration": ("MoonshineStreaming", "MoonshineStreamingProcessingInfo"),
    },
    features=("`transcribe`; encoder-decoder: cross-attention; encodes waveforms, not spectrograms; also Moonshine Streaming"),
    limits="30 s per audio item of a prompt",
)
