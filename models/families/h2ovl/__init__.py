"""The family h2ovl: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("H2OVL", "H2OVLProcessingInfo")},
    features=(
        "InternVL's layers and layout; an image that is alone in a prompt is cut into tiles at two scales, if `use_msac` of "
        "config.json or of `mm_processor_kwargs` says so"
    ),
    limits="no videos",
    takes_any_stack=True,
)
