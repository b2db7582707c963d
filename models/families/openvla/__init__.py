"""The family openvla: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("OpenVLA", "OpenVLAProcessingInfo")},
    features=(
        "OpenVLA: DINOv2 and SigLIP on a square image after the first token, their rows joined; Llama; answers are tokens of "
        "actions"
    ),
    limits="one image per prompt; tokens of actions are not turned into numbers",
)
