"""The family nemotron_omni: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("NemotronOmni", "NemotronOmniProcessingInfo"),
    },
    features=(
        "Nemotron 3 Omni: Nemotron-Nano-VL with images at their own resolution, frames joined in pairs, and FastConformer for "
        "audio; the publisher's layout and transformers'; any text stack, also Nemotron-H with experts"
    ),
    limits=(
        "audio up to the encoder's `max_position_embeddings` rows (6:40), in one piece; an image's patches do not depend on "
        "the other images of the prompt"
    ),
    other_tests="tests/models/families/test_nemotron_omni.py, tests/processors/families/test_nemotron_omni.py",
    takes_any_stack=True,
)
