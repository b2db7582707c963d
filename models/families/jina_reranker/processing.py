"""Input processing of jina-reranker-m0: a document, a query, and the token whose hidden state is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....processors.bases.native import IMAGE_KWARGS
from ..qwen2_vl.processing import Qwen2VLProcessingInfo

_SCORE_TOKEN = 100
_TEMPLATE = (
    "{% for m in messages %}{{ '**Document**:\\n' if loop.first else '\\n**Query**:\\n' }}"
    "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}"
)


class JinaRerankerProcessingInfo(Qwen2VLProcessingInfo):
    """ProcessingInfo of jina-reranker-m0. `score` sends a document and a query as two messages."""

    rewrites_prompts = True
    modalities = ("image",)
    valid_kwargs = {"image": IMAGE_KWARGS}
    placeholders = {"image": ("image_token_id", 151655)}
    default_kwargs = {"min_pixels": 56 * 56, "max_pixels": 768 * 28 * 28}
    chat_template = _TEMPLATE

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return [*ids, _SCORE_TOKEN]
