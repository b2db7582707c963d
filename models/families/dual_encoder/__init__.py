"""The family dual_encoder: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "CLIPModel": ("Clip", "ClipProcessingInfo"),
        "Siglip2Model": ("SiglipNaflex", "SiglipProcessingInfo"),
        "SiglipModel": ("Siglip", "SiglipProcessingInfo"),
    },
    features=(
        "`embed` of texts and images: CLIP, SigLIP, SigLIP 2 at a fixed size or with the image's aspect ratio "
        "(NaFlex); `score`: cosines, for SigLIP probabilities"
    ),
    limits="a prompt is a text or one image",
    other_tests="tests/models/families/test_embedders.py",
    use="retrieval",
)
