"""The family cohere_asr: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "CanaryForConditionalGeneration": ("Canary", "CanaryProcessingInfo"),
        "CohereAsrForConditionalGeneration": ("CohereAsr", "CohereAsrProcessingInfo"),
    },
    features=(
        "`transcribe`: FastConformer and a decoder with cross-attention; Cohere's transcription models "
        "(transformers' names or the publisher's) and Canary, which also translates"
    ),
    limits="35 s (Cohere) or 40 s (Canary) per audio item of a prompt; the language must be given, or is English",
)
