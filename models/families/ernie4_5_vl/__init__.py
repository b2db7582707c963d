"""The family ernie4_5_vl: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Ernie45VL", "Ernie45VLProcessingInfo"),
    },
    features="frames merged in pairs, separate experts for images and videos, timestamps drawn onto frames",
    limits="aspect ratio up to 200:1",
)
