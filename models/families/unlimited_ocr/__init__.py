"""The family unlimited_ocr: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("UnlimitedOcr", "UnlimitedOcrProcessingInfo"),
    },
    features=(
        "Unlimited-OCR: DeepSeek-OCR's encoders, and a decoder whose answers read the prompt and their own last 128 tokens, so "
        "that the keys of a sequence take no more memory as its answer grows; up to 32 tiles per image, `crop_to_patches` "
        "false for several pages; the Hub's layout and the publisher's own"
    ),
    limits="no drafted tokens",
    use="documents",
)
