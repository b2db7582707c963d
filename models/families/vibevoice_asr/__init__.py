"""The family vibevoice_asr: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("VibeVoiceAsr", "VibeVoiceAsrProcessingInfo")},
    features=(
        "VibeVoice-ASR: `transcribe`, with words to expect as `context`; two encoders of waveforms at 24 kHz, 7.5 rows per "
        "second; who spoke when is in the answer of `chat`; `<|AUDIO_DURATION|>` after an audio item becomes its seconds; "
        "the Hub's layout and the publisher's"
    ),
    limits="61 minutes per audio item; rows without the noise that the published class adds by default",
)
