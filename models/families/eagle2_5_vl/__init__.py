"""The family eagle2_5_vl: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("EagleVL", "EagleVLProcessingInfo"),
    },
    features=(
        "SigLIP on tiles that keep most of an image's area and shape, with a thumbnail; the number of each image as "
        "text; videos as frames of one tile, each after its number and seconds; any text stack"
    ),
    limits="at most ten videos per prompt; no RADIO tower",
    takes_any_stack=True,
)
