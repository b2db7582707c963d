"""The family dots_ocr: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("DotsOcr", "DotsOcrProcessingInfo"),
    },
    features="pages at native resolution; layout elements as JSON",
    limits="aspect ratio up to 200:1",
    use="documents",
)
