"""A class of transformers that we have no model of: its own towers and layers, our paged attention. Knows no family.

Its decoder calls attention by name through transformers' attention interface, and hands the arguments of a call on to it, so a
step arrives there without a global. Everything before its decoder makes the embeddings of an item's tokens, and is run as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..kernels.attention import paged_attention
from ..kernels.dispatch import backend
from ..kernels.metadata import AttentionMetadata
from ..mm.errors import CheckpointError, ConfigError, InputError
from .interface import CacheSpec, ForwardBatch, Work

ATTENTION = "sensorium_paged"  # name in transformers' attention interface
RUN = "input_ids"
_STEP = "sensorium_step"  # argument that goes down to the attention
_PLAIN = {
    "inputs_embeds",
    "position_ids",
    "attention_mask",
    "past_key_values",
    "use_cache",
    "cache_position",
    "input_ids",
    "return_dict",
}
_PROBE_ROWS, _MEASURED_ROWS = 4, 64
_BROKEN = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, NotImplementedError, ImportError)
_TOLERANCE, _HALF = {torch.float32: 1e-3}, 6e-2  # of the length of a row; the second in half precision


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
    **more: Any,
) -> tuple[Tensor, None]:
    """`query [1, heads, rows, dim]`, keys and values with their own heads -> `[1, rows, heads, dim of values]`.

    Raises:
        ConfigError: a step that does not arrive, or an argument that our attention does not honour.
    """
    if sensorium_step is None:
        raise ConfigError("its layers do not hand the arguments of a step on to their attention")
    odd = next((name for name in ("softcap", "s_aux", "position_bias") if more.get(name) is not None), None)
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
    out = paged_attention(q, k, v, sensorium_step.caches[index], sensorium_step.attn[index], scale)
    return out[None, ..., :wide], None


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a checkpoint cannot run on this path; None where it can, as far as its config.json tells."""
    try:
        build(config, torch.float32)
    except ConfigError as error:
        return str(error)
    return None


def class_of(config: Mapping[str, Any]) -> Any:
    """The class that config.json names; ConfigError where transformers, or this path, does not have it."""
    name = str((config.get("architectures") or ["none"])[0])
    try:
        import transformers
    except ImportError:
        reason = "transformers, which may have it, is not installed: pip install 'sensorium[fallback]'"
        raise ConfigError(f"{name} is not in the registry, and {reason}") from None
    found = getattr(transformers, name, None)
    if found is None or not hasattr(found, "generate"):
        raise ConfigError(
            f"{name} is not in the registry, and transformers {transformers.__version__} has no such model either"
        )
    return found


@dataclass(frozen=True)
class Built:
    """A class on the meta device, and what was learnt of its decoder there."""

    outer: Any
    decoder: Any
    text: Any  # config of the decoder
    layers: tuple[Layer, ...]


def build(config: Mapping[str, Any], dtype: torch.dtype) -> Built:
    """The class without weights; ConfigError says why it cannot be fed."""
    kind = class_of(config)
    name = kind.__name__
    try:
        parsed = kind.config_class.from_dict(dict(config))
        with torch.device("meta"):
            outer = kind._from_config(parsed, dtype=dtype, attn_implementation=_attention_of(parsed))
    except _BROKEN as error:
        raise ConfigError(f"{name} of transformers cannot be made from config.json: {_line(error)}") from None
    if parsed.is_encoder_decoder:
        raise ConfigError(f"{name} is an encoder with a decoder that reads across; only decoders run by way of transformers")
    decoder, text = outer.get_decoder(), parsed.get_text_config(decoder=True)
    if decoder is None or decoder is outer.base_model or outer.base_model is outer:
        raise ConfigError(f"{name} keeps no decoder apart from what makes its embeddings")
    try:
        layers = _layers(outer.eval(), decoder, text)
    except (ConfigError, *_BROKEN) as error:
        raise ConfigError(f"{name} cannot run with paged attention: {_line(error)}") from None
    return Built(outer, decoder, text, layers)


