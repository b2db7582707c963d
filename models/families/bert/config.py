"""Published encoders whose layers norm the residual stream after attention and after the MLP: how each differs from BERT.

Sources: the classes of transformers 5.23; the publishers' configs and names of Nomic Embed (arXiv 2402.01613) and mGTE
(arXiv 2407.19669).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import check_activation, positive_int
from ...text.decoder_config import decoder_spec
from ...text.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec
from ...text.stack import Stack
from .deberta_config import DEBERTA, DEBERTA_NAMES, DEBERTA_V2

_BERT: dict[str, Any] = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 1,
}  # fmt: skip
_NOMIC = _BERT | {
    "vocab_size": 30528, "hidden_act": "silu", "max_position_embeddings": 2048, "rope_theta": 1000.0, "attention_bias": False,
}  # fmt: skip
_GTE = _BERT | {
    "vocab_size": 250048, "max_position_embeddings": 8192, "type_vocab_size": 1, "rope_theta": 160000.0, "attention_bias": True,
    "mlp_bias": True,
}  # fmt: skip
_NAMES = (
    ("LayerNorm.gamma", "LayerNorm.weight"),  # of the oldest checkpoints
    ("LayerNorm.beta", "LayerNorm.bias"),
    ("encoder.layer.", "layers."),
    ("encoder.layers.", "layers."),
    (".attention.self.query.", ".self_attn.q_proj."),
    (".attention.self.key.", ".self_attn.k_proj."),
    (".attention.self.value.", ".self_attn.v_proj."),
    (".attention.output.dense.", ".self_attn.o_proj."),
    (".attention.output.LayerNorm.", ".after_attention."),
    (".attention.LayerNorm.", ".after_attention."),
    (".intermediate.dense.", ".mlp.fc1."),
    (".output.dense.", ".mlp.fc2."),
    (".output.LayerNorm.", ".after_mlp."),
    (".post_attention_layernorm.", ".after_attention."),
    (".post_mlp_layernorm.", ".after_mlp."),
    ("embeddings.word_embeddings.", "embed_tokens."),
    ("embeddings.position_embeddings.", "embed_positions."),
    ("embeddings.token_type_embeddings.", "embed_types."),
    ("embeddings.LayerNorm.", "embed_norm."),
)
_DISTILBERT_NAMES = (
    ("transformer.layer.", "layers."),
    (".attention.q_lin.", ".self_attn.q_proj."),
    (".attention.k_lin.", ".self_attn.k_proj."),
    (".attention.v_lin.", ".self_attn.v_proj."),
    (".attention.out_lin.", ".self_attn.o_proj."),
    (".sa_layer_norm.", ".after_attention."),
    (".ffn.lin1.", ".mlp.fc1."),
    (".ffn.lin2.", ".mlp.fc2."),
    (".output_layer_norm.", ".after_mlp."),
)
_MPNET_NAMES = (
    (".attention.attn.q.", ".self_attn.q_proj."),
    (".attention.attn.k.", ".self_attn.k_proj."),
    (".attention.attn.v.", ".self_attn.v_proj."),
    (".attention.attn.o.", ".self_attn.o_proj."),
    ("encoder.relative_attention_bias.", "position_bias."),
)
_NOMIC_NAMES = (
    ("emb_ln.", "embed_norm."),
    (".attn.out_proj.", ".self_attn.o_proj."),
    (".mlp.fc11.", ".mlp.up_proj."),
    (".mlp.fc12.", ".mlp.gate_proj."),
    (".mlp.fc2.", ".mlp.down_proj."),
    (".norm1.", ".after_attention."),
    (".norm2.", ".after_mlp."),
)
_GTE_NAMES = (
    (".attention.o_proj.", ".self_attn.o_proj."),
    (".attn_ln.", ".after_attention."),
    (".mlp_ln.", ".after_mlp."),
)
_QKV = (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj.")
_DISTILBERT_KEYS = {
    "dim": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers", "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}  # fmt: skip
_NOMIC_KEYS = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor", "activation_function": "hidden_act", "qkv_proj_bias": "attention_bias",
}  # fmt: skip
_NOMIC_REFUSED = (
    "prenorm", "parallel_block", "use_rms_norm", "rotary_emb_interleaved", "causal", "mlp_fc1_bias", "moe_every_n_layers",
)  # fmt: skip
_GATED = {"swiglu": "silu", "geglu": "gelu"}


@dataclass(frozen=True)
class BertLayout:
    """One model_type.

    Args:
        defaults: of keys that config.json may leave out. keys: other names of keys -> the name that is read here.
        names: (stored, ours) parts of tensor names, replaced before BERT's. prefixes: names of the class that stores them.
        split: part of the name of a tensor of several layers -> their names, in order.
        stack: of encoders with rotary positions and a gated MLP, else None.
        positions_after_padding: positions begin after the id of the padding token. relative: positions are a bias of scores.
        zero_biases: only the last layer of the MLP has a bias.
        disentangled: attention is DeBERTa's.
        refused: keys of config.json that must be false.
    """

    defaults: Mapping[str, Any] = field(default_factory=lambda: _BERT)
    keys: Mapping[str, str] = field(default_factory=dict)
    names: tuple[tuple[str, str], ...] = ()
    prefixes: tuple[str, ...] = ("bert.", "roberta.")
    split: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stack: Stack | None = None
    positions_after_padding: bool = False
    relative: bool = False
    zero_biases: bool = False
    disentangled: bool = False
    refused: tuple[str, ...] = ("is_decoder",)

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json with defaults, under the names of keys that are read here."""
        text = {**self.defaults, **{self.keys.get(key, key): value for key, value in config.items()}}
        if wrong := [key for key in self.refused if text.get(key)]:
            raise ConfigError(f"{wrong[0]} in config.json of a {text.get('model_type')} encoder is not supported")
        if text.get("position_embedding_type") not in (None, "absolute", "rope"):
            raise ConfigError(f"position_embedding_type {text['position_embedding_type']!r} of an encoder is not supported")
        if text.get("rotary_scaling_factor"):  # beyond the trained length, frequencies would depend on the prompt's length
            text["max_position_embeddings"] = text.get("max_trained_positions", 2048)
        act = text["hidden_act"] if self.stack is None else _GATED.get(text["hidden_act"], text["hidden_act"])
        act = check_activation("hidden_act", act)
        return text | {"hidden_act": act, "num_key_value_heads": None}

    def spec(self, text: Mapping[str, Any]) -> DecoderSpec:
        """Return the stack of a config that `read` returned. `tied` is True, so that no head is loaded."""
        if self.stack is not None:
            return decoder_spec(text, self.stack, tied=True)
        heads, width = positive_int(text, "num_attention_heads"), positive_int(text, "hidden_size")
        attention = AttentionSpec(heads, heads, width // heads, (width // heads) ** -0.5, None, bias=True, out_bias=True)
        mlp = MlpSpec(positive_int(text, "intermediate_size"), text["hidden_act"], bias=True, plain=("fc1", "fc2"))
        return DecoderSpec(
            vocab_size=positive_int(text, "vocab_size"),
            hidden_size=width,
            layers=(LayerSpec(attention, mlp),) * positive_int(text, "num_hidden_layers"),
            eps=text["layer_norm_eps"],
            max_positions=positive_int(text, "max_position_embeddings") - self.first_position(text),
            tied=True,
            norm="layer",
        )

    def first_position(self, text: Mapping[str, Any]) -> int:
        """Return the row of the position table for position 0."""
        return int(text["pad_token_id"]) + 1 if self.positions_after_padding else 0

    def pooler_act(self, config: Mapping[str, Any]) -> str:
        """Return the activation between the two linear layers of a classifier of prompts."""
        if self.disentangled:
            return check_activation("pooler_hidden_act", self.read(config)["pooler_hidden_act"])
        return "relu" if config.get("model_type") == "distilbert" else "tanh"

    def renamed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under our names, without the name of the class that stored them."""
        for name, tensor in weights:
            for prefix in self.prefixes:
                name = name.removeprefix(prefix)
            for old, new in (*self.names, *_NAMES):
                name = name.replace(old, new, 1)
            stored = next((part for part in self.split if part in name), "")
            parts = self.split.get(stored, ("",))
            for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
                whole = name.replace(stored, part) if stored else name
                yield whole, rows
                if self.zero_biases and whole.endswith((".gate_proj.weight", ".up_proj.weight")):
                    yield whole.replace(".weight", ".bias"), torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)


_ROTARY = Stack(norm="layer", eps_key="layer_norm_eps")
_roberta = BertLayout(positions_after_padding=True)
_gte = BertLayout(
    _GTE,
    names=_GTE_NAMES,
    prefixes=("gte.", "new."),
    split={".attention.qkv_proj.": _QKV, ".mlp.up_gate_proj.": (".mlp.up_proj.", ".mlp.gate_proj.")},
    stack=_ROTARY,
    zero_biases=True,
    refused=("is_decoder", "logn_attention_scale"),
)
_deberta = BertLayout(DEBERTA_V2, names=DEBERTA_NAMES, prefixes=("deberta.",), disentangled=True)
LAYOUTS: Mapping[str, BertLayout] = {
    "bert": BertLayout(),
    "roberta": BertLayout(_BERT | {"vocab_size": 50265}, positions_after_padding=True),
    "xlm-roberta": _roberta,
    "camembert": _roberta,
    "distilbert": BertLayout(
        _BERT | {"num_hidden_layers": 6, "type_vocab_size": 0},
        _DISTILBERT_KEYS | {"layer_norm_eps": "unused_layer_norm_eps"},  # its class has 1e-12, whatever config.json says
        _DISTILBERT_NAMES,
        ("distilbert.",),
    ),
    "mpnet": BertLayout(
        _BERT | {"vocab_size": 30527, "type_vocab_size": 0, "relative_attention_num_buckets": 32},
        names=_MPNET_NAMES,
        prefixes=("mpnet.",),
        positions_after_padding=True,
        relative=True,
    ),
    "nomic_bert": BertLayout(
        _NOMIC,
        _NOMIC_KEYS,
        _NOMIC_NAMES,
        ("nomic_bert.", "bert."),
        {".attn.Wqkv.": _QKV},
        _ROTARY,
        refused=_NOMIC_REFUSED,
    ),
    "gte": _gte,
    "new": _gte,
    "deberta": replace(_deberta, defaults=DEBERTA, refused=("is_decoder", "talking_head")),
    "deberta-v2": _deberta,
}
