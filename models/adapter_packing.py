"""Brings the tensors of an adapter into the form in which layers apply them to the rows of requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..callers.errors import CheckpointError
from ..kernels.dispatch import backend
from ..kernels.linear import LinearWeight, linear, pack, without_bias
from ..kernels.linear.panels import pad_outputs
from ..kernels.low_rank import PANEL, LowRankWeights, pack_up
from .layers.basic import EmbeddingTable, Norm
from .layers.linear import Linear, LmHead
from .layers.row_adapter import EmbeddingChange, LayerChange, LowRankChange, NormChange, OutputGain, Outputs, PackedPairs
from .memory_formulas import packed_weight_bytes

AdaptedLayer = Linear | LmHead | EmbeddingTable | Norm
_UNIT_ROWS = 256  # rows of the unit matrix that are multiplied at a time
_TABLE_ROWS = 4096  # rows of a table that are compared at a time


@dataclass(frozen=True, eq=False)
class ShardPair:
    """A pair of matrices for one shard of a Linear, for the head, or for a table of embeddings `[vocab, dim]`.

    Args:
        module: name in the adapter.
        weight: canonical name of the shard's weight.
        number: of the layer. outputs: those of the shard.
        down: `[rank, in]`, or `[rank, dim]`. up: `[out, rank]`, or `[vocab, rank]`.
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


@dataclass(frozen=True, eq=False)
class ReplacedTensor:
    """A weight or bias that an adapter replaces: `modules_to_save` of peft.

    Args:
        module: name in the adapter.
        name: canonical name of the model's tensor.
        number: of the layer. outputs: those of the layer to which the tensor belongs.
        is_base: the adapter says that it is the base model's own, as peft stores tables beside pairs.
        token_ids: the tokens whose rows it replaces, ascending; () for all outputs.
    """

    module: str
    name: str
    number: int
    outputs: slice
    tensor: Tensor
    is_base: bool = False
    token_ids: tuple[int, ...] = ()

    @property
    def is_bias(self) -> bool:
        return self.name.endswith(".bias")


def layer_shape(layer: AdaptedLayer) -> tuple[int, int]:
    """Return the outputs and inputs of a layer's weight: of a table its rows and their width, of a norm 1 and its width."""
    if isinstance(layer, Norm):
        return 1, len(layer.weight)
    if isinstance(layer, EmbeddingTable):
        return layer.num_embeddings, layer.dim
    return layer.outputs, layer.in_features


def layer_dtype(layer: AdaptedLayer) -> torch.dtype:
    return layer.weight.dtype if isinstance(layer, Norm) else layer.dtype


def pairs_bytes(layer: AdaptedLayer, shards: Sequence[tuple[int, int]]) -> int:
    """Return the bytes of pairs as `pack_layer` lays them out. `shards`: rank and outputs of each."""
    (_, inner), dtype, device = layer_shape(layer), layer_dtype(layer), _planned_device(layer)
    if isinstance(layer, EmbeddingTable):
        return sum(
            rank * rows * dtype.itemsize + packed_weight_bytes(rank, inner, False, dtype, device) for rank, rows in shards
        )
    if _in_kernel(layer):
        return dtype.itemsize * sum(rank * (inner + _whole_panels(rows)) for rank, rows in shards)
    down = packed_weight_bytes(inner, sum(rank for rank, _ in shards), False, dtype, device)
    return down + sum(packed_weight_bytes(rank, rows, False, dtype, device) for rank, rows in shards)


def gain_bytes(layer: AdaptedLayer, outputs: int) -> int:
    return 2 * (_whole_panels(outputs) if _in_kernel(layer) else outputs) * layer_dtype(layer).itemsize


def _in_kernel(layer: AdaptedLayer) -> bool:
    """Return whether the C++ kernel multiplies the pairs of a layer."""
    return isinstance(layer, Linear) and backend("low_rank", _planned_device(layer), layer.dtype) == "native"


