"""The family fireredasr2: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"*": ("FireRedAsr2", "FireRedAsr2ProcessingInfo")},
    features=(
        "FireRedASR2-LLM: `transcribe`; a conformer over normalised frames of Kaldi's filter bank, pairs of rows "
        "projected, Qwen2"
    ),
    limits="65 ms to 30 s per audio item; not the publisher's AED checkpoints, which are pickled",
)
