"""Classes of transformers: found by name, made without weights, told to call our paged attention. Knows no family.

Their decoders call attention by name through transformers' attention interface, and hand the arguments of a call on to it, so a
step arrives there without a global.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels.attention import paged_attention
from ..kernels.metadata import AttentionMetadata
from ..mm.errors import ConfigError
from .peak import Peak

ATTENTION = "sensorium_paged"  # name in transformers' attention interface
STEP = "sensorium_step"  # argument that goes down to the attention
BROKEN = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, ArithmeticError, ImportError, OSError)
"""What a class may raise that is asked for what it does not do, or for what it would fetch."""
_WAYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_PROBE_ROWS, _MEASURED_ROWS, _HALF = 4, 64, torch.bfloat16


@dataclass(frozen=True)
class Layer:
    """What one attention layer asks for, learnt from a call."""

    index: int
    kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, eq=False)
class Step:
    """Of one forward pass, by layer; without caches, layers are only looked at."""

    attn: tuple[AttentionMetadata, ...] = ()
    caches: tuple[Tensor, ...] = ()
    seen: list[Layer] = field(default_factory=list)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    sensorium_step: Step | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """`query [1, heads, rows, dim]`, keys and values with their own heads -> `[1, rows, heads, dim of values]`.

    Raises:
        ConfigError: a step that does not arrive, or an argument that our attention does not honour.
    """
    if sensorium_step is None:
        raise ConfigError("its layers do not hand the arguments of a step on to their attention")
    odd = next((name for name in ("s_aux", "position_bias") if more.get(name) is not None), None)
    if odd is not None or attention_mask is not None or not more.get("is_causal", True):
        raise ConfigError(f"its attention wants {odd or 'a mask of its own'}, which paged attention does not have")
    index, dim, wide = int(module.layer_idx), query.shape[-1], value.shape[-1]  # type: ignore[arg-type]
    if wide < dim:
        value = F.pad(value, (0, dim - wide))
    if not sensorium_step.caches:
        sensorium_step.seen.append(Layer(index, key.shape[1], dim, sliding_window))
        return query.new_zeros(1, query.shape[2], query.shape[1], wide), None
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    scale = dim**-0.5 if scaling is None else scaling
    out = paged_attention(q, k, v, sensorium_step.caches[index], sensorium_step.attn[index], scale, softcap)
    return out[None, ..., :wide], None


def class_of(config: Mapping[str, Any]) -> Any:
    """The class that config.json names; ConfigError where transformers, or this path, does not have it."""
    name = str((config.get("architectures") or ["none"])[0])
    try:
        import transformers
    except ImportError:
        raise ConfigError("transformers, which may have it, is not installed: pip install 'sensorium[fallback]'") from None
    try:
        found = getattr(transformers, name, None)
    except (ImportError, RuntimeError) as error:  # of what it needs in turn, which is missing or fits another release
        why = line(error.__cause__ or error)
        raise ConfigError(
            f"transformers {transformers.__version__} cannot import its {name} ({why}); install it anew"
        ) from None
    if found is None or not hasattr(found, "generate"):
        raise ConfigError(f"transformers {transformers.__version__} has no model {name} either")
    return found


@contextmanager
def apart() -> Iterator[None]:
    """Nothing that a config names, as kernels and backbones may be, is fetched: whoever wants it gets an OSError."""
    from huggingface_hub import constants

    was, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was


def _parsed(kind: Any, config: Mapping[str, Any]) -> Any:
    """A config.json as the class has it, but for how attention is computed: that is ours to say."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        return kind.config_class.from_dict(_without(config, _WAYS))
    except StrictDataclassError as error:
        raise ValueError(line(error)) from None


