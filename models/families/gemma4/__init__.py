"""The family gemma4: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Gemma4", "Gemma4ProcessingInfo"),
    },
    features=(
        "images and frames at their own aspect ratio within 70 to 1,120 rows, averages of 3 x 3 patches; times "
        "before frames; audio of up to 30 s through a conformer with attention to the last 12 rows; per-layer "
        "inputs, shared KV caches"
    ),
)
