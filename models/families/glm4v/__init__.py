"""The family glm4v: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "Glm46VForConditionalGeneration": ("Glm4V", "Glm46VProcessingInfo"),
        "Glm4vMoeForConditionalGeneration": ("Glm4VMoe", "Glm4VProcessingInfo"),
        "Glm4vForConditionalGeneration": ("Glm4V", "Glm4VProcessingInfo"),
        "GlmOcrForConditionalGeneration": ("GlmOcr", "GlmOcrProcessingInfo"),
    },
    features=(
        "timestamps between frames as text, rotary positions on half of each head; norms before and after each "
        "sublayer, or a mixture of experts; GLM-OCR with its own tower; `load_mtp` for GLM-4.5V and GLM-OCR"
    ),
    other_tests="tests/models/families/test_mtp.py (multi-token prediction)",
)
