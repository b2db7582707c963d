"""The family voxtral: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "VoxtralConsolidated": ("VoxtralConsolidated", "VoxtralProcessingInfo"),
        "VoxtralForConditionalGeneration": ("Voxtral", "VoxtralProcessingInfo"),
    },
    features=(
        "`transcribe`; windows of 30 s, padded with silence; prompts as mistral-common writes them; the Hub's layout "
        "and the publisher's own"
    ),
)
