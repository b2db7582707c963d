"""The family kokoro: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "KokoroForTextToSpeech": ("Kokoro", "KokoroProcessingInfo"),
    },
    features=(
        "`speak`: texts or phonemes become speech at 24 kHz with times of words (StyleTTS 2 with an iSTFTNet); published "
        "checkpoints (kokoro-v1_0.pth) and voices as they are"
    ),
    limits="510 phonemes per sentence; longer texts are cut",
    other_tests="tests/models/families/test_kokoro.py, tests/pipelines/test_speak_kokoro.py",
    use="speech",
)
