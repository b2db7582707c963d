"""The family moondream3: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("Moondream3", "Moondream3ProcessingInfo")},
    features=(
        "Moondream 3: overlapping crops of an image, joined and pooled beside the small view; queries and values scaled by "
        "token and position; experts from the fifth layer on"
    ),
    limits="one image per prompt, which comes first; no points and boxes; the tokenizer is in a repository of its own",
)
