"""The family deepseek_vl2: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("DeepseekVL2", "DeepseekVL2ProcessingInfo"),
    },
    features=(
        "the whole image and tiles of the best size, padded; lines ended by a learned row; latent attention or not, "
        "experts; the publisher's layout"
    ),
)
