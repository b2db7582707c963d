"""The family llava_next_video: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("LlavaNextVideo", "LlavaNextVideoProcessingInfo")},
    features="LLaVA-NeXT with videos: the centre square of each frame, squares of 2 x 2 patches pooled before the projector",
    limits="pooling by average or maximum",
    takes_any_stack=True,
)
