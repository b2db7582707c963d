"""The family llama4: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Llama4", "Llama4ProcessingInfo"),
    },
    features=(
        "tiles of the best canvas, then the whole image; attention within chunks, layers without positions, experts "
        "with a shared one"
    ),
)
