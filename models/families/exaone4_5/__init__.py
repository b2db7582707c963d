"""The family exaone4_5: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("Exaone45", "Exaone45ProcessingInfo")},
    features="Qwen2.5-VL's tower with fewer heads of keys and values, EXAONE 4; positions of one axis",
    limits="aspect ratio up to 200:1",
)
