"""The family granite4_vision: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Granite4Vision", "Granite4VisionProcessingInfo"),
    },
    features="query transformer outputs added after several layers (DeepStack); grids of tiles",
)
