"""The family lighton_ocr: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("LightOnOcr", "LightOnOcrProcessingInfo"),
    },
    features="pages at native resolution; incomplete squares of merged patches are dropped; no break tokens",
    use="documents",
    takes_any_stack=True,
)
