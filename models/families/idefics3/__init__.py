"""The family idefics3: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "Idefics3ForConditionalGeneration": ("Idefics3", "Idefics3ProcessingInfo"),
        "SmolVLMForConditionalGeneration": ("Idefics3", "SmolVLMProcessingInfo"),
    },
    features="rows of tiles with text tags, pixel shuffle",
    takes_any_stack=True,
)
