"""The family pixtral: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "LlavaForConditionalGeneration/pixtral": ("Pixtral", "PixtralProcessingInfo"),
        "Mistral3Consolidated": ("Mistral3Consolidated", "MistralFormatProcessingInfo"),
        "Mistral3ForConditionalGeneration": ("Mistral3", "Mistral3ProcessingInfo"),
        "PixtralConsolidated": ("PixtralConsolidated", "MistralFormatProcessingInfo"),
    },
    features="2-D rotary tower, a token between rows of patches, patch merger; the Hub's layout and the publisher's own",
    takes_any_stack=True,
)
