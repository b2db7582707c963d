"""BERT, RoBERTa and XLM-RoBERTa as embedders: a bidirectional encoder with learned positions (arXiv 1810.04805, 1907.11692).

The last row of each prompt is replaced by the pooled state, which is what a request for a vector reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...kernels.metadata import AttentionMetadata
from ...mm.errors import ConfigError
from ..config import check_activation, positive_int
from ..decoder_model import DecoderModel
from ..interface import ForwardBatch
from ..layers.basic import Embedding, Norm, TensorModule
from ..layers.classification import ClassificationHead
from ..layers.linear import Linear
from ..layers.mlp import PlainMlp
from ..text.decoder import Decoder, DecoderAttention
from ..text.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec
from .text_only import ClassificationModel, TakesNoItems

_ROBERTA = ("roberta", "xlm-roberta", "camembert")  # positions begin after the id of the padding token
_POOLINGS = ("cls", "mean")
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 1,
}  # fmt: skip
_NAMES = (
    ("LayerNorm.gamma", "LayerNorm.weight"),  # of the oldest checkpoints
    ("LayerNorm.beta", "LayerNorm.bias"),
    ("encoder.layer.", "layers."),
    (".attention.self.query.", ".self_attn.q_proj."),
    (".attention.self.key.", ".self_attn.k_proj."),
    (".attention.self.value.", ".self_attn.v_proj."),
    (".attention.output.dense.", ".self_attn.o_proj."),
    (".attention.output.LayerNorm.", ".after_attention."),
    (".intermediate.dense.", ".mlp.fc1."),
    (".output.dense.", ".mlp.fc2."),
    (".output.LayerNorm.", ".after_mlp."),
    ("embeddings.word_embeddings.", "embed_tokens."),
    ("embeddings.position_embeddings.", "embed_positions."),
    ("embeddings.token_type_embeddings.", "embed_types."),
    ("embeddings.LayerNorm.", "embed_norm."),
)
_IGNORED = ("pooler.", "cls.", "lm_head.", "head.", "decoder.", "classifier.", "embeddings.position_ids")


class BertLayer(TensorModule):
    """Attention and MLP; the residual stream is normed after each."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
        assert isinstance(attention, AttentionSpec)
        assert isinstance(mlp, MlpSpec)
        self.self_attn = DecoderAttention(attention, spec, dtype, device)
        self.mlp = PlainMlp(spec.hidden_size, mlp.inner, True, dtype, device, mlp.act, ("fc1", "fc2"))
        self.after_attention = Norm(spec.hidden_size, spec.eps, True, dtype, device)
        self.after_mlp = Norm(spec.hidden_size, spec.eps, True, dtype, device)

    def forward(self, x: Tensor, cache: Tensor, attn: AttentionMetadata) -> Tensor:
        x = self.after_attention(x, self.self_attn(x, None, cache, attn))
        return self.after_mlp(x, self.mlp(x))


