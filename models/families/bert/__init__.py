"""The family bert: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "NewForTokenClassification": ("Bert", "BertProcessingInfo"),
        "*ForSequenceClassification": ("BertClassifier", "BertProcessingInfo"),
        "*ForTokenClassification": ("BertTokenClassifier", "BertProcessingInfo"),
        "*": ("Bert", "BertProcessingInfo"),
    },
    features=(
        "text encoders for `embed` (mean or CLS pooling, as 1_Pooling/config.json says), `classify`, and classes of "
        'tokens (`encode(..., pooling_task="token_classify")`); `score` of pairs with cross-encoders; learned '
        "positions, rotary ones (Nomic, GTE) or a bias of scores (MPNet); the Hub's layout and the publishers'"
    ),
    limits="vectors and classes only; heads of other tasks are not used",
    other_tests="tests/models/families/test_bert.py, tests/models/families/test_classification.py",
    use="retrieval",
)
