"""The family qwen3_vl: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "InternS2PreviewForConditionalGeneration": ("Qwen35Moe", "Qwen35ProcessingInfo"),
        "Qwen3VLForConditionalGeneration": ("Qwen3VL", "Qwen3VLProcessingInfo"),
        "Qwen3VLMoeForConditionalGeneration": ("Qwen3VLMoe", "Qwen3VLProcessingInfo"),
        "Qwen3_5ForConditionalGeneration": ("Qwen35", "Qwen35ProcessingInfo"),
        "Qwen3_5MoeForConditionalGeneration": ("Qwen35Moe", "Qwen35ProcessingInfo"),
    },
    features=(
        "DeepStack, interleaved M-RoPE, timestamps as text, experts, gated delta nets (Qwen3.5, Intern-S2-Preview); "
        "`embed` and `score`; `load_mtp` for Qwen3.5"
    ),
    limits="2048 frames per video; aspect ratio up to 200:1; Intern-S2-Preview: no time series",
    other_tests=(
        "tests/pipelines/test_rank.py (vectors and scores), tests/models/families/test_mtp.py (multi-token prediction)"
    ),
)
