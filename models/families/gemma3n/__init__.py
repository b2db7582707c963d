"""The family gemma3n: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Gemma3n", "Gemma3nProcessingInfo"),
    },
    features=(
        "`transcribe`; images as squares of 768 pixels in 256 rows through MobileNetV5, audio of up to 30 s in 188 "
        "rows through a conformer; several residual streams, per-layer inputs, shared KV caches"
    ),
)
