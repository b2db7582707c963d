"""The family bart: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Bart", "BartProcessingInfo"),
    },
    features=(
        "text-to-text (BART): a prompt is the encoder's text, the decoder begins with its start token; or "
        '`{"encoder_prompt": ..., "decoder_prompt": ...}`'
    ),
    limits="no chats; beam search and other published settings of generation are not used",
    other_tests="tests/models/families/test_bart.py",
)