def _whole_panels(outputs: int) -> int:
    return -(-outputs // PANEL) * PANEL


def replaced_bytes(layer: AdaptedLayer, part: ReplacedTensor) -> int:
    """Return the bytes of a tensor as `pack_layer` lays it out."""
    dtype = layer_dtype(layer)
    ids = 8 * len(part.token_ids)
    if isinstance(layer, EmbeddingTable | Norm) or part.is_bias:
        return ids + part.tensor.numel() * dtype.itemsize
    rows, inner = part.tensor.shape
    return ids + packed_weight_bytes(inner, rows, False, dtype, _planned_device(layer))


def _planned_device(layer: AdaptedLayer) -> torch.device:
    device = layer.weight.device if isinstance(layer, Norm) else layer.device
    return device if device.type != "meta" else torch.device("cpu")


def pack_layer(layer: AdaptedLayer, pairs: Sequence[ShardPair], replaced: Sequence[ReplacedTensor]) -> LayerChange:
    """Return what an adapter changes in a layer.

    Raises:
        CheckpointError: a tensor holds NaN, infinity, or numbers that the model's dtype cannot hold.
    """
    if isinstance(layer, Norm):
        return _pack_norm(layer, replaced)
    if isinstance(layer, EmbeddingTable):
        return _pack_embedding(layer, pairs, replaced)
    device, dtype, first = layer.device, layer.dtype, 0
    downs, ups, ranks = list[Tensor](), list[tuple[slice, slice, Tensor]](), dict[int, slice]()
    gains = _gains(layer, [pair for pair in pairs if pair.magnitude is not None])
    for part in (part for part in replaced if gains):
        raise CheckpointError(f"the adapter replaces {part.module} and has DoRA in the same layer, which is not supported")
    for pair in pairs:
        if id(pair.down) not in ranks:  # shards that are stored as one weight have one `down`
            ranks[id(pair.down)] = slice(first, first := first + len(pair.down))
            downs.append(_checked(pair.down.to(dtype), pair.module))
        up = pair.up.float().to(device) * pair.scale
        if pair.weight in gains:
            up *= gains[pair.weight].gain.float()[:, None]
        ups.append((ranks[id(pair.down)], pair.outputs, _checked(up.to(dtype), pair.module)))
    shards = _replaced_shards(layer, replaced)
    if not _in_kernel(layer) or not downs:
        packed = [(own, outputs, pack(up, None)) for own, outputs, up in ups]
        return PackedPairs(pack(torch.cat(downs).to(device), None) if downs else None, packed, tuple(gains.values()), shards)
    padded = {
        number: (pad_outputs(gains[pair.weight].gain, PANEL), pad_outputs(gains[pair.weight].shift, PANEL))
        for number, pair in enumerate(pairs)
        if pair.weight in gains
    }
    return LowRankChange(
        LowRankWeights(torch.cat(downs), [(own, outputs, pack_up(up)) for own, outputs, up in ups], padded), shards
    )


def _replaced_shards(layer: Linear | LmHead, replaced: Sequence[ReplacedTensor]) -> list[tuple[Outputs, LinearWeight]]:
    biases, shards = {part.outputs.start: part for part in replaced if part.is_bias}, list[tuple[Outputs, LinearWeight]]()
    for part in (part for part in replaced if not part.is_bias):
        bias = biases.pop(part.outputs.start, None)
        moved_bias = None if bias is None else _moved(bias.tensor, layer.device, layer.dtype, bias.module)
        outputs = torch.tensor(part.token_ids, device=layer.device) if part.token_ids else part.outputs
        shards.append((outputs, pack(_moved(part.tensor, layer.device, layer.dtype, part.module), moved_bias)))
    for bias in biases.values():
        raise CheckpointError(f"the adapter changes {bias.module} and not the weight, which is not supported; merge it")
    return shards


def _pack_embedding(layer: EmbeddingTable, pairs: Sequence[ShardPair], replaced: Sequence[ReplacedTensor]) -> EmbeddingChange:
    table, tokens, up, down = None, None, None, None
    for part in replaced:
        tensor = _moved(part.tensor, layer.device, layer.dtype, part.module)
        if part.token_ids:
            tokens = torch.tensor(part.token_ids, device=layer.device), tensor
        else:
            table = tensor
    for pair in pairs:  # one, because the table has one shard
        up = _moved(pair.up, layer.device, layer.dtype, pair.module)
        down = pack(_moved(pair.down.float().T.contiguous() * pair.scale, layer.device, layer.dtype, pair.module), None)
    return EmbeddingChange(table, up, down, layer.scale, tokens)


def _pack_norm(layer: Norm, replaced: Sequence[ReplacedTensor]) -> NormChange:
    weight, bias = layer.weight, layer.bias
    for part in replaced:
        tensor = _moved(part.tensor, layer.weight.device, layer.weight.dtype, part.module)
        if part.is_bias:
            bias = tensor
        else:
            weight = tensor if bias is None else tensor + layer.offset  # as `Norm.pack` does
    return NormChange(weight, bias, layer.eps, layer.offset)


def is_own(layer: AdaptedLayer, part: ReplacedTensor) -> bool:
    """Return whether a tensor equals the layer's own, as it was loaded."""
    tensor = part.tensor.to(layer_dtype(layer))
    if isinstance(layer, EmbeddingTable):
        starts = range(0, len(tensor), _TABLE_ROWS)
        ids = (torch.arange(first, min(first + _TABLE_ROWS, len(tensor)), device=layer.device) for first in starts)
        return all(torch.equal(layer.read_rows(rows).cpu(), tensor[rows.cpu()]) for rows in ids)
    if isinstance(layer, Norm) or part.is_bias:
        return False
    return all(torch.equal(own[:, part.outputs].T.cpu(), tensor[:, columns]) for columns, own in _weight_columns(layer))


def _weight_columns(layer: Linear | LmHead) -> Iterator[tuple[slice, Tensor]]:
    """Yield inputs of a layer and its weight for them `[inputs, out]`.

    The weight is read from the packed one, in whatever format it is, by multiplying with rows of the unit matrix.
    """
    bare, inner = without_bias(layer.packed), layer.in_features
    for first in range(0, inner, _UNIT_ROWS):
        columns = slice(first, min(first + _UNIT_ROWS, inner))
        unit = torch.zeros(columns.stop - first, inner, dtype=layer.dtype, device=layer.device)
        unit[:, columns].fill_diagonal_(1)
        yield columns, linear(unit, bare)


def _gains(layer: Linear | LmHead, pairs: Sequence[ShardPair]) -> dict[str, OutputGain]:
    """Return the gains of the shards with DoRA: magnitude / length of the row of the changed weight. Keys: `pair.weight`."""
    if not pairs:
        return {}
    dtype, device = layer.dtype, layer.device
    squares = {pair.weight: torch.zeros(len(pair.up), device=device) for pair in pairs}
    for columns, weight in _weight_columns(layer):
        for pair in pairs:
            up, down = (matrix.float().to(device) for matrix in (pair.up, pair.down[:, columns]))
            squares[pair.weight] += (weight[:, pair.outputs].float() + (down.T @ up.T) * pair.scale).square_().sum(0)
    (bias,) = linear(torch.zeros(1, layer.in_features, dtype=dtype, device=device), layer.packed).float()
    gains = {}
    for pair in pairs:
        assert pair.magnitude is not None
        gain = pair.magnitude.float().to(device) / squares[pair.weight].sqrt_()
        shift = bias[pair.outputs] * (1 - gain)
        gains[pair.weight] = OutputGain(
            pair.outputs, _checked(gain.to(dtype), pair.module), _checked(shift.to(dtype), pair.module)
        )
    return gains


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype, module: str) -> Tensor:
    return _checked(tensor.to(dtype), module).to(device)


def _checked(tensor: Tensor, module: str) -> Tensor:
    if not tensor.isfinite().all():
        raise CheckpointError(
            f"the adapter's tensors of {module} hold NaN, infinity, or numbers beyond {str(tensor.dtype)[6:]}"
        )
    return tensor


def by_layer(
    pairs: Iterable[ShardPair], replaced: Iterable[ReplacedTensor]
) -> Mapping[int, tuple[list[ShardPair], list[ReplacedTensor]]]:
    """Return an adapter's pairs and tensors by the number of the layer."""
    layers = dict[int, tuple[list[ShardPair], list[ReplacedTensor]]]()
    for pair in pairs:
        layers.setdefault(pair.number, ([], []))[0].append(pair)
    for part in replaced:
        layers.setdefault(part.number, ([], []))[1].append(part)
    return layers
