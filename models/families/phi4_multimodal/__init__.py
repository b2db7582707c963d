"""The family phi4_multimodal: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "Phi4MMForCausalLM": ("Phi4Multimodal", "Phi4MMProcessingInfo"),
        "Phi4MultimodalForCausalLM": ("Phi4Multimodal", "Phi4MultimodalProcessingInfo"),
    },
    features=(
        "SigLIP over padded tiles and the whole image, conformer, one adapter per modality (the image's if there is "
        "one), transcription; the publisher's layout (`phi4mm`) too"
    ),
    limits="sequences up to the length of short rope factors (4,096 tokens)",
    other_tests="`tests/models/families/test_phi4_multimodal.py`",
)
