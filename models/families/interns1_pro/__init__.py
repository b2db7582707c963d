"""The family interns1_pro: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("InternS1Pro", "InternS1ProProcessingInfo")},
    features=(
        "Qwen3-VL's tower and timestamps as text; positions of one axis with mixed frequencies (FoPE); every group of experts "
        "gives the same number"
    ),
    limits="2048 frames per video; aspect ratio up to 200:1; no time series; molecules and proteins are encoded as other text",
)
