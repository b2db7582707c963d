"""The family nvlm_d: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("NvlmD", "NvlmDProcessingInfo")},
    features="InternVL's layers and layout, a wider projector without biases; the number of each tile as text before its rows",
    limits="no videos",
    takes_any_stack=True,
)
