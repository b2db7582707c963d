"""The family llava: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "LlavaForConditionalGeneration": ("Llava", "LlavaProcessingInfo"),
        "LlavaNextForConditionalGeneration": ("LlavaNext", "LlavaNextProcessingInfo"),
        "LlavaOnevisionForConditionalGeneration": ("LlavaOnevision", "LlavaOnevisionProcessingInfo"),
        "MiniMaxVL01ForConditionalGeneration": ("MiniMaxVL", "MiniMaxVLProcessingInfo"),
        "Mineru2QwenForCausalLM": ("Mineru2", "Mineru2ProcessingInfo"),
        "TarsierForConditionalGeneration": ("Llava", "TarsierProcessingInfo"),
    },
    features=(
        "one or several encoder layers of CLIP or SigLIP; grids of tiles with newline rows; pooled videos; Tarsier; "
        "MinerU 2.0 (`output.elements` with text and tables)"
    ),
    takes_any_stack=True,
)
