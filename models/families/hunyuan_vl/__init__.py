"""The family hunyuan_vl: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("HunYuanVL", "HunYuanVLProcessingInfo"),
    },
    features=(
        "pages at native resolution, a learned row after each line; positions of four axes; text config nested or at "
        "the top level"
    ),
    limits="aspect ratio up to 200:1; no precomputed embeddings",
)
