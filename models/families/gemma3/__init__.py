"""The family gemma3: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Gemma3", "Gemma3ProcessingInfo"),
    },
    features=(
        "bidirectional attention within an image, sliding windows in most layers, norms before and after each "
        "sublayer; pan and scan"
    ),
    takes_any_stack=True,
)
