"""The family molmo: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Molmo", "MolmoProcessingInfo"),
    },
    features=(
        "Molmo-7B-D, Molmo-7B-O and MolmoE-1B: a small view and overlapping crops of an image, padded, each patch "
        "marked if it is padding; attention pooling of patches; points"
    ),
    limits="images only, before the text; at most 12 crops",
)
