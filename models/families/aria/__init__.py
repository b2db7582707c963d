"""The family aria: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Aria", "AriaProcessingInfo"),
    },
    features=(
        "images at their own aspect ratio up to 980 pixels, or crops of them (`split_image`); learned queries read "
        "the rows; a decoder of experts"
    ),
    takes_any_stack=True,
)
