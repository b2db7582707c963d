"""The family fun_asr_nano: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("FunAsrNano", "FunAsrNanoProcessingInfo"),
    },
    features=(
        "`transcribe`, with words to expect as `context`; SenseVoice's encoder over frames stacked every 60 ms; "
        "transformers' checkpoint with a token per 60 ms, or the publisher's for vLLM with one per 480 ms"
    ),
    limits="122 s per audio item; no CTC head (times of words); features without dither",
)
