"""Classes of transformers: found by name, built without weights, and set to call our paged attention.

Their decoders call attention by name through transformers' attention interface and pass keyword arguments on to it, so that a
step's metadata reaches the attention without global state.
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

from ...callers.errors import ConfigError
from ...kernels.attention import paged_attention
from ...kernels.metadata import AttentionMetadata
from .peak import Peak

ATTENTION = "sensorium_paged"  # name in transformers' attention interface
STEP = "sensorium_step"  # keyword argument that is passed down to attention
CLASS_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, ArithmeticError, ImportError, OSError)
"""Errors that a class may raise when it cannot do what this path needs, or would have to download something."""
_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_PROBE_ROWS, _MEASURED_ROWS, _HALF = 4, 64, torch.bfloat16


@dataclass(frozen=True)
class AttentionCall:
    """The cache that one attention layer needs, recorded from a call of its attention."""

    index: int
    kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, eq=False)
class PagedStep:
    """Metadata and caches of one forward pass, by layer. Without caches, calls are only recorded in `calls`."""

    attn: tuple[AttentionMetadata, ...] = ()
    caches: tuple[Tensor, ...] = ()
    calls: list[AttentionCall] = field(default_factory=list)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend: `query [1, heads, rows, dim]`, keys and values with their own heads -> `[1, rows, heads, dim of values]`.

    Args:
        options: `sensorium_step`, the PagedStep of this pass, and those of the layer: `sliding_window` and `softcap` are used,
            `dropout` and others that say nothing about inference are not.

    Raises:
        ConfigError: the step was not passed on, or an argument that our attention does not support.
    """
    step: PagedStep | None = options.get("sensorium_step")
    if step is None:
        raise ConfigError("its layers do not pass keyword arguments on to their attention")
    unsupported = next((name for name in ("s_aux", "position_bias") if options.get(name) is not None), None)
    if unsupported is not None or attention_mask is not None or not options.get("is_causal", True):
        raise ConfigError(f"its attention uses {unsupported or 'a mask of its own'}, which paged attention does not support")
    index, dim, wide = int(module.layer_idx), query.shape[-1], value.shape[-1]  # type: ignore[arg-type]
    if wide < dim:
        value = F.pad(value, (0, dim - wide))
    if not step.caches:
        step.calls.append(AttentionCall(index, key.shape[1], dim, options.get("sliding_window")))
        return query.new_zeros(1, query.shape[2], query.shape[1], wide), None
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    scale = dim**-0.5 if scaling is None else scaling
    out = paged_attention(q, k, v, step.caches[index], step.attn[index], scale, options.get("softcap"))
    return out[None, ..., :wide], None


def class_of(config: Mapping[str, Any]) -> Any:
    """Return the class that config.json names.

    Raises:
        ConfigError: transformers does not have it.
        ImportError: transformers has it, but cannot import it here.
    """
    name = str((config.get("architectures") or ["none"])[0])
    try:
        import transformers
    except ImportError:
        raise ConfigError("transformers, which may support it, is not installed: pip install 'sensorium[fallback]'") from None
    try:
        kind = getattr(transformers, name, None)
    except (ImportError, RuntimeError) as error:  # a dependency of transformers is missing or has another version
        why = line(error.__cause__ or error)
        raise ImportError(
            f"transformers {transformers.__version__} cannot import its {name} ({why}); reinstall the package that fails, "
            f"torchvision for one in the release for torch {torch.__version__}"
        ) from None
    if kind is None:
        raise ConfigError(f"transformers {transformers.__version__} has no model {name} either")
    if not hasattr(kind, "generate"):
        raise ConfigError(
            f"transformers {transformers.__version__} has {name}, but only its classes that generate text run here"
        )
    return kind


def check_decoder_only(kind: Any, config: Mapping[str, Any]) -> None:
    """Raise ConfigError if the class is an encoder-decoder model."""
    if config.get("is_encoder_decoder", getattr(kind.config_class, "is_encoder_decoder", False)):
        bias = ", with a bias of relative positions," if hasattr(kind.config_class, "relative_attention_num_buckets") else ""
        why = "only decoder-only models run through transformers' classes here; use transformers itself"
        raise ConfigError(f"{kind.__name__} is an encoder-decoder model{bias} and {why}")


@contextmanager
def offline() -> Iterator[None]:
    """Forbid downloads of what a config may name (kernels, backbones): they raise OSError."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _parsed(kind: Any, config: Mapping[str, Any]) -> Any:
    """Parse config.json into the class's config, without its choice of attention implementation."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        return kind.config_class.from_dict(_without(config, _ATTENTION_KEYS))
    except StrictDataclassError as error:
        raise ValueError(line(error)) from None


