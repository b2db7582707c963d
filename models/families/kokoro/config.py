"""The publisher's config.json of Kokoro: sizes, and the vocabulary of phonemes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....callers.errors import ConfigError
from ....checkpoints.config import check_activation, positive_int, require
from ...text.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

EDGE = 0
"""The token before the first phoneme and after the last one."""
_DEFAULTS = {"embedding_size": 128, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu_new"}
"""Values of `plbert` that config.json may leave out: the defaults of transformers' AlbertConfig."""
_ONE = ("num_hidden_groups", "inner_group_num")


def read_albert(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `plbert`, the config of the ALBERT encoder, with defaults. Raise ConfigError for layers that differ."""
    text = {**_DEFAULTS, **require(config, "plbert")}
    if wrong := next((key for key in _ONE if text.get(key, 1) != 1), None):
        raise ConfigError(f"{wrong} of plbert in config.json must be 1: all layers are the same")
    return text


def albert_spec(text: Mapping[str, Any], vocab: int) -> DecoderSpec:
    """Return the layers of the encoder, which share one layer's weights."""
    heads, width = positive_int(text, "num_attention_heads"), positive_int(text, "hidden_size")
    if width % heads:
        raise ConfigError("hidden_size of plbert in config.json must be a multiple of num_attention_heads")
    attention = AttentionSpec(heads, heads, width // heads, (width // heads) ** -0.5, None, bias=True, out_bias=True)
    act = check_activation("hidden_act", text["hidden_act"])
    mlp = MlpSpec(positive_int(text, "intermediate_size"), act, bias=True, plain=("fc1", "fc2"))
    return DecoderSpec(
        vocab_size=vocab,
        hidden_size=width,
        layers=(LayerSpec(attention, mlp),) * positive_int(text, "num_hidden_layers"),
        eps=text["layer_norm_eps"],
        max_positions=positive_int(text, "max_position_embeddings"),
        tied=True,
        norm="layer",
    )


def read_vocabulary(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the phonemes, each one character, and their tokens. Raise ConfigError for anything else."""
    vocab, size = require(config, "vocab"), positive_int(config, "n_token")
    if not isinstance(vocab, Mapping):
        raise ConfigError("vocab in config.json must be an object")
    wrong = next((p for p, token in vocab.items() if len(p) != 1 or type(token) is not int or not 0 < token < size), None)
    if wrong is not None:
        raise ConfigError(f"vocab in config.json has {wrong!r}: {vocab[wrong]!r}; a phoneme is a character below n_token")
    return dict(vocab)
