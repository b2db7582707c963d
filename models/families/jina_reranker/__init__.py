"""The family jina_reranker: its classes, and what docs/models.md says about it."""

from ...registry import Family

FAMILY = Family(
    classes={
        "*": ("JinaReranker", "JinaRerankerProcessingInfo"),
    },
    features=("jina-reranker-m0: `score` of documents, texts or images, for a query; Qwen2-VL with an MLP over the last token"),
    limits="scores only; one image or text on each side, no videos",
    other_tests="tests/pipelines/test_jina_reranker.py",
    use="retrieval",
)
