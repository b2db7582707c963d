"""The family nemotron_asr_streaming: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={"NemotronAsrStreamingForRNNT": ("NemotronAsrStreaming", "NemotronAsrStreamingProcessingInfo")},
    features=(
        "`transcribe`: cache-aware FastConformer with a transducer (RNN-T), greedy; live streams encode each chunk once; times "
        "of words from the rows"
    ),
    limits=(
        "60 s per audio item; the lookahead is `default_num_lookahead_tokens` of `encoder_config`; at most "
        "`max_symbols_per_step` tokens per row"
    ),
    other_tests="tests/models/families/test_nemotron_asr_streaming.py",
)
