"""The family ultravox: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Ultravox", "UltravoxProcessingInfo"),
    },
    features="rows stacked by eight, any decoder; tower and decoder may be in other repositories",
    takes_any_stack=True,
)
