"""The family video_llama_3: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("VideoLlama3", "VideoLlama3ProcessingInfo")},
    features=(
        "VideoLLaMA3: images and frames at native resolution, the time of each frame as text; rows of a frame that resembles "
        "the one before are left out (`use_token_compression`), which the decoded video tells"
    ),
    limits=(
        "the Hub's layout; aspect ratio up to 200:1; compression that leaves fewer than one row in 16 is refused; "
        "rows of videos are an upper bound until they are decoded"
    ),
    takes_any_stack=True,
)
