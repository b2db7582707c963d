"""The family voxtral_realtime: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "VoxtralRealtimeConsolidated": ("VoxtralRealtimeConsolidated", "VoxtralRealtimeProcessingInfo"),
        "VoxtralRealtimeForConditionalGeneration": ("VoxtralRealtime", "VoxtralRealtimeProcessingInfo"),
    },
    features=(
        "`transcribe`; causal encoder with a window; encoder rows are added to the prompt and to generated tokens; "
        "the delay is that of config.json; the Hub's layout, and the publisher's own with the delay of tekken.json"
    ),
    limits="one audio item of 60 s per prompt",
)
