"""The family qwen3_asr: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*TokenClassification": ("Qwen3ForcedAligner", "Qwen3ASRProcessingInfo"),
        "*/qwen3_forced_aligner": ("Qwen3ForcedAligner", "Qwen3ASRProcessingInfo"),
        "*": ("Qwen3ASR", "Qwen3ASRProcessingInfo"),
    },
    features=(
        "`transcribe`; linear M-RoPE; Qwen3-ForcedAligner classifies the tokens `<timestamp>` of a text "
        '(`encode(..., pooling_task="token_classify")`)'
    ),
    other_tests="tests/models/families/test_forced_aligner.py (the forced aligner)",
)
