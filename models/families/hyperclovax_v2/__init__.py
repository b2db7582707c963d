"""The family hyperclovax_v2: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("HyperClovaXV2", "HyperClovaXV2ProcessingInfo")},
    features=(
        "HyperCLOVA X SEED Think: Qwen2.5-VL's tower, a linear projector, HyperCLOVA X; the Hub's layout and the publisher's"
    ),
    limits="aspect ratio up to 200:1; the text `<|video_duration|>` of a prompt is not replaced by the seconds of its video",
    takes_any_stack=True,
)