def _without(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """At any depth."""
    kept = {key: value for key, value in config.items() if key not in names}
    return {key: _without(value, names) if isinstance(value, Mapping) else value for key, value in kept.items()}


@dataclass(frozen=True)
class Built:
    """A class on the meta device, the config of its decoder, and what was learnt of that.

    Args:
        axes: of positions.
        row_bytes: that a row of a step takes.
    """

    outer: Any
    text: Any
    layers: tuple[Layer, ...]
    axes: int
    row_bytes: int


def build(config: Mapping[str, Any], dtype: torch.dtype) -> Built:
    """The class without weights; ConfigError says why it cannot be fed."""
    kind = class_of(config)
    name = kind.__name__
    try:
        with apart(), torch.device("meta"):
            parsed = _parsed(kind, config)
            outer = kind._from_config(parsed, dtype=dtype, attn_implementation=attention_of(parsed))
    except BROKEN as error:
        raise ConfigError(f"{name} of transformers cannot be made from config.json: {line(error)}") from None
    if parsed.is_encoder_decoder:
        raise ConfigError(f"{name} is an encoder with a decoder that reads across; only decoders run by way of transformers")
    decoder, text = outer.get_decoder(), parsed.get_text_config(decoder=True)
    if decoder is None or decoder is outer.base_model or outer.base_model is outer:
        raise ConfigError(f"{name} keeps no decoder apart from what makes its embeddings")
    try:
        axes = _axes(decoder)
        layers, row = _learnt(outer.eval(), decoder, text, axes)
    except BROKEN as error:
        raise ConfigError(f"{name} cannot run with paged attention: {line(error)}") from None
    return Built(outer, text, layers, axes, row)


def attention_of(parsed: Any) -> dict[str, str]:
    """Ours for the decoder, the class's own choice for towers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    text = parsed.get_text_config(decoder=True)
    return {next((name for name in parsed.sub_configs if getattr(parsed, name) is text), ""): ATTENTION}


def _axes(decoder: Any) -> int:
    """Of rotary positions; ConfigError for more than time, height and width."""
    sections = next((module.mrope_section for module in decoder.modules() if getattr(module, "mrope_section", None)), (0,))
    axes = len(next(iter(sections.values())) if isinstance(sections, dict) else sections)
    if axes not in (1, 3):
        raise ConfigError(f"its positions have {axes} axes; known are one, and time, height and width")
    return axes


def _learnt(outer: Any, decoder: Any, text: Any, axes: int) -> tuple[tuple[Layer, ...], int]:
    """Its layers, and the bytes of a row of a step."""
    dtype = outer.dtype
    try:
        return _layers(decoder, text, axes), _row_bytes(decoder, text, axes)
    except RuntimeError:
        if dtype == _HALF:
            raise
    outer.to(_HALF)  # without numbers, products of grouped experts take no other type
    layers, row = _layers(decoder, text, axes), _row_bytes(decoder, text, axes)
    outer.to(dtype)
    return layers, row * dtype.itemsize // _HALF.itemsize


def _layers(decoder: Any, text: Any, axes: int) -> tuple[Layer, ...]:
    """What each layer asks of attention, from a run without numbers; ConfigError for a layer that keeps another state."""
    odd = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if odd:
        where = text.layer_types.index(odd[0])
        raise ConfigError(f"layer {where} is {odd[0]}, which keeps a state that is no key and value")
    step = Step()
    with torch.inference_mode():
        decoder(**_nothing(decoder.dtype, text, axes, _PROBE_ROWS), **{STEP: step})
    found = {layer.index: layer for layer in step.seen}
    for index in range(text.num_hidden_layers):
        calls = sum(layer.index == index for layer in step.seen)
        if calls != 1:
            raise ConfigError(f"layer {index}{_kind_of(decoder, index)} attends {calls} times in a pass, not once")
    return tuple(found[index] for index in range(text.num_hidden_layers))


def _nothing(dtype: torch.dtype, text: Any, axes: int, rows: int) -> dict[str, Any]:
    """Arguments of a decoder for so many rows without numbers."""
    places = torch.arange(rows, device="meta")[None]
    return {
        "inputs_embeds": torch.zeros(1, rows, text.hidden_size, dtype=dtype, device="meta"),
        "position_ids": places if axes == 1 else places.expand(axes, 1, rows),
        "use_cache": False,
    }


def _kind_of(decoder: Any, index: int) -> str:
    layers = getattr(decoder, "layers", ())
    return f" ({type(layers[index]).__name__})" if index < len(layers) else ""


def _row_bytes(decoder: Any, text: Any, axes: int) -> int:
    """What a row of a step takes in the decoder, from a run without numbers."""
    given = _nothing(decoder.dtype, text, axes, _MEASURED_ROWS)
    with torch.inference_mode(), Peak() as peak:
        decoder(**given, **{STEP: Step()})
    beside = 2 * given["inputs_embeds"].nbytes + 8 * (axes + 4) * _MEASURED_ROWS  # looked up, encoder rows, ids, places
    return int(-(-(peak.most + beside) // _MEASURED_ROWS))


def twin(root: Any, part: Any, forward: Callable[..., Any]) -> Any:
    """`root` with `forward` in place of that of `part`, a module in it; weights are shared, neither of them is changed."""
    copied = copy.copy(root)
    if root is part:
        copied.forward = forward
        return copied
    inside = {name for name, child in root._modules.items() if child is not None and part in set(child.modules())}
    copied._modules = {name: twin(child, part, forward) if name in inside else child for name, child in root._modules.items()}
    return copied


def make_encoders(outer: Any) -> None:
    """Give all but the layers of the decoder memory, so that an item can be run; what it holds does not matter."""
    decoder = outer.get_decoder()
    inside = set(decoder.modules()) - set(decoder.get_input_embeddings().modules())
    made: dict[Tensor, nn.Parameter] = {}  # what is tied stays so
    for module in (module for module in outer.modules() if module not in inside):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fresh = nn.Parameter(torch.zeros_like(parameter, device="cpu"), requires_grad=False)
                module._parameters[name] = made.setdefault(parameter, fresh)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")


def line(error: BaseException) -> str:
    """What it says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
