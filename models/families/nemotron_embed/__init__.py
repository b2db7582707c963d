"""The family nemotron_embed: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "LlamaNemotronVLForSequenceClassification": ("NemotronRerank", "NemotronEmbedProcessingInfo"),
        "LlamaNemotronVLModel": ("NemotronEmbed", "NemotronEmbedProcessingInfo"),
    },
    features=(
        "Llama-Nemotron-Embed-VL: SigLIP, a Llama whose tokens see each other, `embed` of texts and images; its reranker "
        "(`classify`)"
    ),
    limits="prompts are taken as they are, so callers write their prefixes (query, passage)",
    other_tests="tests/models/families/test_embedders.py, tests/models/families/test_nemotron_embed.py",
    use="retrieval",
)
