"""The family text_only: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "InternLM2ForCausalLM": ("InternLM2", "TextProcessingInfo"),
        "MistralConsolidated": ("MistralText", "TextProcessingInfo"),
        "VoyageQwen3BidirectionalEmbedModel": ("Voyage", "bert:BertProcessingInfo"),
        "Qwen2ForRewardModel": ("RewardModel", "TextProcessingInfo"),
        "Qwen2ForProcessRewardModel": ("RewardModel", "TextProcessingInfo"),
        "*ForSequenceClassification": ("TextClassifier", "TextProcessingInfo"),
        "*": ("TextModel", "TextProcessingInfo"),
    },
    features=(
        "decoders without an encoder, which take text only; `model_type` selects the decoder; `embed`, `score`, "
        "`classify` and `reward`; voyage-4-nano (bidirectional); `load_mtp` for DeepSeek V3, GLM-4.5 and Qwen3-Next"
    ),
    other_tests="tests/models/families/test_mtp.py (multi-token prediction)",
    takes_any_stack=True,
    is_text_stack=True,
)
