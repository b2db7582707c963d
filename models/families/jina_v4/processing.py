"""Input processing of jina-embeddings-v4: the published prompts for queries, passages and images."""

from __future__ import annotations

from ....processors.bases.native import IMAGE_KWARGS
from ..qwen2_vl.processing import Qwen2VLProcessingInfo

_PAGE = "<|im_start|>user\\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>\\n"
_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content if m.content is string else m.content[0].text }}{{ ': ' }}"
    "{% else %}{% for c in m.content %}{% if c.type != 'text' %}{{ '" + _PAGE + "' }}"
    "{% else %}{% if messages | length == 1 %}{{ 'Query: ' }}{% endif %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)


class JinaEmbeddingsV4ProcessingInfo(Qwen2VLProcessingInfo):
    """ProcessingInfo of jina-embeddings-v4. An instruction is the word before a text: "Query" or "Passage"."""

    modalities = ("image",)
    valid_kwargs = {"image": IMAGE_KWARGS}
    placeholders = {"image": ("image_token_id", 151655)}
    takes_instruction = False
    document_instruction = "Passage"
    chat_template = _TEMPLATE
