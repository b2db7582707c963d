"""The family colpali: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "ColModernVBertForRetrieval": ("ColModernVBert", "ColModernVBertProcessingInfo"),
        "ColPali": ("ColPali", "ColPaliProcessingInfo"),
        "ColPaliForRetrieval": ("ColPali", "ColPaliProcessingInfo"),
        "ColQwen2": ("ColQwen2", "ColQwenProcessingInfo"),
        "ColQwen2ForRetrieval": ("ColQwen2", "ColQwenProcessingInfo"),
        "ColQwen2ForRetrieval/qwen2_5_vl": ("ColQwen25", "ColQwenProcessingInfo"),
        "ColQwen2ForRetrieval/qwen2_5_vl_vision": ("ColQwen25", "ColQwenProcessingInfo"),
        "ColQwen2_5": ("ColQwen25", "ColQwenProcessingInfo"),
        "ColQwen3": ("ColQwen3", "ColQwen3ProcessingInfo"),
        "OpsColQwen3Model": ("ColQwen3", "ColQwen3ProcessingInfo"),
        "Qwen3VLNemotronEmbedModel": ("NemotronColEmbed", "NemotronColEmbedProcessingInfo"),
    },
    features=(
        "vectors of all tokens for late interaction: `embed` of pages and queries, `score` by MaxSim; ColPali, "
        "ColQwen2, ColQwen2.5, ColQwen3, Nemotron-ColEmbed-VL v2 (Qwen3-VL whose tokens see each other) and ColModernVBERT; "
        "the Hub's layout and the publisher's"
    ),
    limits="vectors only; no videos; prompts of ColQwen3 are those of ColQwen2 unless processor_config.json says otherwise",
    other_tests="tests/models/families/test_embedders.py",
    use="retrieval",
)
