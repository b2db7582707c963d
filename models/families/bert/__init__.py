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
        "positions, rotary ones (Nomic, GTE), a bias of scores (MPNet) or disentangled attention (DeBERTa, V2 and V3); the "
        "Hub's layout and the publishers'"
    ),
    limits=(
        "vectors and classes only; heads of other tasks are not used; adapters of requests (LoRA) change no projection of "
        "DeBERTa that distances go through"
    ),
    other_tests=(
        "tests/models/families/test_bert.py, tests/models/families/test_deberta.py, "
        "tests/models/families/test_classification.py"
    ),
    use="retrieval",
)
