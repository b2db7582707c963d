"""The family jina_v4: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("JinaEmbeddingsV4", "JinaEmbeddingsV4ProcessingInfo"),
    },
    features=(
        'jina-embeddings-v4: `embed` of texts and images, one vector or `pooling="tokens"`; the adapter of a task '
        'is merged when the model is loaded (`hf_overrides={"task": "code"}`)'
    ),
    limits="vectors only; one task per engine",
    other_tests="tests/pipelines/test_jina_v4.py",
    use="retrieval",
)
