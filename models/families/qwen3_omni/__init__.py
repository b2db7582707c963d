"""The family qwen3_omni: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Qwen3Omni", "Qwen3OmniProcessingInfo"),
    },
    features=(
        "images, videos and audio together; DeepStack, experts; `speak` answers in text and speech; also the "
        "captioner (audio without text)"
    ),
    limits="40 minutes per audio item",
    other_tests="tests/pipelines/test_speak_qwen3.py",
)
