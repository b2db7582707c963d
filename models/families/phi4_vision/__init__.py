"""The family phi4_vision: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("Phi4Vision", "Phi4VisionProcessingInfo")},
    features=(
        "Phi-4-reasoning-vision: SigLIP 2 (NaFlex) on whole images, near their own size between 256 and 3,600 patches "
        "(`max_num_patches`), a row per patch; Phi-4"
    ),
    limits="no videos; towers without NaFlex are refused",
)
