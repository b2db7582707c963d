"""The family llava_onevision2: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("LlavaOnevision2", "LlavaOnevision2ProcessingInfo")},
    features=(
        "LLaVA-OneVision-2: images and frames at native resolution, a tower whose patches know their frame's number in the "
        "source, the seconds of each frame as text; Qwen3, also with experts"
    ),
    limits='no videos packed by their codec (`video_backend="codec"`): videos are sampled frames; aspect ratio up to 200:1',
    takes_any_stack=True,
)
