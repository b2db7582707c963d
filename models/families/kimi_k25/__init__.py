"""The family kimi_k25: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "KimiK25ForConditionalGeneration": ("KimiK25", "KimiK25ProcessingInfo"),
        "KimiVLForConditionalGeneration": ("KimiVL", "KimiVLProcessingInfo"),
        "Kimi_K25ForConditionalGeneration": ("KimiK25", "KimiK25ProcessingInfo"),
    },
    features=(
        "images and timed chunks of videos in one stream, frames of a chunk averaged, latent attention, grouped "
        "experts; Kimi-VL: images only"
    ),
    limits="4 frames per chunk",
    takes_any_stack=True,
)
