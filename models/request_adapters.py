"""Adapters that requests choose: which layers of a model they change, and their tensors as the layers read them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from weakref import ref

import torch
from torch import Tensor, nn

from ..callers.errors import CheckpointError, ConfigError
from ..checkpoints.merged_adapter import ONLY_LINEAR, LowRankPair, weight_of
from ..checkpoints.weight_files import rename
from ..kernels.linear import LinearWeight, linear, pack, without_bias
from ..mm.hashing import digest
from .adapters import shards_of
from .decoder_model import DecoderModel
from .interface import Model, StepLimits
from .layers.basic import Converter, Convertible
from .layers.linear import Linear
from .layers.moe import Mixture, ModalityMixture
from .layers.row_adapter import ENCODER_ROWS, ActiveAdapters, AdapterSlot, OutputGain, PackedPairs, RowGroup
from .memory_formulas import OpBytes, packed_weight_bytes
from .text.decoder import CrossLayer

_UNIT_ROWS = 256  # rows of the unit matrix that are multiplied at a time
_CHECKED_ROWS = 64  # about so many rows of a converted weight are compared


@dataclass(frozen=True, eq=False)
class ShardPair:
    """A pair of matrices for one shard of a Linear.

    Args:
        module: name in the adapter.
        weight: canonical name of the shard's weight.
        number: of the Linear. outputs: those of the shard.
        magnitude: of the shard's outputs, `[out]`, with DoRA.
    """

    module: str
    weight: str
    number: int
    outputs: slice
    down: Tensor
    up: Tensor
    scale: float
    magnitude: Tensor | None = None


class AdaptedLayers:
    """The linear layers of decoder, encoders and connectors that adapters of requests may change.

    Experts are left out, because the rows that they get are not those of the step, and so is cross-attention.

    Args:
        stored: names of the checkpoint's tensors.

    Raises:
        ConfigError: the model has no decoder-only stack, or adapters of its own.
    """

    def __init__(self, model: Model, stored: Iterable[str]) -> None:
        if not isinstance(model, DecoderModel) or getattr(model, "language_model", None) is None:
            raise ConfigError("<<param=>>True needs a decoder-only model that does not run through transformers; leave it out",
                              param="enable_lora")  # fmt: skip
        if model.adapters:
            raise ConfigError("<<param=>>True: this checkpoint has adapters of its own; leave it out", param="enable_lora")
        self._model: ref[DecoderModel] = ref(model)  # weak, because the model refers to this object
        self.active: ActiveAdapters = ActiveAdapters()
        self.encoding: ActiveAdapters = ActiveAdapters()  # of the layers of encoders and connectors
        self._layers: list[Linear] = []
        self._shards: dict[str, tuple[int, slice]] = {}  # canonical name of a weight -> number of its Linear, and its outputs
        self._add_layers("language_model", model.language_model, self.active)
        self._first_of_encoder: int = len(self._layers)
        for name, part in model.encoder_parts:
            self._add_layers(name, part, self.encoding)
        modules = [(path, module) for path, module in model.named_modules() if isinstance(module, Convertible)]
        self._converters: dict[str, Converter] = dict(chain.from_iterable(module.converters(path) for path, module in modules))
        names = list(stored)
        self._names: dict[str, None] = dict.fromkeys((*self._shards, *names))  # the checkpoint's come last: they win
        self._weights: set[str] = {weight_of(name) for name in names}

    def _add_layers(self, path: str, root: nn.Module, active: ActiveAdapters) -> None:
        for layer, stem, start, rows in shards_of(root, path, (Mixture, ModalityMixture, CrossLayer)):
            if layer.slot is None:
                layer.slot = AdapterSlot(len(self._layers), active)
                self._layers.append(layer)
            self._shards[f"{stem}.weight"] = layer.slot.number, slice(start, start + rows)

    @property
    def prefixes(self) -> Sequence[tuple[str, str]]:
        """(stored, canonical) prefixes of the model's tensor names."""
        model = self._model()
        assert model is not None
        return model.prefixes

    @property
    def stored(self) -> Collection[str]:
        """Names that `MergedAdapter.pairs` compares: of the checkpoint's tensors, and canonical ones."""
        return self._names

    def split(self, pair: LowRankPair) -> list[ShardPair]:
        """Return the pairs of the shards that a stored weight has become. Tensors may be on the meta device.

        Weights that the model does not compute with, such as the layers of a tower after the one that is read, have none.

        Raises:
            CheckpointError: no layer takes it, or its shape does not fit.
        """
        model = self._model()
        assert model is not None
        if pair.weight not in self._shards and model.is_unused(pair.weight):
            return []
        parts = list(self._parts(model, pair))
        shards = [self._shards.get(name) for name, _ in parts]
        if not parts or None in shards:
            raise CheckpointError(f"the adapter changes {pair.module} {ONLY_LINEAR}")
        shard_pairs = []
        for (name, change), shard in zip(parts, shards, strict=True):
            assert shard is not None
            number, outputs = shard
            inner, rank = self._layers[number].in_features, len(pair.down)
            up, magnitude = (change, None) if pair.magnitude is None else (change[:, :-1], change[:, -1])
            if tuple(pair.down.shape) != (rank, inner) or tuple(up.shape) != (outputs.stop - outputs.start, rank):
                raise CheckpointError(
                    f"the adapter's matrices of {pair.module} are {list(pair.down.shape)} and {list(pair.up.shape)}, which "
                    f"do not fit the base model's {name}; give an adapter of this model"
                )
            shard_pairs.append(ShardPair(pair.module, name, number, outputs, pair.down, up, pair.scale, magnitude))
        return shard_pairs

    def _parts(self, model: DecoderModel, pair: LowRankPair) -> Iterator[tuple[str, Tensor]]:
        """Yield canonical names and the rows of `up`, split and ordered as the stored weight is when it is loaded.

        The magnitude, which has a number for each row, is their last column.
        """
        whole = pair.up if pair.magnitude is None else torch.cat((pair.up, pair.magnitude[:, None].to(pair.up.dtype)), 1)
        if pair.weight in self._shards and pair.weight not in self._weights:
            yield pair.weight, whole
            return
        try:
            parts = list(self._converted(model, pair.weight, whole))
            inputs = torch.arange(1.0, 1 + pair.down.shape[1])
            marked = [] if whole.is_meta else list(self._converted(model, pair.weight, inputs.expand(len(whole), -1)))
        except (IndexError, ValueError, RuntimeError):
            raise CheckpointError(
                f"the adapter's matrix of {pair.module} has shape {list(pair.up.shape)}, which does not fit the base model; "
                "give an adapter of this model"
            ) from None
        if not all(_keeps_inputs(part, inputs) for _, part in marked):
            raise CheckpointError(
                f"the adapter changes {pair.module}, whose inputs the base model stores in another order, which is not "
                "supported for adapters per request; merge it into the model"
            )
        yield from parts

    def _converted(self, model: DecoderModel, stored: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in model.convert_weights([(stored, weight)]):
            canonical = rename(name, model.prefixes)
            yield from self._converters[canonical](tensor) if canonical in self._converters else [(canonical, tensor)]

    def num_bytes(self, pairs: Iterable[ShardPair]) -> int:
        """Return the bytes of an adapter as `pack` lays it out."""
        ranks, gains = dict[int, list[tuple[int, int]]](), 0
        for pair in pairs:
            outputs = pair.outputs.stop - pair.outputs.start
            ranks.setdefault(pair.number, []).append((len(pair.down), outputs))
            gains += 0 if pair.magnitude is None else _gain_bytes(self._layers[pair.number], outputs)
        return gains + sum(self._layer_bytes(self._layers[number], shards) for number, shards in ranks.items())

    def capacity(self, count: int, rank: int) -> int:
        """Return the bytes of so many adapters of this rank that change every layer, with DoRA."""
        shards = {layer: [(rank, rows) for rows in layer.shards.values()] for layer in self._layers}
        gains = sum(_gain_bytes(layer, layer.outputs) for layer in self._layers)
        return count * (gains + sum(self._layer_bytes(layer, ranks) for layer, ranks in shards.items()))

    def _layer_bytes(self, layer: Linear, shards: Sequence[tuple[int, int]]) -> int:
        device, dtype = layer.device if layer.device.type != "meta" else torch.device("cpu"), layer.dtype
        down = packed_weight_bytes(layer.in_features, sum(rank for rank, _ in shards), False, dtype, device)
        return down + sum(packed_weight_bytes(rank, rows, False, dtype, device) for rank, rows in shards)

    def step_bytes(self, limits: StepLimits, rank: int) -> int:
        """Return the bytes that adapters of the decoder's largest layer allocate: its rows, and both products."""
        return _layers_step_bytes(self._layers[: self._first_of_encoder], limits, rank)

    def encoder_step_bytes(self, limits: StepLimits, rank: int) -> int:
        """Return the bytes that adapters of the largest layer of encoders allocate in a call."""
        return _layers_step_bytes(self._layers[self._first_of_encoder :], replace(limits, rows=ENCODER_ROWS), rank)

    def changes_encoder(self, pair: ShardPair) -> bool:
        """Return whether a pair is one of an encoder or connector, and not of the decoder."""
        return pair.number >= self._first_of_encoder

    def pack(self, pairs: Iterable[ShardPair]) -> dict[int, PackedPairs]:
        """Return an adapter's matrices as the layers read them, by the number of the layer.

        Raises:
            CheckpointError: a matrix holds NaN, infinity, or numbers that the model's dtype cannot hold.
        """
        by_layer = dict[int, list[ShardPair]]()
        for pair in pairs:
            by_layer.setdefault(pair.number, []).append(pair)
        packed = {}
        for number, shards in by_layer.items():
            layer, first = self._layers[number], 0
            downs, ups, ranks = list[Tensor](), list[tuple[slice, slice, LinearWeight]](), dict[int, slice]()
            gains = _gains(layer, [pair for pair in shards if pair.magnitude is not None])
            for pair in shards:
                if id(pair.down) not in ranks:  # shards that are stored as one weight have one `down`
                    ranks[id(pair.down)] = slice(first, first := first + len(pair.down))
                    downs.append(_checked(pair.down.to(layer.dtype), pair))
                up = pair.up.float().to(layer.device) * pair.scale
                if pair.weight in gains:
                    up *= gains[pair.weight].gain.float()[:, None]
                ups.append((ranks[id(pair.down)], pair.outputs, pack(_checked(up.to(layer.dtype), pair), None)))
            packed[number] = PackedPairs(pack(torch.cat(downs).to(layer.device), None), ups, tuple(gains.values()))
        return packed

    @contextmanager
    def applied(self, groups: Sequence[RowGroup], num_rows: int) -> Iterator[None]:
        """Apply adapters to the rows of a forward pass inside the context."""
        self.active.groups, self.active.num_rows = groups, num_rows
        try:
            yield
        finally:
            self.active.groups = ()

    @contextmanager
    def applied_to_encoder(self, pairs: Mapping[int, PackedPairs]) -> Iterator[None]:
        """Apply an adapter to the encoder calls inside the context."""
        self.encoding.groups = (RowGroup(None, pairs),)
        try:
            yield
        finally:
            self.encoding.groups = ()


def adapted_layers(model: Model) -> AdaptedLayers | None:
    """Return the layers that adapters of requests change; None if the model takes no such adapters."""
    layers = getattr(model, "request_adapters", None)
    return layers if isinstance(layers, AdaptedLayers) else None


def content_digest(pairs: Iterable[ShardPair]) -> str:
    """Return the identity of an adapter: what it adds to which weights."""
    ordered = sorted(pairs, key=lambda pair: pair.weight)
    return digest("sensorium.lora", [[pair.weight, pair.scale, pair.down, pair.up, pair.magnitude] for pair in ordered])


def _keeps_inputs(converted: Tensor, inputs: Tensor) -> bool:
    """Return whether converting a weight whose rows are `inputs [in]` only moves, joins or scales outputs."""
    if converted.ndim != 2 or converted.shape[1] != len(inputs):
        return False
    some = converted[:: max(1, len(converted) // _CHECKED_ROWS)]
    return torch.allclose(some, some[:, :1] * inputs, rtol=1e-4)


def _layers_step_bytes(layers: Sequence[Linear], limits: StepLimits, rank: int) -> int:
    most = 0
    for layer in layers:
        ops, ranks = OpBytes(layer.dtype, limits), rank * len(layer.shards)
        low = ops.linear(layer.in_features, ranks, limits.rows) + rank * layer.dtype.itemsize
        wide = max(ops.linear(rank, rows, limits.rows) for rows in layer.shards.values())
        most = max(most, layer.in_features * layer.dtype.itemsize + low + wide)
    return limits.rows * most


def _gain_bytes(layer: Linear, outputs: int) -> int:
    return 2 * outputs * layer.dtype.itemsize


def _gains(layer: Linear, pairs: Sequence[ShardPair]) -> dict[str, OutputGain]:
    """Return the gains of the shards with DoRA: magnitude / length of the row of the changed weight. Keys: `pair.weight`.

    The base weight is read from the packed one, in whatever format it is, by multiplying with rows of the unit matrix.
    """
    if not pairs:
        return {}
    inner, dtype, device = layer.in_features, layer.dtype, layer.device
    bare, squares = without_bias(layer.packed), {pair.weight: torch.zeros(len(pair.up), device=device) for pair in pairs}
    for first in range(0, inner, _UNIT_ROWS):
        columns = slice(first, min(first + _UNIT_ROWS, inner))
        unit = torch.zeros(columns.stop - first, inner, dtype=dtype, device=device)
        unit[:, columns].fill_diagonal_(1)
        weight = linear(unit, bare).float()  # [columns, out]
        for pair in pairs:
            up, down = (matrix.float().to(device) for matrix in (pair.up, pair.down[:, columns]))
            squares[pair.weight] += (weight[:, pair.outputs] + (down.T @ up.T) * pair.scale).square_().sum(0)
    (bias,) = linear(torch.zeros(1, inner, dtype=dtype, device=device), layer.packed).float()
    gains = {}
    for pair in pairs:
        assert pair.magnitude is not None
        gain = pair.magnitude.float().to(device) / squares[pair.weight].sqrt_()
        shift = bias[pair.outputs] * (1 - gain)
        gains[pair.weight] = OutputGain(pair.outputs, _checked(gain.to(dtype), pair), _checked(shift.to(dtype), pair))
    return gains


def _checked(tensor: Tensor, pair: ShardPair) -> Tensor:
    if not tensor.isfinite().all():
        raise CheckpointError(
            f"the adapter's matrices of {pair.module} hold NaN, infinity, or numbers beyond {str(tensor.dtype)[6:]}"
        )
    return tensor
