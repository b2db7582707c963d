"""The family got_ocr2: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "GOTQwenForCausalLM": ("GotOcr2", "GotProcessingInfo"),
        "GotOcr2ForConditionalGeneration": ("GotOcr2", "GotOcr2ProcessingInfo"),
    },
    features=(
        "pages as squares of one size, or cut into tiles with `crop_to_patches`; the Hub's layout and the publisher's own"
    ),
    use="documents",
    takes_any_stack=True,
)
