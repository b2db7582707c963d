"""The family kanana_v: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("KananaV", "KananaVProcessingInfo")},
    features=(
        "Kanana-1.5-v: Qwen2-VL's tower, convolutions with factors per channel (a C-Abstractor), Llama; lines of an image end "
        "with a newline, and text between roles and images is tokenised by itself"
    ),
    limits="no videos; aspect ratio up to 200:1",
)
