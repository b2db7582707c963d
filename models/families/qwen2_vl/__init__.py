"""The family qwen2_vl: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "Qwen2VLForConditionalGeneration": ("Qwen2VL", "Qwen2VLProcessingInfo"),
        "Qwen2_5_VLForConditionalGeneration": ("Qwen25VL", "Qwen25VLProcessingInfo"),
        "Tarsier2ForConditionalGeneration": ("Qwen2VL", "Qwen2VLProcessingInfo"),
        "TarsierForConditionalGeneration/qwen2_vl": ("Qwen2VL", "Qwen2VLProcessingInfo"),
    },
    features="M-RoPE; Qwen2.5-VL: windows in the tower, seconds as positions; Tarsier2",
    limits="aspect ratio up to 200:1",
)
