"""The family isaac: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Isaac", "IsaacProcessingInfo"),
    },
    features=(
        "images at native size within bounds on patches; M-RoPE that shifts only time; answers with points, boxes and polygons"
    ),
)
