"""The parts of config.json that models read, checked once. Flat (old) and nested (new) layouts alike. Knows no family."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..kernels.activation import REFERENCES
from ..mm.errors import ConfigError, SensoriumError, typed
from .text.rope import kind_of, yarn_temper
from .text.spec import (
    PLAIN_NORMS,
    AttentionSpec,
    DecoderSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    RopeSpec,
    in_runs,
    in_turns,
)


@dataclass(frozen=True)
class Stack:
    """What a published stack does that its config.json does not say.

    Args:
        defaults: of keys that its config.json may leave out.
        bias, out_bias: of the q, k, v products and of the output's; None: as the config says.
        qk_norm: as in AttentionSpec; None: as the config says. norms: as in LayerSpec.
        neighbours: pairs of rotary positions are neighbouring numbers.
        axes: frequencies of each axis -> the axis of each frequency; None: one run after another, or as the config says.
        fused: gate and up are stored as one matrix.
        norm_offset: as in DecoderSpec.
        root_scale: token embeddings are scaled by the root of the hidden size.
        router: fields of MoeSpec.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    bias: bool | None = None
    out_bias: bool | None = None
    qk_norm: str | None = None
    norms: tuple[str, ...] = PLAIN_NORMS
    neighbours: bool = False
    axes: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None
    fused: bool = False
    norm_offset: float = 0.0
    root_scale: bool = False
    router: Mapping[str, Any] = field(default_factory=dict)


ALIASES = {
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "moe_num_experts": "num_experts",
    "moe_k": "num_experts_per_tok",
    "moe_num_shared_experts": "n_shared_experts",
}
"""Names that configs have for the same number -> the one that is used here."""

FOR_EACH_KIND = ("num_experts", "moe_layer_start_index", "moe_layer_end_index")
"""Numbers that configs of mixtures by kind may repeat for each."""