def _without(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Remove keys at any depth."""
    kept = {key: value for key, value in config.items() if key not in names}
    return {key: _without(value, names) if isinstance(value, Mapping) else value for key, value in kept.items()}


@dataclass(frozen=True)
class Built:
    """A model on the meta device, the config of its decoder, and what was recorded from it.

    Args:
        axes: number of position axes.
        row_bytes: peak bytes per row of a step.
    """

    outer: Any
    text: Any
    layers: tuple[AttentionCall, ...]
    axes: int
    row_bytes: int


def build(config: Mapping[str, Any], dtype: torch.dtype) -> Built:
    """Build the class without weights; ConfigError says why it is not supported."""
    kind = class_of(config)
    name, model_type = kind.__name__, kind.config_class.model_type
    if not kind.config_class.sub_configs and config.get("model_type", model_type) != model_type:
        raise ConfigError(f"{name} of transformers is for model_type {model_type!r}, config.json says {config['model_type']!r}")
    try:
        with offline(), torch.device("meta"):
            parsed = _parsed(kind, config)
            outer = kind._from_config(parsed, dtype=dtype, attn_implementation=attention_of(parsed))
    except CLASS_ERRORS as error:
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            raise ConfigError(
                f"{name} of transformers chooses among attention classes of its own, not paged attention"
            ) from None
        raise ConfigError(f"{name} of transformers cannot be built from config.json: {line(error)}") from None
    check_decoder_only(kind, parsed.to_dict())
    decoder, text = outer.get_decoder(), parsed.get_text_config(decoder=True)
    if decoder is None or outer.base_model is outer or (decoder is outer.base_model and parsed.sub_configs):
        raise ConfigError(f"{name} does not separate its decoder from its embeddings")
    try:
        axes = _axes(decoder)
        layers, row = _record(outer.eval(), decoder, text, axes)
    except CLASS_ERRORS as error:
        raise ConfigError(f"{name} cannot run with paged attention: {line(error)}") from None
    return Built(outer, text, layers, axes, row)


def attention_of(parsed: Any) -> dict[str, str]:
    """Choose our attention for the decoder and the class's default for encoders."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    text = parsed.get_text_config(decoder=True)
    return {next((name for name in parsed.sub_configs if getattr(parsed, name) is text), ""): ATTENTION}


def _axes(decoder: Any) -> int:
    """Return the number of position axes; ConfigError unless it is 1 or 3 (time, height, width)."""
    sections = next((module.mrope_section for module in decoder.modules() if getattr(module, "mrope_section", None)), (0,))
    axes = len(next(iter(sections.values())) if isinstance(sections, dict) else sections)
    if axes not in (1, 3):
        raise ConfigError(f"its positions have {axes} axes; supported are one, and three (time, height, width)")
    return axes


def _record(outer: Any, decoder: Any, text: Any, axes: int) -> tuple[tuple[AttentionCall, ...], int]:
    """Return the attention layers and the bytes per row of a step."""
    dtype = outer.dtype
    try:
        return _layers(decoder, text, axes), _row_bytes(decoder, text, axes)
    except RuntimeError:
        if dtype == _HALF:
            raise
    outer.to(_HALF)  # on the meta device, grouped expert products support this dtype only
    layers, row = _layers(decoder, text, axes), _row_bytes(decoder, text, axes)
    outer.to(dtype)
    return layers, row * dtype.itemsize // _HALF.itemsize


def _layers(decoder: Any, text: Any, axes: int) -> tuple[AttentionCall, ...]:
    """Record what each layer needs in a pass on the meta device; ConfigError for a layer whose state is not keys and values."""
    unsupported = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if unsupported:
        index = text.layer_types.index(unsupported[0])
        raise ConfigError(f"layer {index} is {unsupported[0]}, whose state is not keys and values")
    step = PagedStep()
    with torch.inference_mode():
        decoder(**_meta_inputs(decoder.dtype, text, axes, _PROBE_ROWS), **{STEP: step})
    by_layer = {call.index: call for call in step.calls}
    for index in range(text.num_hidden_layers):
        calls = sum(call.index == index for call in step.calls)
        if calls != 1:
            raise ConfigError(
                f"layer {index}{_kind_of(decoder, index)} attends {calls} times through the common interface, not once"
            )
    return tuple(by_layer[index] for index in range(text.num_hidden_layers))


def _meta_inputs(dtype: torch.dtype, text: Any, axes: int, rows: int) -> dict[str, Any]:
    """Return the arguments of a decoder call with `rows` rows on the meta device."""
    positions = torch.arange(rows, device="meta")[None]
    return {
        "inputs_embeds": torch.zeros(1, rows, text.hidden_size, dtype=dtype, device="meta"),
        "position_ids": positions if axes == 1 else positions.expand(axes, 1, rows),
        "use_cache": False,
    }


def _kind_of(decoder: Any, index: int) -> str:
    layers = getattr(decoder, "layers", ())
    return f" ({type(layers[index]).__name__})" if index < len(layers) else ""


def _row_bytes(decoder: Any, text: Any, axes: int) -> int:
    """Return the peak bytes per row of a step in the decoder, from a pass on the meta device."""
    inputs = _meta_inputs(decoder.dtype, text, axes, _MEASURED_ROWS)
    with torch.inference_mode(), Peak() as peak:
        decoder(**inputs, **{STEP: PagedStep()})
    beside = 2 * inputs["inputs_embeds"].nbytes + 8 * (axes + 4) * _MEASURED_ROWS  # embeddings, encoder rows, ids, positions
    return int(-(-(peak.most + beside) // _MEASURED_ROWS))


def twin(root: Any, part: Any, forward: Callable[..., Any]) -> Any:
    """Return a copy of `root` that shares weights and calls `forward` instead of the forward of its submodule `part`."""
    copied = copy.copy(root)
    if root is part:
        copied.forward = forward
        return copied
    inside = {name for name, child in root._modules.items() if child is not None and part in set(child.modules())}
    copied._modules = {name: twin(child, part, forward) if name in inside else child for name, child in root._modules.items()}
    return copied


def make_encoders(outer: Any) -> None:
    """Allocate all modules except the decoder's layers on the CPU (with zeros), so that an item can be encoded."""
    decoder = outer.get_decoder()
    decoder_modules = set(decoder.modules()) - set(decoder.get_input_embeddings().modules())
    replaced: dict[Tensor, nn.Parameter] = {}  # tied parameters stay tied
    for module in (module for module in outer.modules() if module not in decoder_modules):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fresh = nn.Parameter(torch.zeros_like(parameter, device="cpu"), requires_grad=False)
                module._parameters[name] = replaced.setdefault(parameter, fresh)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")


def line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
