"""The family aya_vision: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "AyaVisionForConditionalGeneration": ("AyaVision", "AyaVisionProcessingInfo"),
        "Cohere2VisionForConditionalGeneration": ("Cohere2Vision", "Cohere2VisionProcessingInfo"),
    },
    features="tiles by the best aspect ratio (Aya Vision) or least enlarged (Cohere2-Vision), a gated projector",
    takes_any_stack=True,
)