_MANY, _MOST = ("layers", "depth", "experts"), 4096  # of what is made one by one: more than any model has
_WIDEST_HEAD = 1 << 14
_AXES = (1, 3, 4)  # of positions: one, or time, height and width, or those behind a plain count


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text part of a config.json: `text_config`, `language_config` or `llm_config` if there is one, else all."""
    nested = (config.get(key) for key in ("text_config", "language_config", "llm_config"))
    return next((part for part in nested if isinstance(part, Mapping)), config)


def known_act(key: str, act: str) -> str:
    """`act`, which a config gives under this key; ConfigError for one that there is not."""
    if act not in REFERENCES:
        raise ConfigError(f"{key} {act!r} is not supported; known are {', '.join(REFERENCES)}")
    return act


def check_parts(config: Mapping[str, Any]) -> None:
    """ConfigError for a part of a config.json that is no object, and for more layers or experts than any model has."""
    for key, value in config.items():
        if key.endswith("_config") and not isinstance(value, Mapping | None):
            raise ConfigError(f"{key} in config.json is {typed(value)}; it must be an object")
        if isinstance(value, Mapping):
            check_parts(value)
        elif any(word in key for word in _MANY):
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and number > _MOST:
                    raise ConfigError(f"{key} in config.json is {number:.3g}, the limit is {_MOST}; download it again")


def decoder_spec(config: Mapping[str, Any], stack: Stack | None = None, **changes: Any) -> DecoderSpec:
    """From the whole config.json; `changes` are fields of DecoderSpec that the family knows better.

    Raises:
        ConfigError: a missing key, or a feature no stack has, by its key.
    """
    stack = stack or Stack()
    text = {**stack.defaults, **{ALIASES.get(key, key): value for key, value in text_of(config).items()}}
    text |= {key: text[key][0] for key in FOR_EACH_KIND if isinstance(text.get(key), list)}
    try:
        return replace(_read(config, text, stack), **changes)
    except SensoriumError:
        raise
    except (TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"config.json says something of its decoder that cannot be read ({error})") from None


def _read(config: Mapping[str, Any], text: Mapping[str, Any], stack: Stack) -> DecoderSpec:
    hidden = count(text, "hidden_size")
    layers = tuple(
        LayerSpec(_attention(text, stack, i), _mlp(text, stack, i), stack.norms)
        for i in range(count(text, "num_hidden_layers"))
    )
    return DecoderSpec(
        vocab_size=count(text, "vocab_size"),
        hidden_size=hidden,
        layers=layers,
        eps=_positive({"rms_norm_eps": 1e-6, **text}, "rms_norm_eps"),
        max_positions=count({"max_position_embeddings": 32768, **text}, "max_position_embeddings"),
        tied=_tied(config, stack),
        norm_offset=stack.norm_offset,
        embed_scale=hidden**0.5 if stack.root_scale else text.get("embedding_multiplier", 1.0),
        residual_scale=text.get("residual_multiplier", 1.0),
        logit_scale=1.0 / text.get("logits_scaling", 1.0),
        logit_cap=text.get("final_logit_softcapping"),
    )


def _tied(config: Mapping[str, Any], stack: Stack) -> bool:
    """One of the two that may say it does."""
    said = [part["tie_word_embeddings"] for part in (config, text_of(config)) if part.get("tie_word_embeddings") is not None]
    return any(said) if said else bool(stack.defaults.get("tie_word_embeddings"))


def _attention(text: Mapping[str, Any], stack: Stack, layer: int) -> AttentionSpec | LatentSpec:
    if text.get("kv_lora_rank"):
        return _latent(text, stack)
    heads = count(text, "num_attention_heads")
    kv_heads = count(text, "num_key_value_heads") if text.get("num_key_value_heads") else heads
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    dim = count(text, "head_dim") if text.get("head_dim") else count(text, "hidden_size") // heads
    window = _window(text, layer)
    bias = bool(text.get("attention_bias", text.get("use_bias", False)))
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        scale=text.get("attention_multiplier") or (text.get("query_pre_attn_scalar") or dim) ** -0.5,
        rope=_rope(text, stack, dim, "full_attention" if window is None else "sliding_attention"),
        bias=bias if stack.bias is None else stack.bias,
        out_bias=bias if stack.out_bias is None else stack.out_bias,
        qk_norm=stack.qk_norm or ("head" if text.get("use_qk_norm") else None),
        window=window,
        soft_cap=text.get("attn_logit_softcapping"),
    )


def _latent(text: Mapping[str, Any], stack: Stack) -> LatentSpec:
    rope_dim, nope_dim = count(text, "qk_rope_head_dim"), count(text, "qk_nope_head_dim")
    rope = _rope({**text, "partial_rotary_factor": None}, stack, rope_dim, "full_attention")
    weight = rope.scaling.get("mscale_all_dim")
    temper = yarn_temper(rope.scaling["factor"], weight) if weight else 1.0
    return LatentSpec(
        heads=count(text, "num_attention_heads"),
        query_latent=text.get("q_lora_rank"),
        latent=count(text, "kv_lora_rank"),
        nope_dim=nope_dim,
        value_dim=count(text, "v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * temper**2,
        rope=rope,
        bias=bool(text.get("attention_bias", False)),
    )


def _window(text: Mapping[str, Any], layer: int) -> int | None:
    """Keys that this layer sees: told by `layer_types`, by a pattern of which each last layer sees all, or from a layer on."""
    window, kinds = text.get("sliding_window"), text.get("layer_types")
    if kinds:
        kind = kinds[layer]
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"layer type {kind!r} is not supported; known are full_attention and sliding_attention")
        slides = kind == "sliding_attention"
    elif not window or text.get("use_sliding_window") is False:
        slides = False
    elif text.get("sliding_window_pattern"):
        slides = bool((layer + 1) % text["sliding_window_pattern"])
    else:
        slides = layer >= text.get("max_window_layers", 0)
    return count(text, "sliding_window") if slides else None


def _rope(text: Mapping[str, Any], stack: Stack, dim: int, kind: str) -> RopeSpec:
    """Of layers of this kind, for heads of `dim` numbers."""
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"rope_parameters in config.json is {given!r}; it must be an object")
    theta = text.get("rope_theta", 10000.0)
    if kind in given:  # an object for each kind of layer
        given = given[kind]
    elif kind == "sliding_attention" and text.get("rope_local_base_freq"):
        given, theta = {}, text["rope_local_base_freq"]
    if dim > _WIDEST_HEAD:
        raise ConfigError(f"heads of {dim} numbers are wider than the limit of {_WIDEST_HEAD}; download config.json again")
    turned = int(dim * (given.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0))
    sections = tuple(given.get("mrope_section") or text.get("mrope_section") or (turned // 2,))
    if sum(sections) * 2 != turned:
        raise ConfigError(f"mrope_section {list(sections)} adds up to {sum(sections)}, half a head is {turned // 2}")
    axes = (stack.axes or (in_turns if given.get("mrope_interleaved") else in_runs))(sections)
    if len(sections) not in _AXES or len(axes) != turned // 2:
        raise ConfigError(f"mrope_section {list(sections)} deals out no head; it has a count for time, height and width")
    return RopeSpec(
        theta=_positive({"rope_theta": given.get("rope_theta") or theta}, "rope_theta"),
        dim=turned,
        axes=axes,
        num_axes=len(sections),
        neighbours=stack.neighbours,
        scaling=_scaling(text, given),
    )


def _scaling(text: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What scales frequencies, its kind under one name and its lengths filled in; empty for none."""
    kind = kind_of(given)
    if kind == "default":
        return {}
    longest = text.get("max_position_embeddings", 0)
    trained = given.get("original_max_position_embeddings") or text.get("original_max_position_embeddings") or longest
    known = {**given, "rope_type": kind, "original_max_position_embeddings": trained}
    return known if known.get("factor") is not None else {**known, "factor": longest / trained}


