"""A class of transformers that we have no model of: its own towers and layers, our paged attention. Knows no family.

Everything before its decoder makes the embeddings of an item's tokens, and is run as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.dispatch import backend
from ..kernels.metadata import AttentionMetadata
from ..kernels.scatter import put_rows_
from ..mm.errors import CheckpointError, ConfigError
from ..mm.positions import mrope_positions
from ..mm.types import ItemGeometry, PlaceholderRange
from .borrowed import ATTENTION, BROKEN, STEP, Layer, Step, apart, attention_of, build, line, make_encoders, twin
from .interface import CacheSpec, ForwardBatch, Work
from .peak import Peak

RUN = "input_ids"  # among an item's tensors, its tokens as the processor writes them
_HANDED = ("inputs_embeds", "position_ids", "attention_mask", "past_key_values", "cache_position")  # looked at, or of no weight
_TOLERANCE, _HALF = {torch.float32: 1e-3}, 6e-2  # of the length of a row; the second in half precision


class Fallback(nn.Module):
    """See `models.interface.Model`. `rehearse` an item of each modality before its bytes are asked for, and before use."""

    routes_by_modality: Mapping[str, int] = {}
    adapters: Sequence[str] = ()
    recordable = False  # classes of transformers may

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        built = build(config, dtype)
        self.dtype, self.device, self.name = dtype, device, type(built.outer).__name__
        self._take(built.outer)
        self.vocab_size, self.hidden_size = built.text.vocab_size, built.text.hidden_size
        self.row_size, self.rope_axes = self.hidden_size, built.axes
        self.max_positions = built.text.max_position_embeddings
        self.cache_specs = tuple(_cache_spec(layer, dtype) for layer in built.layers)
        self._row_bytes = built.row_bytes
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
            put_rows_(x, batch.embed_index, batch.embed_rows)
        step = Step(tuple(batch.attn), tuple(batch.kv_caches))
        places = batch.positions if self.rope_axes == 1 else batch.positions[:, None]  # [axes, batch of one, rows]
        return self._decoded(inputs_embeds=x[None], position_ids=places, use_cache=False, **{STEP: step})

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """By the class's own head and whatever it does to logits: its inner model answers with `hidden`."""
        logits: Tensor = self._scores(inputs_embeds=hidden[None], use_cache=False).logits
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

    def _take(self, outer: Any) -> None:
        """Its head and what is before its decoder, each without what lies between; calls leave no trace in any of them."""
        self.outer = outer
        self._scores = partial(twin(outer, outer.base_model, _answer))
        self._enters = partial(twin(outer.base_model, outer.get_decoder(), _enter))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        kind, config = type(self.outer), self.outer.config
        with apart():
            outer, told = kind.from_pretrained(
                None,
                config=config,
                state_dict=dict(weights),
                dtype=self.dtype,
                attn_implementation=attention_of(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        for verb, names in (("lacks", told["missing_keys"]), ("holds unknown", told["unexpected_keys"])):
            if names:
                raise CheckpointError(f"the checkpoint {verb} {', '.join(sorted(names)[:3])}; it does not fit its config.json")
        if told["mismatched_keys"]:
            name, have, want = sorted(told["mismatched_keys"])[0]
            raise CheckpointError(f"{name} has shape {list(have)}, the config wants {list(want)}")
        self._take(outer.to(self.device).eval())

    def rehearse(self, modality: str, tensors: Mapping[str, Any], geometry: ItemGeometry, whole: Mapping[str, Tensor]) -> None:
        """One real run of one item: it is measured and, where there are weights, held to the class's own forward.

        Args:
            tensors: of one item, merged as for `embed_multimodal`.
            geometry: of that item.
            whole: all that the class's processor makes of a prompt with that item in between.

        Raises:
            ConfigError: the class does more with its inputs than this path can carry.
        """
        real = not self.outer.get_output_embeddings().weight.is_meta
        if not real:
            make_encoders(self.outer)
        try:
            with torch.inference_mode():
                self._rehearse(modality, tensors, geometry, whole, real)
        except BROKEN as error:
            raise ConfigError(f"{self.name} cannot be fed with {modality}s this way: {line(error)}") from None

    def _rehearse(
        self, modality: str, tensors: Mapping[str, Any], geometry: ItemGeometry, whole: Mapping[str, Tensor], real: bool
    ) -> None:
        with Peak() as peak:
            (rows,) = self.embed_multimodal(modality, tensors)
        inputs = sum(value.nbytes for value in tensors.values())
        self._measured[modality] = (len(rows), inputs, peak.most + inputs)
        ids, run = whole[RUN][0], tensors[RUN][0][0]
        starts = [at for at in range(len(ids) - len(run) + 1) if torch.equal(ids[at : at + len(run)], run)]
        if not starts:
            raise ConfigError("its processor writes an item otherwise when text is around it")
        where = PlaceholderRange(starts[0], len(run))
        places = mrope_positions(len(ids), [(where, geometry)], self.rope_axes)[0].to(ids.device)
        sent = self._entered({name: value for name, value in whole.items() if name != "attention_mask"})
        _check_handed(sent, places)
        if real:
            self._prove(ids, places, where, rows, sent)

    def _prove(self, ids: Tensor, places: Tensor, where: PlaceholderRange, rows: Tensor, sent: Mapping[str, Any]) -> None:
        """Ours, cut in two, against the class's decoder with its own attention and masks on what the class hands it."""
        text = self.outer.config.get_text_config(decoder=True)
        text._attn_implementation = "eager"
        try:
            wanted = self._decoded(**{**sent, "use_cache": False})
        finally:
            text._attn_implementation = ATTENTION
        found = torch.cat([self.forward(batch) for batch in _two_batches(ids, places, where, rows, self.cache_specs)])
        self.compute_logits(found[-1:])  # a head that cannot be called so is said now
        off = float(((found - wanted).float().norm(dim=-1) / wanted.float().norm(dim=-1)).max())
        if not off < _TOLERANCE.get(self.dtype, _HALF):
            raise ConfigError(f"it does more than attend to what is before: hidden states differ from its own by {off:.1%}")

    def _decoded(self, **arguments: Any) -> Tensor:
        hidden: Tensor = self.outer.get_decoder()(**arguments).last_hidden_state
        return hidden[0]

    def _entered(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with which the class would call its decoder."""
        known = signature(self.outer.base_model.forward).parameters
        try:
            self._enters(**{name: value for name, value in inputs.items() if name in known}, use_cache=False)
        except _Entered as entered:
            return entered.arguments
        raise ConfigError("its decoder is not called with embeddings")


class _Entered(Exception):
    """The decoder was about to be called."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def _enter(**arguments: Any) -> None:
    raise _Entered(arguments)


class _Answer:
    """An inner model's result that has nothing but hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _answer(*_: object, inputs_embeds: Tensor, **__: object) -> _Answer:
    return _Answer(inputs_embeds)


def _cache_spec(layer: Layer, dtype: torch.dtype) -> CacheSpec:
    kind = "full" if layer.window is None else "window"
    return CacheSpec(kind, layer.kv_heads, layer.head_dim, dtype, layer.window)


def _check_handed(sent: Mapping[str, Any], places: Tensor) -> None:
    """ConfigError for what a class hands its decoder beside embeddings and `places`, int64 `[axes, rows]`."""
    odd = [key for key, value in sent.items() if key not in _HANDED and value is not None and not isinstance(value, bool)]
    if odd:
        raise ConfigError(f"its decoder is given {odd[0]} beside embeddings, which this path does not carry")
    if sent.get("attention_mask") is not None:
        raise ConfigError("its decoder is given a mask, which paged attention does not have")
    given = sent.get("position_ids")
    if given is None and len(places) > 1:
        raise ConfigError("its decoder is given no positions, though they have several axes")
    if given is not None and not torch.equal(given.reshape(-1, given.shape[-1])[-len(places) :], places):
        raise ConfigError("its decoder is given other positions than those of text and grids")


def _two_batches(
    ids: Tensor, places: Tensor, where: PlaceholderRange, rows: Tensor, specs: tuple[CacheSpec, ...]
) -> list[ForwardBatch]:
    """A prompt cut in two, with an item's rows at `where`, and caches of its own."""
    total, size, device = len(ids), 16, ids.device
    blocks = -(-total // size)
    caches = [torch.zeros(2, blocks, size, spec.kv_heads, spec.head_dim, dtype=spec.dtype, device=device) for spec in specs]
    table, slots = torch.arange(blocks, dtype=torch.int32, device=device)[None], torch.arange(total, device=device)
    batches, cut = [], total // 2 + 1
    for start, stop in ((0, cut), (cut, total)):
        one = AttentionMetadata((0, stop - start), (stop,), table, slots[start:stop], size)
        first = max(start, where.offset)
        last = max(first, min(stop, where.end))
        batches.append(
            ForwardBatch(
                input_ids=ids[start:stop],
                positions=places[:, start:stop],
                attn=[replace(one, window=spec.window) for spec in specs],
                kv_caches=caches,
                embed_index=torch.arange(first, last, device=device) - start,
                embed_rows=rows[first - where.offset : last - where.offset],
            )
        )
    return batches
