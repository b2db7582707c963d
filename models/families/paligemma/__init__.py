"""The family paligemma: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("PaliGemma", "PaliGemmaProcessingInfo"),
    },
    features="images before the prompt, without placeholders; bidirectional attention in the prompt",
    takes_any_stack=True,
)
