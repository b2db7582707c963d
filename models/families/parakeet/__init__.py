"""The family parakeet: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "ParakeetForCTC": ("ParakeetCtc", "ParakeetProcessingInfo"),
        "ParakeetForRNNT": ("ParakeetTransducer", "ParakeetTransducerProcessingInfo"),
        "ParakeetForTDT": ("ParakeetTdt", "ParakeetTransducerProcessingInfo"),
    },
    features=("`transcribe`: FastConformer with a CTC head or a transducer (TDT, RNN-T), greedy; times of words from the rows"),
    limits=(
        "60 s per audio item; at most `max_symbols_per_step` tokens per row; a step decodes at most 64 rows (5 s) of a window"
    ),
    other_tests="tests/models/families/test_parakeet.py, tests/models/families/test_parakeet_transducer.py",
)
