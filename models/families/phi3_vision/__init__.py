"""The family phi3_vision: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Phi3V", "Phi3VProcessingInfo"),
    },
    features="CLIP over padded tiles and the whole image, squares of patches in lines; Phi-3-vision, Phi-3.5-vision",
    limits="sequences up to the length of short rope factors (4,096 tokens)",
)
