"""The family molmo2: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Molmo2", "Molmo2ProcessingInfo"),
    },
    features=(
        "a small view and overlapping crops of an image, frames with their times; attention pooling of patches; the "
        "tokens of all pictures see each other; points, also in several images and in videos; the Hub's layout and "
        "the publisher's"
    ),
    limits=(
        "images, or one video, per prompt; at most 8 crops; the last frame of a video is used where the JSON says "
        "so, and no frame twice"
    ),
)
