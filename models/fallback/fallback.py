"""Runs a class of transformers that has no implementation here: its own encoders and layers with our paged attention.

Everything before its decoder computes the embeddings of an item's tokens and is run unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ...callers.errors import CheckpointError, ConfigError
from ...kernels.dispatch import backend
from ...kernels.metadata import AttentionMetadata
from ...kernels.scatter import scatter_rows_
from ...mm.positions import mrope_positions
from ...mm.types import ItemGeometry, PlaceholderRange
from ..interface import CacheSpec, ForwardBatch, StepLimits
from .borrowed import (
    ATTENTION,
    CLASS_ERRORS,
    STEP,
    AttentionCall,
    PagedStep,
    attention_of,
    build,
    line,
    make_encoders,
    offline,
    twin,
)
from .peak import Peak

TOKENS = "input_ids"  # among an item's tensors: its tokens as the processor writes them
# decoder inputs that are checked, or that have no effect
_DECODER_INPUTS = ("inputs_embeds", "position_ids", "attention_mask", "past_key_values", "cache_position")
_TEXT_ROWS = 24  # rows of the run that compares a text-only model
_MTP = re.compile(r"mtp|layers\\?\.\d")  # finds patterns for tensors of multi-token prediction
_TOLERANCE, _TOLERANCE_16BIT = {torch.float32: 1e-3}, 6e-2  # relative to the norm of a row


class Fallback(nn.Module):
    """Implements `models.interface.Model`. Call `rehearse` per modality, before memory is planned and before use."""

    routes_by_modality: Mapping[str, int] = {}
    adapters: Sequence[str] = ()
    can_generate = True
    recordable = False  # classes of transformers may keep tensors between calls

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        built = build(config, dtype)
        self.dtype, self.device, self.name = dtype, device, type(built.outer).__name__
        self._adopt(built.outer)
        self.vocab_size, self.hidden_size = built.text.vocab_size, built.text.hidden_size
        self.row_size, self.rope_axes = self.hidden_size, built.axes
        self.max_positions = _max_positions(built.text)
        self.cache_specs = tuple(_cache_spec(layer, dtype) for layer in built.layers)
        self._row_bytes = built.row_bytes
        self._measured: dict[str, tuple[int, int, int]] = {}  # modality -> rows of an item, bytes of its tensors, peak bytes

    @property
    def item_device(self) -> torch.device:
        """The device on which items are encoded: the CPU while there are no weights."""
        return torch.device("cpu") if self.outer.get_output_embeddings().weight.is_meta else self.device

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Return the embeddings that the class passes to its decoder for an item; one item per call avoids padding."""
        items = [{name: value[i] for name, value in tensors.items()} for i in range(len(tensors[TOKENS]))]
        return [self._decoder_inputs(item)["inputs_embeds"][0] for item in items]

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.outer.get_input_embeddings()(batch.input_ids)
        if batch.embed_index is not None:
            assert batch.embed_rows is not None
            scatter_rows_(x, batch.embed_index, batch.embed_rows)
        step = PagedStep(tuple(batch.attn), tuple(batch.kv_caches))
        positions = batch.positions if self.rope_axes == 1 else batch.positions[:, None]  # [axes, batch of one, rows]
        return self._decode(inputs_embeds=x[None], position_ids=positions, use_cache=False, **{STEP: step})

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Run the class's own head: its inner model is replaced by one that returns `hidden`."""
        logits: Tensor = self._scores(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()

    def forward_bytes(self, limits: StepLimits) -> int:
        spec, s = self.cache_specs[0], self.dtype.itemsize
        gathered = 2 * 2 * limits.keys * spec.kv_heads * spec.head_dim * s + limits.rows * limits.longest * (1 + s)
        native = backend("attention", limits.device, self.dtype) == "native"
        return limits.rows * self._row_bytes + (0 if native else gathered)

    def input_bytes(self, modality: str, rows: int) -> int:
        rows_measured, inputs, _ = self._measured[modality]
        return -(-rows * inputs // rows_measured)

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Scale the measured item's peak to `rows`."""
        rows_measured, _, peak = self._measured[modality]
        return -(-rows * peak // rows_measured)

    def _adopt(self, outer: Any) -> None:
        """Keep the model, a copy that only runs its head, and a copy that stops where the decoder is called."""
        self.outer = outer
        self._scores = partial(twin(outer, outer.base_model, _return_hidden))
        self._encode = partial(twin(outer.base_model, outer.get_decoder(), _stop))

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: transformers chooses in `load_weights`."""

    def check_weights(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: transformers reports the names that its class does not read in `load_weights`."""

    def is_unused(self, name: str) -> bool:
        """Return True for tensors of multi-token prediction. Others are kept: the class may still rename and use them."""
        ignored = self.outer._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, name) for pattern in ignored if _MTP.search(pattern))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        kind, config = type(self.outer), self.outer.config
        with offline():
            outer, report = kind.from_pretrained(
                None,
                config=config,
                state_dict=dict(weights),
                dtype=self.dtype,
                attn_implementation=attention_of(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        for verb, names in (("lacks", report["missing_keys"]), ("holds unknown", report["unexpected_keys"])):
            if names:
                raise CheckpointError(f"the checkpoint {verb} {', '.join(sorted(names)[:3])}; it does not fit its config.json")
        if report["mismatched_keys"]:
            name, shape, expected = sorted(report["mismatched_keys"])[0]
            raise CheckpointError(f"{name} has shape {list(shape)}, the config needs {list(expected)}")
        self._adopt(outer.to(self.device).eval())

    def rehearse(self, modality: str, tensors: Mapping[str, Any], geometry: ItemGeometry, prompt: Mapping[str, Tensor]) -> None:
        """Encode one item to measure its memory; if there are weights, compare our forward with the class's own.

        Args:
            tensors: of one item, merged as for `embed_multimodal`.
            geometry: of that item.
            prompt: the output of the class's processor for a prompt with that item between text.

        Raises:
            ConfigError: the class does something that this path does not support.
        """
        has_weights = not self.outer.get_output_embeddings().weight.is_meta
        if not has_weights:
            make_encoders(self.outer)
        try:
            with torch.inference_mode():
                self._rehearse(modality, tensors, geometry, prompt, has_weights)
        except CLASS_ERRORS as error:
            raise ConfigError(f"{self.name} does not support {modality} items this way: {line(error)}") from None

    def rehearse_text(self) -> None:
        """Compare our forward with the class's own on a few tokens, if there are weights; ConfigError if they differ."""
        table = self.outer.get_input_embeddings()
        if table.weight.is_meta:
            return
        ids = torch.arange(_TEXT_ROWS, device=self.device) % self.vocab_size
        positions = torch.arange(_TEXT_ROWS, device=self.device).expand(self.rope_axes, -1)
        try:
            with torch.inference_mode():
                rows = table(ids)
                inputs = {"inputs_embeds": rows[None], "position_ids": positions}
                self._compare(ids, positions, PlaceholderRange(0, 0), rows[:0], inputs)
        except CLASS_ERRORS as error:
            raise ConfigError(f"{self.name} does not support text this way: {line(error)}") from None

    def _rehearse(
        self, modality: str, tensors: Mapping[str, Any], geometry: ItemGeometry, prompt: Mapping[str, Tensor], has_weights: bool
    ) -> None:
        with Peak() as peak:
            (rows,) = self.embed_multimodal(modality, tensors)
        input_bytes = sum(value.nbytes for value in tensors.values())
        self._measured[modality] = (len(rows), input_bytes, peak.most + input_bytes)
        ids, item = prompt[TOKENS][0], tensors[TOKENS][0][0]
        starts = [at for at in range(len(ids) - len(item) + 1) if torch.equal(ids[at : at + len(item)], item)]
        if not starts:
            raise ConfigError("its processor writes an item differently if text surrounds it")
        span = PlaceholderRange(starts[0], len(item))
        positions = mrope_positions(len(ids), [(span, geometry)], self.rope_axes)[0].to(ids.device)
        inputs = self._decoder_inputs({name: value for name, value in prompt.items() if name != "attention_mask"})
        _check_decoder_inputs(inputs, positions)
        if has_weights:
            self._compare(ids, positions, span, rows, inputs)

    def _compare(self, ids: Tensor, positions: Tensor, span: PlaceholderRange, rows: Tensor, inputs: Mapping[str, Any]) -> None:
        """Compare our forward, in two steps, with the class's decoder, attention and masks on the same inputs."""
        text = self.outer.config.get_text_config(decoder=True)
        text._attn_implementation = "eager"
        try:
            expected = self._decode(**{**inputs, "use_cache": False})
        finally:
            text._attn_implementation = ATTENTION
        ours = torch.cat([self.forward(batch) for batch in _two_batches(ids, positions, span, rows, self.cache_specs)])
        self.compute_logits(ours[-1:])  # fails now if the head cannot be called this way
        error = float(((ours - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)).max())
        if not error < _TOLERANCE.get(self.dtype, _TOLERANCE_16BIT):
            raise ConfigError(f"its hidden states differ from ours by {error:.1%}: it does more than causal attention")

    def _decode(self, **arguments: Any) -> Tensor:
        hidden: Tensor = self.outer.get_decoder()(**arguments).last_hidden_state
        return hidden[0]

    def _decoder_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with which the class calls its decoder."""
        parameters = signature(self.outer.base_model.forward).parameters
        try:
            self._encode(**{name: value for name, value in inputs.items() if name in parameters}, use_cache=False)
        except _DecoderCalled as call:
            return call.arguments
        raise ConfigError("its decoder is not called with embeddings")


class _DecoderCalled(Exception):
    """Raised in place of the call of the decoder."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def _stop(**arguments: Any) -> None:
    raise _DecoderCalled(arguments)


class _HiddenOutput:
    """The output of an inner model with hidden states only."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _return_hidden(*_: object, inputs_embeds: Tensor, **__: object) -> _HiddenOutput:
    return _HiddenOutput(inputs_embeds)


def _max_positions(text: Any) -> int:
    """Return the longest sequence. Beyond the trained length, frequencies of "longrope" depend on all sequences of a step."""
    rope = getattr(text, "rope_parameters", None) or {}
    key = "original_max_position_embeddings"
    return int(rope[key] if rope.get("rope_type") == "longrope" else text.max_position_embeddings)


def _cache_spec(layer: AttentionCall, dtype: torch.dtype) -> CacheSpec:
    kind = "full" if layer.window is None else "window"
    return CacheSpec(kind, layer.kv_heads, layer.head_dim, dtype, layer.window)


def _check_decoder_inputs(inputs: Mapping[str, Any], positions: Tensor) -> None:
    """Raise ConfigError if a class passes more to its decoder than embeddings and these positions, int64 `[axes, rows]`."""
    extra = [
        key for key, value in inputs.items() if key not in _DECODER_INPUTS and value is not None and not isinstance(value, bool)
    ]
    if extra:
        raise ConfigError(f"its decoder takes {extra[0]} beside embeddings, which is not supported")
    if inputs.get("attention_mask") is not None:
        raise ConfigError("its decoder takes a mask, which paged attention does not support")
    passed = inputs.get("position_ids")
    if passed is None and len(positions) > 1:
        raise ConfigError("its decoder takes no positions, though they have several axes")
    if passed is not None and not torch.equal(passed.reshape(-1, passed.shape[-1])[-len(positions) :], positions):
        raise ConfigError("its decoder takes other positions than those of text and grids")


def _two_batches(
    ids: Tensor, positions: Tensor, span: PlaceholderRange, rows: Tensor, specs: tuple[CacheSpec, ...]
) -> list[ForwardBatch]:
    """Return the batches of a prompt in two steps, with an item's rows at `span` and new caches."""
    total, size, device = len(ids), 16, ids.device
    blocks = -(-total // size)
    caches = [torch.zeros(2, blocks, size, spec.kv_heads, spec.head_dim, dtype=spec.dtype, device=device) for spec in specs]
    table, slots = torch.arange(blocks, dtype=torch.int32, device=device)[None], torch.arange(total, device=device)
    batches, cut = [], total // 2 + 1
    for start, stop in ((0, cut), (cut, total)):
        metadata = AttentionMetadata((0, stop - start), (stop,), table, slots[start:stop], size)
        first = max(start, span.offset)
        last = max(first, min(stop, span.end))
        batches.append(
            ForwardBatch(
                input_ids=ids[start:stop],
                positions=positions[:, start:stop],
                attn=[replace(metadata, window=spec.window) for spec in specs],
                kv_caches=caches,
                embed_index=torch.arange(first, last, device=device) - start,
                embed_rows=rows[first - span.offset : last - span.offset],
            )
        )
    return batches
