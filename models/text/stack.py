"""The features of a published decoder stack that its config.json does not state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .spec import PLAIN_NORMS, Norms


@dataclass(frozen=True)
class Stack:
    """The features of a published stack that its config.json does not state.

    Args:
        defaults: values of keys that config.json may leave out.
        bias: the q, k, v projections have a bias. out_bias: the output projection has one. None: read from the config.
        state_norms: norms of layers with a state, if they differ.
        qk_norm: as in AttentionSpec; None: read from the config. "plain" only where the config's `use_qk_norm` asks for it.
        norms, parallel: as in LayerSpec.
        norm, last_norm: as in DecoderSpec. eps_key: key of the norms' epsilon.
        interleaved: as in RopeSpec.
        axes: function from mrope_section to the position axis of each frequency; None: the function for sections in a row, or
            the one for interleaved sections if the config asks for it.
        fused: gate and up are stored as one matrix. plain: as in MlpSpec.
        fused_qkv, grouped_qkv: as `fused` and `grouped` of AttentionSpec.
        head_bias: key that says whether the head has a bias.
        windows_rotate: if some layers have windows, only these have rotary positions.
        scaled_windows: the rope scaling also applies to layers with windows.
        norm_offset: as in DecoderSpec.
        first_position: as in DecoderSpec.
        root_scale: token embeddings are scaled by the root of the hidden size.
        router: fields of MoeSpec. sinks, gated, head_gate, value_norm: as in AttentionSpec.
        scaled_layers: as in DecoderSpec. pads_encoder_rows: encoder rows take the per-layer input of the padding token.
        single: each layer is a mixer or an MLP, named `mixer` in the checkpoint. second_mixer: each attention layer has a
            Mamba 2 layer beside it.
        renames: parts of tensor names in the checkpoint, and the parts that replace them.
        aliases: other names of keys of config.json, besides `decoder_config.ALIASES`.
        derived: function from a config, with defaults, to the values of keys that follow from other keys.
        mtp: as `names` of MtpSpec; None: layers for multi-token prediction are not built.
        refused: keys of config.json that must be false, because the feature is not implemented for this stack.
        fixed: keys of config.json that must have this value; the stack implements no other.
        equal: pairs of keys of config.json whose values must be equal, if the first key is set.
        index_interleaved: as `interleaved` of IndexerSpec.
        bidirectional: value of `use_bidirectional_attention` with which all tokens of a text attend to each other; None: the
            stack does not read that key.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    bias: bool | None = None
    out_bias: bool | None = None
    qk_norm: str | None = None
    norms: Norms = PLAIN_NORMS
    state_norms: Norms | None = None
    parallel: bool = False
    norm: str = "rms"
    last_norm: str = "norm"
    eps_key: str = "rms_norm_eps"
    interleaved: bool = False
    axes: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None
    fused: bool = False
    fused_qkv: bool = False
    grouped_qkv: str | None = None
    plain: tuple[str, str] | None = None
    head_bias: str = "lm_head_bias"
    windows_rotate: bool = False
    scaled_windows: bool = True
    norm_offset: float = 0.0
    first_position: int | None = None
    root_scale: bool = False
    router: Mapping[str, Any] = field(default_factory=dict)
    sinks: bool = False
    gated: bool = False
    head_gate: bool = False
    value_norm: bool = False
    scaled_layers: bool = False
    pads_encoder_rows: bool = False
    single: bool = False
    second_mixer: bool = False
    renames: tuple[tuple[str, str], ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    mtp: str | None = None
    refused: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    equal: tuple[tuple[str, str], ...] = ()
    index_interleaved: bool = False
    bidirectional: bool | str | None = None