def _mlp(text: Mapping[str, Any], stack: Stack, layer: int) -> MlpSpec | MoeSpec:
    act = known_act("the decoder's hidden_act", text.get("hidden_activation") or text.get("hidden_act", "silu"))
    bias = bool(text.get("mlp_bias", text.get("use_bias", False)))
    if not text.get("num_experts") or not _sparse(text, layer):
        return MlpSpec(count(text, "intermediate_size"), act, bias, stack.fused)
    inner = need(text, "moe_intermediate_size")
    widths = tuple(inner) if isinstance(inner, list | tuple) else (inner,)
    shared = (text.get("n_shared_experts") or 0) * widths[0]
    made = MoeSpec(
        **{
            "experts": count(text, "num_experts"),
            "top_k": count(text, "num_experts_per_tok"),
            "inner": widths,
            "act": act,
            "shared_inner": shared,
            "normalise": bool(text.get("norm_topk_prob", True)),
            "scale": text.get("routed_scaling_factor") or 1.0,
            "scoring": text.get("scoring_func") or "softmax",
            "groups": 1 if text.get("topk_method") == "greedy" else text.get("n_group") or 1,
            "top_groups": text.get("topk_group") or 1,
            "bias": bias,
            **stack.router,
        }
    )
    if made.top_k > made.experts or made.experts % made.groups or made.top_groups > made.groups:
        chosen, groups = f"{made.top_k} of {made.experts} experts", f"{made.top_groups} of {made.groups} groups"
        raise ConfigError(f"config.json has a row go to {chosen} in {groups}, which cannot be; download it again")
    return made


def _sparse(text: Mapping[str, Any], layer: int) -> bool:
    """Whether the layer's MLP is a mixture: each rule is of other configs, which then say nothing of the others."""
    if text.get("mlp_layer_types"):
        return bool(text["mlp_layer_types"][layer] == "sparse")
    last = text.get("moe_layer_end_index", -1)
    first, last = text.get("moe_layer_start_index", 0), last if last >= 0 else count(text, "num_hidden_layers") - 1
    if layer < text.get("first_k_dense_replace", 0) or layer in (text.get("mlp_only_layers") or ()):
        return False
    every = text.get("decoder_sparse_step") or text.get("moe_layer_interval") or 1
    return bool(first <= layer <= last and (layer + 1) % every == 0)


def count(config: Mapping[str, Any], key: str, file: str = "config.json") -> int:
    """A positive integer; ConfigError names the key and the file otherwise."""
    value = need(config, key, file)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} in {file} is {repr(value)[:60]}; it must be a positive integer")
    return value


def _positive(config: Mapping[str, Any], key: str) -> float:
    """A finite number above 0; ConfigError names the key otherwise."""
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{key} in config.json is {value!r}; it must be a number above 0")
    return float(value)


def need(config: Mapping[str, Any], key: str, file: str = "config.json") -> Any:
    """ConfigError names the missing key and the file."""
    if config.get(key) is None:
        raise ConfigError(f"{file} lacks {key!r}; it is not complete")
    return config[key]
