"""The family moss_transcribe: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("MossTranscribe", "MossTranscribeProcessingInfo")},
    features=(
        "MOSS-Transcribe-Diarize: `transcribe`; windows of 30 s, seconds written between the rows of audio; "
        "the Hub's layout and the publisher's"
    ),
    limits="90 minutes per audio item; `transcribe` returns the text without the speakers and times that `chat` shows",
)
