"""The family blip2: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("Blip2", "Blip2ProcessingInfo"),
    },
    features=(
        "BLIP-2 with OPT or any other decoder: an EVA tower over squares, a query transformer with 32 queries; images before "
        "the prompt, without placeholders"
    ),
    limits="no encoder-decoder models of text (Flan-T5), no scores of images for texts",
    takes_any_stack=True,
)
