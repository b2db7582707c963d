"""The family bagel: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Bagel", "BagelProcessingInfo"),
    },
    features=(
        "understanding with BAGEL-7B-MoT: images at native resolution, resized as in its app, to 512 to 1,024 pixels "
        "a side, then at most 980; the tokens of an image see each other and have one position; the publisher's "
        "files, in which sections of the config are files of their own"
    ),
    limits="no generation of images; its weights are not read",
)