def _attention_of(parsed: Any) -> dict[str, str]:
    """Ours for the decoder, the class's own choice for towers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    text = parsed.get_text_config(decoder=True)
    return {next((name for name in parsed.sub_configs if getattr(parsed, name) is text), ""): ATTENTION}


def _layers(outer: Any, decoder: Any, text: Any) -> tuple[Layer, ...]:
    """What each layer asks of attention, from a run without numbers; ConfigError for a layer that keeps another state."""
    rope = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        raise ConfigError("its positions have several axes (mrope_section)")
    odd = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if odd:
        where = text.layer_types.index(odd[0])
        raise ConfigError(f"layer {where} is {odd[0]}, which keeps a state that is no key and value")
    step = Step()
    rows = torch.zeros(1, _PROBE_ROWS, text.hidden_size, dtype=outer.dtype, device="meta")
    places = torch.arange(_PROBE_ROWS, device="meta")[None]
    with torch.inference_mode():
        decoder(inputs_embeds=rows, position_ids=places, use_cache=False, **{_STEP: step})
    found = {layer.index: layer for layer in step.seen}
    for index in range(text.num_hidden_layers):
        calls = sum(layer.index == index for layer in step.seen)
        if calls != 1:
            raise ConfigError(f"layer {index}{_kind_of(decoder, index)} attends {calls} times in a pass, not once")
    return tuple(found[index] for index in range(text.num_hidden_layers))


def _kind_of(decoder: Any, index: int) -> str:
    layers = getattr(decoder, "layers", ())
    return f" ({type(layers[index]).__name__})" if index < len(layers) else ""


class Fallback(nn.Module):
    """See `models.interface.Model`. `rehearse` an item of each modality before its bytes are asked for, and before use."""

    rope_axes = 1

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        built = build(config, dtype)
        self.outer, self.dtype, self.device, self.name = built.outer, dtype, device, type(built.outer).__name__
        self.vocab_size, self.hidden_size = built.text.vocab_size, built.text.hidden_size
        self.row_size = self.hidden_size
        windows = [layer.window for layer in built.layers if layer.window is not None]
        self.max_positions = min([built.text.max_position_embeddings, *windows])  # within a window, all is seen
        self.cache_specs = tuple(CacheSpec("full", layer.kv_heads, layer.head_dim, dtype) for layer in built.layers)
        self._row_bytes = _bytes_of_row(built)
        self._measured: dict[str, tuple[int, int, int]] = {}  # rows of an item, bytes of its tensors, bytes of its run

    @property
    def item_device(self) -> torch.device:
        """Where items are run: without weights, on the CPU."""
        return torch.device("cpu") if self.outer.get_output_embeddings().weight.is_meta else self.device

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """What the class hands its decoder in place of an item's tokens; each item alone, since padding is its own affair."""
        count = len(tensors[RUN])
        return [self._entered({name: value[i] for name, value in tensors.items()})["inputs_embeds"][0] for i in range(count)]

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.outer.get_input_embeddings()(batch.input_ids)
        if batch.embed_index is not None:
            assert batch.embed_rows is not None
            x = x.index_copy(0, batch.embed_index, batch.embed_rows.to(x.dtype))
        step = Step(tuple(batch.attn), tuple(batch.kv_caches))
        return self._decoded(inputs_embeds=x[None], position_ids=batch.positions, use_cache=False, **{_STEP: step})

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """By the class's own head and whatever it does to logits: its inner model answers with `hidden`."""
        inner = self.outer.base_model
        inner.forward = lambda *_, **__: _Answer(hidden[None])
        try:
            logits: Tensor = self.outer(inputs_embeds=hidden[None], use_cache=False).logits
        finally:
            del inner.forward
        return logits[0].float()

    def forward_bytes(self, work: Work) -> int:
        spec, s = self.cache_specs[0], self.dtype.itemsize
        gathered = 2 * 2 * work.keys * spec.kv_heads * spec.head_dim * s + work.rows * work.longest * (1 + s)
        native = backend("attention", work.device, self.dtype) == "native"
        return work.rows * self._row_bytes + (0 if native else gathered)

    def input_bytes(self, modality: str, rows: int) -> int:
        measured, inputs, _ = self._measured[modality]
        return -(-rows * inputs // measured)

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        """In proportion to the item that was measured; nothing else tells."""
        measured, _, run = self._measured[modality]
        return -(-rows * run // measured)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        kind, config = type(self.outer), self.outer.config
        self.outer, told = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype=self.dtype,
            attn_implementation=_attention_of(config),
            output_loading_info=True,
        )
        for verb, names in (("lacks", told["missing_keys"]), ("holds unknown", told["unexpected_keys"])):
            if names:
                raise CheckpointError(f"the checkpoint {verb} {', '.join(sorted(names)[:3])}; it does not fit its config.json")
        if told["mismatched_keys"]:
            name, have, want = sorted(told["mismatched_keys"])[0]
            raise CheckpointError(f"{name} has shape {list(have)}, the config wants {list(want)}")
        self.outer.to(self.device).eval()

    def rehearse(self, modality: str, tensors: Mapping[str, Any], whole: Mapping[str, Tensor]) -> None:
        """One real run of one item: it is measured and, where there are weights, held to the class's own forward.

        Args:
            tensors: of one item, merged as for `embed_multimodal`.
            whole: all that the class's processor makes of a prompt with that item in between.

        Raises:
            ConfigError: the class does more with its inputs than this path can carry.
        """
        real = not self.outer.get_output_embeddings().weight.is_meta
        if not real:
            _make_encoders(self.outer)
        with torch.inference_mode():
            with Peak() as peak:
                (rows,) = self.embed_multimodal(modality, tensors)
            inputs = sum(value.nbytes for value in tensors.values())
            self._measured[modality] = (len(rows), inputs, peak.most + inputs)
            sent = self._entered({name: value for name, value in whole.items() if name != "attention_mask"})
            _check_sent(self.name, sent)
            if real:
                self._prove(rows, whole[RUN][0], tensors[RUN][0][0], sent)

    def _prove(self, rows: Tensor, ids: Tensor, run: Tensor, sent: Mapping[str, Any]) -> None:
        """Ours, cut in two, against the class's decoder with its own attention and masks on what the class hands it."""
        text = self.outer.config.get_text_config(decoder=True)
        text._attn_implementation = "eager"
        try:
            wanted = self._decoded(**{**sent, "use_cache": False})
        finally:
            text._attn_implementation = ATTENTION
        places = [at for at in range(len(ids) - len(run) + 1) if torch.equal(ids[at : at + len(run)], run)]
        if not places:
            raise ConfigError(f"the processor of {self.name} writes an item otherwise when text is around it")
        batches = _two_batches(ids, places[0], rows, self.cache_specs)
        found = torch.cat([self.forward(batch) for batch in batches])
        off = float(((found - wanted).float().norm(dim=-1) / wanted.float().norm(dim=-1)).max())
        if not off < _TOLERANCE.get(self.dtype, _HALF):
            reason = f"rows of a short prompt differ from the class's own by {off:.1%}"
            raise ConfigError(f"{self.name} does more than attend causally to placed rows: {reason}; it cannot run this way")

    def _decoded(self, **arguments: Any) -> Tensor:
        hidden: Tensor = self.outer.get_decoder()(**arguments).last_hidden_state
        return hidden[0]

    def _entered(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with which the class would call its decoder."""

        def stop(_: object, __: object, arguments: dict[str, Any]) -> None:
            raise _Entered(arguments)

        inner = self.outer.base_model
        known = signature(inner.forward).parameters
        hook = self.outer.get_decoder().register_forward_pre_hook(stop, with_kwargs=True)
        try:
            inner(**{name: value for name, value in inputs.items() if name in known}, use_cache=False)
        except _Entered as entered:
            return entered.arguments
        finally:
            hook.remove()
        raise InputError(f"{self.name} did not call its decoder")


class _Entered(Exception):
    """The decoder was about to be called."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class _Answer:
    """An inner model's result that has nothing but hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class Peak(TorchDispatchMode):
    """Bytes of the tensors that live at once at the most while it is active, beside those that were there before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._live = 0
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        there = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and ((key := _memory(leaf)) in self._users or key not in there):
                self._hold(leaf, key)
        return result

    def _hold(self, tensor: Tensor, key: int) -> None:
        size = tensor.untyped_storage().nbytes()
        self._users[key] = self._users.get(key, 0) + 1
        if self._users[key] == 1:
            self._live += size
            self.most = max(self.most, self._live)
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._live -= size


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes_of_row(built: Built) -> int:
    """What a row of a step takes in the decoder, from a run without numbers."""
    rows = torch.zeros(1, _MEASURED_ROWS, built.text.hidden_size, dtype=built.outer.dtype, device="meta")
    places = torch.arange(_MEASURED_ROWS, device="meta")[None]
    with torch.inference_mode(), Peak() as peak:
        built.decoder(inputs_embeds=rows, position_ids=places, use_cache=False, **{_STEP: Step()})
    return -(-(peak.most + 2 * rows.nbytes) // _MEASURED_ROWS)  # inputs and encoder rows beside it


def _make_encoders(outer: Any) -> None:
    """Give all but the layers of the decoder memory, so that an item can be run; what it holds does not matter."""
    decoder = outer.get_decoder()
    inside = set(decoder.modules()) - set(decoder.get_input_embeddings().modules())
    for module in (module for module in outer.modules() if module not in inside):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.zeros_like(parameter, device="cpu"), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")


def _check_sent(name: str, sent: Mapping[str, Any]) -> None:
    """ConfigError for what a class hands its decoder beside embeddings and the places of a plain text."""
    length = sent["inputs_embeds"].shape[1]
    extra = [key for key, value in sent.items() if key not in _PLAIN and value is not None and not isinstance(value, bool)]
    if extra:
        raise ConfigError(f"{name} hands its decoder {extra[0]} beside embeddings, which this path does not carry")
    if sent.get("attention_mask") is not None:
        raise ConfigError(f"{name} hands its decoder a mask of its own, which paged attention does not have")
    places = sent.get("position_ids")
    if places is not None and not (places.shape == (1, length) and torch.equal(places[0].cpu(), torch.arange(length))):
        raise ConfigError(f"{name} counts positions of items in a way of its own, which this path does not know")


def _two_batches(ids: Tensor, offset: int, rows: Tensor, specs: tuple[CacheSpec, ...]) -> list[ForwardBatch]:
    """A prompt cut in two, with an item's rows from `offset` on, and caches of its own."""
    total, size, device = len(ids), 16, ids.device
    blocks = -(-total // size)
    caches = [torch.zeros(2, blocks, size, spec.kv_heads, spec.head_dim, dtype=spec.dtype, device=device) for spec in specs]
    table = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    batches, cut = [], total // 2 + 1
    for start, stop in ((0, cut), (cut, total)):
        places = torch.arange(start, stop, device=device)
        attn = AttentionMetadata((0, stop - start), (stop,), table, places, size)
        first, last = max(start, offset), min(stop, offset + len(rows))
        batches.append(
            ForwardBatch(
                input_ids=ids[start:stop],
                positions=places[None],
                attn=[attn] * len(specs),
                kv_caches=caches,
                embed_index=torch.arange(first, max(first, last), device=device) - start,
                embed_rows=rows[first - offset : max(first, last) - offset],
            )
        )
    return batches


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
