"""ModernBERT as embedder and classifier: a bidirectional encoder with rotary positions and local layers (arXiv 2412.13663)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.config import check_activation, positive_int
from ....kernels.activation import activation
from ....kernels.metadata import AttentionMetadata
from ...interface import ForwardBatch
from ...layers.basic import EmbeddingTable, Norm, TensorModule
from ...layers.classification import ClassificationHead
from ...layers.linear import Linear
from ...text.decoder import Decoder
from ...text.decoder_config import decoder_spec
from ...text.spec import AttentionSpec, DecoderSpec, LayerSpec
from ...text.stack import Stack
from ..bert.model import TextEncoder
from ..text_only.model import ClassificationModel

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12,
    "hidden_activation": "gelu", "max_position_embeddings": 8192, "norm_eps": 1e-5, "local_attention": 128,
    "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 3,
}  # fmt: skip
MODERNBERT_NAMES = (
    ("embeddings.tok_embeddings.", "embed_tokens."),
    ("embeddings.norm.", "embed_tokens.norm."),
    ("final_norm.", "norm."),
    (".attn.Wqkv.", ".self_attn.qkv_proj."),
    (".attn.Wo.", ".self_attn.o_proj."),
    (".attn_norm.", ".input_layernorm."),
    (".mlp.Wi.", ".mlp.gate_up_proj."),
    (".mlp.Wo.", ".mlp.down_proj."),
    (".mlp_norm.", ".post_attention_layernorm."),
)


def modernbert_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Read config.json. `sliding_window` is the number of keys on each side. The first layer has no norm before attention."""
    text = _DEFAULTS | dict(config)
    every = positive_int(text, "global_attn_every_n_layers")
    kinds = ["sliding_attention" if i % every else "full_attention" for i in range(positive_int(text, "num_hidden_layers"))]
    text |= {
        "layer_types": text.get("layer_types") or kinds,
        "sliding_window": positive_int(text, "local_attention") // 2,
        "num_key_value_heads": None,
        "head_dim": None,
        "rope_theta": text["global_rope_theta"],
        "rope_local_base_freq": text["local_rope_theta"],
    }
    norm = "layer" if text.get("norm_bias") else "layer without bias"
    spec = decoder_spec(text, Stack(fused=True, fused_qkv=True, norm=norm, eps_key="norm_eps"), tied=True)
    first = replace(spec.layers[0], norms=(None, None, "post_attention_layernorm", None))
    return replace(spec, layers=(first, *spec.layers[1:]))


class NormedEmbedding(EmbeddingTable):
    """Token embeddings with a LayerNorm."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec.vocab_size, spec.hidden_size, dtype, device)
        self.norm = Norm(spec.hidden_size, spec.eps, spec.norm == "layer", dtype, device, centered=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(super().forward(ids))


class ModernBertEncoder(Decoder):
    """ForwardBatch -> hidden states `[rows, hidden]`."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.windows = [layer.mixer.window for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
        super().__init__(replace(spec, layers=tuple(map(_without_window, spec.layers))), dtype, device)
        self.embed_tokens: NormedEmbedding = NormedEmbedding(spec, dtype, device)

    def forward(self, batch: ForwardBatch) -> Tensor:
        local = {window: _local(batch.attn[0], batch.positions[0], window) for window in {*self.windows} if window}
        attn = [local[window] if window else meta for window, meta in zip(self.windows, batch.attn, strict=True)]
        rows = None if batch.embed_rows is None else self.embed_tokens.norm(batch.embed_rows)
        return super().forward(replace(batch, attn=attn, embed_rows=rows))


def _without_window(layer: LayerSpec) -> LayerSpec:
    """Return the layer without a window, so that its KV cache keeps all keys."""
    assert isinstance(layer.mixer, AttentionSpec)
    return replace(layer, mixer=replace(layer.mixer, window=None))


def _local(attn: AttentionMetadata, position: Tensor, window: int) -> AttentionMetadata:
    """Return metadata that lets each row attend to at most `window` keys on each side."""
    if attn.key_range is None:
        return attn  # every prompt has one token
    first, stop = attn.key_range
    near = torch.stack((torch.maximum(first, position - window), torch.minimum(stop, position + window + 1)))
    return replace(attn, key_range=near)


class ModernBert(TextEncoder):
    """An embedder. Prompts are never chunked, because all of their tokens attend to each other."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        spec = modernbert_spec(config)
        super().__init__(config, spec, ModernBertEncoder(spec, dtype, device), dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under our names."""
        for name, tensor in weights:
            name = name.removeprefix("model.")
            for old, new in MODERNBERT_NAMES:
                name = name.replace(old, new, 1)
            yield name, tensor


class PredictionHead(TensorModule):
    """A linear layer, an activation and a LayerNorm."""

    def __init__(self, config: Mapping[str, Any], spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        width = spec.hidden_size
        self.act = check_activation("classifier_activation", config.get("classifier_activation", "gelu"))
        self.dense = Linear(width, {"dense": width}, bool(config.get("classifier_bias")), dtype, device, exact=True)
        self.norm = Norm(width, spec.eps, spec.norm == "layer", dtype, device, centered=True)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.norm(activation(self.act, self.dense(pooled)))


class ModernBertClassifier(ClassificationModel, ModernBert):
    """An encoder that classifies a prompt, a pair of texts, or with `...ForTokenClassification` each token."""

    prefixes = (("head.", "classifier.transform."), ("classifier.", "classifier.out_proj."), *ModernBert.prefixes)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__({**config, "pooling_mode": config.get("classifier_pooling", "cls")}, dtype, device)
        self.labels_tokens = "ForTokenClassification" in str(config.get("architectures"))
        self.classifier = ClassificationHead(
            config, self.hidden_size, True, dtype, device, PredictionHead(config, self.spec, dtype, device)
        )