class BertEncoder(TensorModule):
    """ForwardBatch -> hidden states `[rows, hidden]`.

    `first`: row of the position table for position 0. `pairs`: prompts may be pairs of texts, with token type 1 in the second.
    """

    pairs = False

    def __init__(
        self, spec: DecoderSpec, positions: int, types: int, first: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.first, width = first, spec.hidden_size
        self.embed_tokens = Embedding(spec.vocab_size, width, dtype, device)
        self.embed_positions = Embedding(positions, width, dtype, device)
        self.embed_types = Embedding(types, width, dtype, device)
        self.embed_norm = Norm(width, spec.eps, True, dtype, device)
        layers = [BertLayer(spec, dtype, device) for _ in spec.layers]
        self.layers = nn.ModuleList(layers)
        self.cache_specs = [layer.self_attn.cache_spec for layer in layers]

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed_tokens(batch.input_ids)
        types = batch.token_types if self.pairs else None
        x += self.embed_types.weight[0] if types is None else self.embed_types(types)
        x = self.embed_norm(x, self.embed_positions(batch.positions[0] + self.first))
        for layer, cache, attn in zip(self.layers, batch.kv_caches, batch.attn, strict=True):
            x = layer(x, cache, attn)
        return x


class TextEncoder(TakesNoItems, DecoderModel):
    """Base of embedders. Prompts are never chunked, because all of their tokens attend to each other."""

    prefixes: ClassVar[tuple[tuple[str, str], ...]] = (("", "language_model."),)
    ignored = tuple(f"language_model.{name}" for name in _IGNORED)

    def __init__(
        self, config: Mapping[str, Any], spec: DecoderSpec, encoder: TensorModule, dtype: torch.dtype, device: torch.device
    ) -> None:
        DecoderModel.__init__(self, spec, dtype, device, cast(Decoder, encoder))
        self.head, self.pooling = None, config.get("pooling_mode", "mean")
        if self.pooling not in _POOLINGS:
            raise ConfigError(f"pooling mode {self.pooling!r} is not supported; known are {', '.join(_POOLINGS)}")

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden: Tensor = self.language_model(batch)
        for start, stop in pairwise(batch.attn[0].query_start_loc):
            hidden[stop - 1] = hidden[start] if self.pooling == "cls" else hidden[start:stop].float().mean(0)
        return hidden

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: heads of other tasks are not used."""


class Bert(TextEncoder):
    """BERT, RoBERTa or XLM-RoBERTa as an embedder."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = _DEFAULTS | ({"vocab_size": 50265} if config.get("model_type") == "roberta" else {}) | dict(config)
        if config.get("is_decoder") or config.get("position_embedding_type") not in (None, "absolute"):
            raise ConfigError("is_decoder and relative positions in config.json of a BERT model are not supported")
        heads, width = positive_int(config, "num_attention_heads"), positive_int(config, "hidden_size")
        positions = positive_int(config, "max_position_embeddings")
        first = config["pad_token_id"] + 1 if config.get("model_type") in _ROBERTA else 0
        act = check_activation("hidden_act", config["hidden_act"])
        attention = AttentionSpec(heads, heads, width // heads, (width // heads) ** -0.5, None, bias=True, out_bias=True)
        mlp = MlpSpec(positive_int(config, "intermediate_size"), act, bias=True, plain=("fc1", "fc2"))
        spec = DecoderSpec(
            vocab_size=positive_int(config, "vocab_size"),
            hidden_size=width,
            layers=(LayerSpec(attention, mlp),) * positive_int(config, "num_hidden_layers"),
            eps=config["layer_norm_eps"],
            max_positions=positions - first,
            tied=True,  # so that no head is loaded
            norm="layer",
        )
        encoder = BertEncoder(spec, positions, positive_int(config, "type_vocab_size"), first, dtype, device)
        super().__init__(config, spec, encoder, dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under our names, without the name of the class that stored them."""
        for name, tensor in weights:
            name = name.removeprefix("bert.").removeprefix("roberta.")
            for old, new in _NAMES:
                name = name.replace(old, new, 1)
            yield name, tensor


class Pooler(TensorModule):
    """A linear layer and tanh."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dense = Linear(width, {"dense": width}, True, dtype, device, exact=True)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.dense(pooled).tanh()


class BertClassifier(ClassificationModel, Bert):
    """An encoder that classifies a prompt, or a pair of texts, by its first token."""

    prefixes = (("classifier.", "classifier."), *Bert.prefixes)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__({**config, "pooling_mode": "cls"}, dtype, device)
        transform = Pooler(self.hidden_size, dtype, device)
        self.classifier = ClassificationHead(config, self.hidden_size, True, dtype, device, transform)
        encoder = cast(BertEncoder, self.language_model)
        encoder.pairs = len(encoder.embed_types.weight) > 1

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under our names. BERT stores the first linear layer as pooler, RoBERTa stores both as classifier."""
        for name, tensor in super().convert_weights(weights):
            name = re.sub(r"^(pooler|classifier)\.dense\.", "classifier.transform.dense.", name)
            if name in ("classifier.weight", "classifier.bias"):
                name = name.replace("classifier.", "classifier.out_proj.")
            yield name, tensor
