"""The family cosmos3_edge: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("Cosmos3Edge", "Cosmos3EdgeProcessingInfo")},
    features=(
        "the reasoner of Cosmos 3 Edge: SigLIP 2 at native resolution, a decoder with squared ReLUs and interleaved M-RoPE, "
        "a timestamp before each frame of a video"
    ),
    limits="text output only; aspect ratio up to 200:1; weights of the generator and actions are not read",
)
