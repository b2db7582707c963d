"""Names of InternLM2's tensors, and the layout of its attention (the publisher's modeling_internlm2.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from .text.attention import split_groups
from .text.spec import AttentionSpec, DecoderSpec

NAMES = {
    "output.": "lm_head.",
    ".tok_embeddings.": ".embed_tokens.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
}
"""Part of a tensor name of InternLM2 (arXiv 2403.17297) -> part in Llama's naming. Both decoders compute the same."""


def internlm2_weights(weights: Iterable[tuple[str, Tensor]], spec: DecoderSpec) -> Iterator[tuple[str, Tensor]]:
    """Rename tensors below `language_model.`. Their q, k and v are one matrix: for each key head, its query heads, k and v."""
    for name, tensor in weights:
        stem, prefix, rest = name.partition("language_model.")
        for old, new in NAMES.items() if prefix and not stem else ():
            rest = rest.replace(old, new, 1) if old.startswith(".") or rest.startswith(old) else rest
        head, joined, kind = rest.partition(".attention.wqkv.")
        if not joined:
            yield stem + prefix + rest, tensor
            continue
        parts = (tensor, tensor, tensor)
        if tensor.numel():
            attention = spec.attentions[0]
            assert isinstance(attention, AttentionSpec)
            parts = split_groups(tensor, attention.kv_heads, attention.head_dim)
        for part, value in zip("qkv", parts, strict=True):
            yield f"{prefix}{head}.self_attn.{part}_proj.{kind}", value
