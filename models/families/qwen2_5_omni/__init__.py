"""The family qwen2_5_omni: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Qwen25Omni", "Qwen25OmniProcessingInfo"),
    },
    features="images, videos and audio together; timestamps as positions; `speak` answers in text and speech",
    limits="5 minutes per audio item",
    other_tests="tests/pipelines/test_speak.py",
)
