"""The family keye: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "KeyeForConditionalGeneration": ("KeyeVL", "KeyeProcessingInfo"),
        "KeyeVL1_5ForConditionalGeneration": ("KeyeVL15", "Keye15ProcessingInfo"),
    },
    features=(
        "SigLIP with rotary positions, a Qwen3 decoder with M-RoPE; 1.5: a timestamp before each frame, slow and "
        'fast frames (`frame_types`, given or "auto": by the similarity of frames)'
    ),
    limits="aspect ratio up to 200:1; 1.5: all frames are slow unless `frame_types` is given",
    other_tests="tests/processors/families/test_keye.py",
)
