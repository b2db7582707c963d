"""The family modernbert: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*Classification": ("ModernBertClassifier", "bert:BertProcessingInfo"),
        "*": ("ModernBert", "bert:BertProcessingInfo"),
    },
    features=(
        "text encoder with rotary positions and sliding windows, for `embed`, `classify`, classes of tokens "
        '(`encode(..., pooling_task="token_classify")`), and `score` of pairs'
    ),
    limits="vectors and classes only; heads of other tasks are not used",
    other_tests="tests/models/families/test_bert.py, tests/models/families/test_classification.py",
    use="retrieval",
)
