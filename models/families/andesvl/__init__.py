"""The family andesvl: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("AndesVL", "AndesVLProcessingInfo")},
    features="images near their own size, on a canvas of whole squares; AIMv2 with rotary positions, Qwen3",
    limits="no videos; images of at most about 733 x 733 pixels, larger ones are shrunk; AIMv2 only",
    takes_any_stack=True,
)
