"""The family idefics2: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Idefics2", "Idefics2ProcessingInfo"),
    },
    features="an image as four quarters and as a whole, each at its own size; perceiver resampler",
    takes_any_stack=True,
)
