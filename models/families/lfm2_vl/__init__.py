"""The family lfm2_vl: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Lfm2VL", "Lfm2VLProcessingInfo"),
    },
    features="small images at their own size, large ones as tiles and a thumbnail; layers with states",
    takes_any_stack=True,
)
