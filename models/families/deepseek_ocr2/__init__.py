"""The family deepseek_ocr2: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "DeepseekOCR2ForCausalLM": ("DeepseekOcr2", "DeepseekOcr2ProcessingInfo"),
        "DeepseekOCRForCausalLM": ("DeepseekOcr", "DeepseekOcrProcessingInfo"),
        "DeepseekOcr2ForConditionalGeneration": ("DeepseekOcr2", "DeepseekOcr2ProcessingInfo"),
    },
    features=(
        "SAM features, then CLIP (DeepSeek-OCR) or a decoder with learned queries (DeepSeek-OCR 2); tiles by the "
        "best aspect ratio, the whole image padded to a square; the Hub's layout and the publisher's own"
    ),
    use="documents",
)
