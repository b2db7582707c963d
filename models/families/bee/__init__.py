"""The family bee: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "BeeForConditionalGeneration": ("Bee", "BeeProcessingInfo"),
        "RForConditionalGeneration": ("R", "BeeProcessingInfo"),
    },
    features="Bee and R-4B: LLaVA-OneVision's tiles in lines, pooled if there are many; a norm before the projector; Qwen3",
    limits="no videos",
    takes_any_stack=True,
)
