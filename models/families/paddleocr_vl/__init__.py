"""The family paddleocr_vl: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("PaddleOcrVL", "PaddleOcrVLProcessingInfo"),
    },
    features="pages at native resolution; text config nested or at the top level",
    limits="aspect ratio up to 200:1",
    use="documents",
)
