"""The family opencua: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("OpenCUA", "OpenCUAProcessingInfo")},
    features="Qwen2.5-VL's tower, Qwen2 with positions of one axis",
    limits="no videos; aspect ratio up to 200:1",
)
