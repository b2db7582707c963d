"""The family openpangu_vl: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("OpenPanguVL", "OpenPanguVLProcessingInfo")},
    features=(
        "a tower of windows, of which the last and third-last states are merged and added; every frame of a video is a grid of "
        "its own, between marks; M-RoPE with axes in turn"
    ),
    limits="aspect ratio up to 200:1; the sizes of a video's frames depend on its own frames alone",
)
