"""The family midashenglm: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("MiDashengLM", "MiDashengLMProcessingInfo"),
    },
    features="`transcribe`; mel bands of 64 in patches of 40 ms, which attend within 10 s; rows joined by five",
    limits="20 minutes per audio item",
)
