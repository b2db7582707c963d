"""Adapters that requests choose: which layers of a model they change, and their tensors as the layers read them."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count
from typing import Literal, get_args
from weakref import ref

import torch
from torch import Tensor, nn

from ..callers.errors import CheckpointError, ConfigError
from ..checkpoints.expert_adapters import EXPERT_TENSORS
from ..checkpoints.merged_adapter import ONLY_LAYERS, LowRankPair, ReplacedWeight, check_token_rows, weight_of
from ..checkpoints.weight_files import rename
from ..kernels.low_rank.native import AdapterTable
from ..mm.hashing import digest
from .adapter_packing import (
    AdaptedLayer,
    ReplacedTensor,
    ShardPair,
    by_layer,
    gain_bytes,
    is_own,
    layer_dtype,
    layer_shape,
    pack_layer,
    pairs_bytes,
    replaced_bytes,
)
from .interface import Model, StepLimits, SupportsAdapters
from .layers.basic import Converter, Convertible, EmbeddingTable, Norm
from .layers.linear import Linear, LmHead
from .layers.moe import Mixture, ModalityMixture
from .layers.ranks import is_below
from .layers.row_adapter import (
    ENCODER_ROWS,
    ActiveAdapters,
    AdapterSlot,
    ExpertSlot,
    LayerChange,
    LowRankChange,
    PackedAdapter,
    RowGroup,
)
from .memory_formulas import OpBytes
from .text.attention import CrossAttention
from .text.decoder import AbsentLayer, Mixer, modules_of_all_ranks
from .text.encoder_decoder import CrossDecoderCrossAttention

ModelPart = Literal["decoder", "experts", "cross", "head", "encoder"]
"""A part of the model whose layers get the same rows: the decoder, its experts (which divide the rows), keys of
cross-attention, the head, or encoders and connectors.
"""
_CHECKED_ROWS = 64  # about so many rows of a converted weight are compared
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class AdaptedLayers:
    """The layers of decoder, head, encoders and connectors that adapters of requests may change.

    Args:
        stored: names of the checkpoint's tensors.

    Raises:
        ConfigError: the model has no decoder of its own, or adapters of its own.
    """

    def __init__(self, model: Model, stored: Iterable[str]) -> None:
        if not isinstance(model, SupportsAdapters) or not isinstance(model, nn.Module) or not dict(model.decoder_parts):
            reason = "<<param=>>True needs a model with a decoder, not one that runs through transformers; leave it out"
            raise ConfigError(reason, param="enable_lora")
        if model.adapters:
            raise ConfigError("<<param=>>True: this checkpoint has adapters of its own; leave it out", param="enable_lora")
        self._model: ref[SupportsAdapters] = ref(model)  # weak, because the model refers to this object
        self.active: Mapping[ModelPart, ActiveAdapters] = {part: ActiveAdapters() for part in get_args(ModelPart)}
        self._calls: ActiveAdapters = ActiveAdapters()  # of the layers of experts
        self._layers: list[AdaptedLayer] = []
        self._part_of: list[ModelPart] = []
        self._absent = set[int]()  # numbers of layers that other ranks hold
        self._shards: dict[str, tuple[int, slice]] = {}  # canonical name of a tensor -> number of its layer, and its outputs
        parts: tuple[ModelPart, ...] = ("decoder", "head", "encoder")
        for part, modules in zip(parts, (model.decoder_parts, model.head_parts, model.encoder_parts), strict=True):
            for name, module in modules:
                self._add_layers(name, module, part)
        converted = [(path, module) for path, module in modules_of_all_ranks(model) if isinstance(module, Convertible)]
        self._converters: dict[str, Converter] = dict(
            chain.from_iterable(module.converters(path) for path, module in converted)
        )
        names = list(stored)
        joined = [name for name in self._converters if name.endswith(EXPERT_TENSORS)]
        self._names: dict[str, None] = dict.fromkeys((*self._shards, *joined, *names))  # the checkpoint's come last: they win
        self._weights: set[str] = {weight_of(name) for name in names}

    def _add_layers(self, path: str, module: nn.Module, part: ModelPart) -> None:
        if isinstance(module, AbsentLayer):
            (module,) = module.layers
        if isinstance(module, Linear):
            start, number = 0, self._add(path, module, part)
            for name, rows in module.shards.items():
                stem, outputs = f"{path[: path.rfind('.') + 1]}{name}", slice(start, start := start + rows)
                self._shards[f"{stem}.weight"] = number, outputs
                if module.bias is not None:
                    self._shards[f"{stem}.bias"] = number, outputs
        elif isinstance(module, LmHead) and module.proj is None:
            self._shards[f"{path}.lm_head.weight"] = self._add(path, module, part), slice(0, module.outputs)
        elif isinstance(module, EmbeddingTable | Norm):
            number, (rows, _) = self._add(path, module, part), layer_shape(module)
            self._shards |= {name: (number, slice(0, rows)) for name, _ in module.tensors(path)}
        if isinstance(module, Mixture | ModalityMixture):
            self._add_mixture(path, module, part)
            return
        for name, child in module.named_children():
            takes_adapters = getattr(child, "takes_adapters", True)
            if takes_adapters and not (isinstance(child, Norm) and isinstance(module, Mixer)):
                crosses = name == "kv" and isinstance(module, CrossAttention | CrossDecoderCrossAttention)
                self._add_layers(f"{path}.{name}", child, "cross" if crosses else part)

    def _add_mixture(self, path: str, module: Mixture | ModalityMixture, part: ModelPart) -> None:
        """Add the shared expert, the router, and experts of a decoder that are layers of their own."""
        if module.shared_experts is not None:
            self._add_layers(f"{path}.shared_experts", module.shared_experts, part)
        mixtures = {path: module} if isinstance(module, Mixture) else {f"{path}.{k}": m for k, m in module.mixtures.items()}
        is_stacked = any(mixture.stacked is not None for mixture in mixtures.values())
        if part == "decoder" and not is_stacked:
            module.slot, part = ExpertSlot(self.active["experts"], self._calls), "experts"
        elif isinstance(module, ModalityMixture):
            return  # its routers get the rows of one modality, not those of the step
        for name, mixture in mixtures.items():
            if part == "experts":
                for number, expert in mixture.all_experts:
                    self._add_layers(f"{name}.experts.{number}", expert, part)
            self._add_layers(f"{name}.gate", mixture.gate, part)

    def _add(self, path: str, layer: AdaptedLayer, part: ModelPart) -> int:
        """Give a layer its slot, and return its number."""
        if layer.slot is None:
            if is_below(path, self._base().absent):
                self._absent.add(len(self._layers))
            layer.slot = AdapterSlot(len(self._layers), self._calls if part == "experts" else self.active[part])
            self._layers.append(layer)
            self._part_of.append(part)
        return layer.slot.number

    @property
    def prefixes(self) -> Sequence[tuple[str, str]]:
        """(stored, canonical) prefixes of the model's tensor names."""
        return self._base().prefixes

    @property
    def stored(self) -> Collection[str]:
        """Names that `MergedAdapter.pairs` compares: of the checkpoint's tensors, and canonical ones."""
        return self._names

    def _base(self) -> SupportsAdapters:
        model = self._model()
        assert model is not None
        return model

    def _is_unused(self, stored: str) -> bool:
        """Return whether no rank computes with a tensor of the checkpoint."""
        base = self._base()
        if stored in self._shards or is_below(rename(stored, base.prefixes), base.absent):
            return False
        return base.is_unused(stored)

    def split(self, pair: LowRankPair) -> list[ShardPair]:
        """Return the pairs of the shards that a stored weight has become. Tensors may be on the meta device.

        Weights that the model does not compute with, such as the layers of a tower after the one that is read, have none.

        Raises:
            CheckpointError: no layer takes it, or its shape does not fit.
        """
        if self._is_unused(pair.weight):
            return []
        if pair.down.ndim == 3:
            return self._split_experts(pair)
        whole = pair.up if pair.magnitude is None else torch.cat((pair.up, pair.magnitude[:, None].to(pair.up.dtype)), 1)
        parts = list(self._parts(pair.module, pair.weight, whole, pair.down.shape[1]))
        shard_pairs = []
        for name, change in parts:
            number, outputs = self._shard(pair.module, name)
            (_, inner), rank = layer_shape(self._layers[number]), len(pair.down)
            up, magnitude = (change, None) if pair.magnitude is None else (change[:, :-1], change[:, -1])
            if tuple(pair.down.shape) != (rank, inner) or tuple(up.shape) != (self._stored_rows(name), rank):
                raise CheckpointError(
                    f"the adapter's matrices of {pair.module} are {list(pair.down.shape)} and {list(pair.up.shape)}, which "
                    f"do not fit the base model's {name}; give an adapter of this model"
                )
            shard_pairs.append(ShardPair(pair.module, name, number, outputs, pair.down, up, pair.scale, magnitude))
        return shard_pairs

    def _split_experts(self, pair: LowRankPair) -> list[ShardPair]:
        """Return the pairs of the experts' shards, from matrices of all experts. See `split`."""
        # peft takes a parameter [experts, in, out] for [experts, out, in], unless its class in transformers says that it is
        # transposed. lora_A then belongs to the outputs, and lora_B to the inputs.
        for down, up in (pair.down, pair.up), (pair.up.mT, pair.down.mT):
            if shard_pairs := self._pairs_of_experts(pair, down, up):
                return shard_pairs
        raise CheckpointError(
            f"the adapter's matrices of {pair.module} are {list(pair.down.shape)} and {list(pair.up.shape)}, which do not fit "
            "the base model's experts; give an adapter of this model"
        )

    def _pairs_of_experts(self, pair: LowRankPair, down: Tensor, up: Tensor) -> list[ShardPair]:
        """Return the pairs of all experts' shards; none if the shapes of `down` and `up` do not fit the experts."""
        outputs, rank = up.shape[1:]
        # The converters recognise a weight [in, out] by its shape, so a square matrix gets one more column.
        whole = torch.cat((up, up[..., :1]), -1) if outputs == rank else up
        try:
            parts = list(self._converted(pair.weight, whole))
        except (IndexError, ValueError, RuntimeError):
            return []
        by_expert = dict[int, list[tuple[str, Tensor]]]()
        for name, part in parts:
            match = _EXPERT.search(name)
            if match is None or name not in self._shards:
                raise CheckpointError(f"the adapter changes {pair.module} {ONLY_LAYERS}")
            by_expert.setdefault(int(match[1]), []).append((name, part[:, :rank]))
        experts = next(number for number in count() if _of_expert(parts[0][0], number) not in self._shards)
        if {len(down), len(up)} - {1, experts}:
            return []
        shard_pairs, downs = list[ShardPair](), down.unbind(0)
        for number in range(experts):
            own_down = downs[number if len(downs) > 1 else 0]
            for first_name, own_up in by_expert[number if len(up) > 1 else 0]:
                name = _of_expert(first_name, number)
                layer, outputs_of_shard = self._shards[name]
                inner = layer_shape(self._layers[layer])[1]
                if tuple(own_down.shape) != (rank, inner) or tuple(own_up.shape) != (self._stored_rows(name), rank):
                    return []
                shard_pairs.append(ShardPair(pair.module, name, layer, outputs_of_shard, own_down, own_up, pair.scale))
        return shard_pairs

    def split_replaced(self, weight: ReplacedWeight) -> list[ReplacedTensor]:
        """Return the tensors of the shards that a stored tensor has become, as `split` does.

        Raises:
            CheckpointError: no layer takes it, or its shape does not fit.
        """
        if self._is_unused(weight.stored):
            return []
        if weight.token_ids:
            return self._split_tokens(weight)
        replaced = []
        for name, tensor in self._parts(weight.module, weight.stored, weight.tensor, None):
            number, outputs = self._shard(weight.module, name)
            layer, is_bias = self._layers[number], name.endswith(".bias")
            (_, inner), rows = layer_shape(layer), self._stored_rows(name)
            expected = (inner,) if isinstance(layer, Norm) else (rows,) if is_bias else (rows, inner)
            if isinstance(layer, EmbeddingTable | LmHead | Linear) and tensor.ndim == 2 and len(tensor) != rows:
                raise CheckpointError(
                    f"the adapter's {weight.module} has {len(tensor)} rows, and the base model's {rows}: it has other tokens, "
                    "which is not supported for adapters per request; give it an engine of its own, <<base_with_adapter>>"
                )
            if tuple(tensor.shape) != expected:
                raise CheckpointError(
                    f"the adapter's {weight.module} has shape {list(tensor.shape)}, which does not fit the base model's "
                    f"{name}; give an adapter of this model"
                )
            replaced.append(ReplacedTensor(weight.module, name, number, outputs, tensor, weight.is_base))
        return replaced

    def _split_tokens(self, weight: ReplacedWeight) -> list[ReplacedTensor]:
        """Return the rows of single tokens, of the table or of the head. A head that is tied to the table gets them, too."""
        order = sorted(range(len(weight.token_ids)), key=weight.token_ids.__getitem__)
        token_ids, replaced = tuple(weight.token_ids[i] for i in order), list[ReplacedTensor]()
        for name, tensor in self._parts(weight.module, weight.stored, weight.tensor, None):
            number, _ = self._shard(weight.module, name)
            layer, rows = self._layers[number], tensor[order]
            check_token_rows(weight.module, token_ids, tensor.shape[-1], (self._stored_rows(name), layer_shape(layer)[1]))
            heads = [number]
            if isinstance(layer, EmbeddingTable):
                replaced.append(ReplacedTensor(weight.module, name, number, slice(0, 0), rows, token_ids=token_ids))
                tied = (head for head in self._layers if isinstance(head, LmHead) and layer in head.tied_to)
                heads = [head.slot.number for head in tied if head.slot is not None]
            for head in heads:
                self._check_head(weight.module, head)
                count = sum(token < layer_shape(self._layers[head])[0] for token in token_ids)  # it may have fewer tokens
                if count:
                    own = rows[:count]
                    replaced.append(ReplacedTensor(weight.module, name, head, slice(0, 0), own, token_ids=token_ids[:count]))
        return replaced

    def _check_head(self, module: str, number: int) -> None:
        """Raise CheckpointError unless the outputs of a layer are logits of tokens, which one process holds, without a bias."""
        layer = self._layers[number]
        has_bias = isinstance(layer, Linear) and layer.bias is not None
        if self._part_of[number] != "head" or has_bias or self._is_divided(number):
            raise CheckpointError(
                f"the adapter has rows of single tokens for {module}, which is neither a table of embeddings nor a head that "
                "one process holds and that has no bias; merge it into the model"
            )

    def _stored_rows(self, name: str) -> int:
        """Return the rows of a tensor as the checkpoint stores it, of which this process may hold a part."""
        (number, outputs), shard = self._shards[name], name.rpartition(".")[0].rpartition(".")[2]
        layer = self._layers[number]
        divided = layer.rows.get(shard) if isinstance(layer, Linear) else None
        return outputs.stop - outputs.start if divided is None else divided.total

    def held(
        self, pairs: Iterable[ShardPair], replaced: Iterable[ReplacedTensor]
    ) -> tuple[list[ShardPair], list[ReplacedTensor]]:
        """Return the parts of an adapter's tensors that belong to the outputs that this process holds."""

        def part(number: int, name: str, tensor: Tensor) -> Tensor:
            layer = self._layers[number]
            return layer.held_part(name, tensor) if isinstance(layer, Linear) else tensor

        own = [
            replace(
                pair,
                up=part(pair.number, pair.weight, pair.up),
                magnitude=None if pair.magnitude is None else part(pair.number, pair.weight, pair.magnitude),
            )
            for pair in pairs
            if pair.number not in self._absent
        ]
        here = (each for each in replaced if each.number not in self._absent)
        return own, [replace(each, tensor=part(each.number, each.name, each.tensor)) for each in here]

    def _is_divided(self, number: int) -> bool:
        layer = self._layers[number]
        return isinstance(layer, Linear) and bool(layer.rows)

    def _shard(self, module: str, name: str) -> tuple[int, slice]:
        if name not in self._shards:
            raise CheckpointError(f"the adapter changes {module} {ONLY_LAYERS}")
        return self._shards[name]

    def _parts(self, module: str, stored: str, whole: Tensor, inputs: int | None) -> Iterator[tuple[str, Tensor]]:
        """Yield canonical names and the rows of a tensor, split and ordered as the stored one is when it is loaded.

        Args:
            whole: `up` of a pair, whose last column is the magnitude, if it has one; or a tensor that replaces the stored one.
            inputs: those of the weight that a pair changes.
        """
        if stored in self._shards and stored not in self._weights:
            yield stored, whole
            return
        try:
            parts, marked = list(self._converted(stored, whole)), list[tuple[str, Tensor]]()
            if inputs is not None:
                parts = [(name, part) for name, part in parts if not name.endswith(".bias")]  # zeros that checkpoints leave out
            if inputs is not None and not whole.is_meta:
                marks = torch.arange(1.0, 1 + inputs)
                converted = self._converted(stored, marks.expand(len(whole), -1))
                marked = [(name, part) for name, part in converted if not name.endswith(".bias")]
        except (IndexError, ValueError, RuntimeError):
            raise CheckpointError(
                f"the adapter's matrix of {module} has shape {list(whole.shape)}, which does not fit the base model; "
                "give an adapter of this model"
            ) from None
        if not parts:
            raise CheckpointError(f"the adapter changes {module} {ONLY_LAYERS}")
        if not all(_keeps_inputs(part, marks) for _, part in marked):
            raise CheckpointError(
                f"the adapter changes {module}, whose inputs the base model stores in another order, which is not "
                "supported for adapters per request; merge it into the model"
            )
        yield from parts

    def _converted(self, stored: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        model = self._base()
        if stored in self._converters and stored not in self._weights:  # a canonical name
            yield from self._converters[stored](weight)
            return
        for name, tensor in model.convert_weights([(stored, weight)]):
            canonical = rename(name, model.prefixes)
            yield from self._converters[canonical](tensor) if canonical in self._converters else [(canonical, tensor)]

    def without_own(self, replaced: Iterable[ReplacedTensor]) -> list[ReplacedTensor]:
        """Return the tensors that differ from the model's own: peft also stores unchanged embeddings of the base model.

        Those of layers that several processes divide stay, so that all processes have the same ones.
        """
        return [
            part
            for part in replaced
            if not part.is_base or self._is_divided(part.number) or not is_own(self._layers[part.number], part)
        ]

    def num_bytes(self, pairs: Iterable[ShardPair], replaced: Iterable[ReplacedTensor] = ()) -> int:
        """Return the bytes of an adapter as `pack` lays it out."""
        total = 0
        for number, (shards, tensors) in by_layer(pairs, replaced).items():
            layer, sizes = self._layers[number], [(len(pair.down), len(pair.up)) for pair in shards]
            total += sum(gain_bytes(layer, len(pair.up)) for pair in shards if pair.magnitude is not None)
            total += pairs_bytes(layer, sizes) + sum(replaced_bytes(layer, part) for part in tensors)
        return total

    def capacity(self, count: int, rank: int) -> int:
        """Return the bytes of so many adapters of this rank that change every layer but norms and experts, with DoRA."""
        total = 0
        for number, (layer, part) in enumerate(zip(self._layers, self._part_of, strict=True)):
            if part != "experts" and not isinstance(layer, Norm) and number not in self._absent:
                total += pairs_bytes(layer, [(rank, rows) for rows in _shard_rows(layer)])
                total += 0 if isinstance(layer, EmbeddingTable) else gain_bytes(layer, layer.outputs)
        return count * total

    def step_bytes(self, part: ModelPart, limits: StepLimits, rank: int) -> int:
        """Return the bytes that adapters allocate in a step for the largest layer of a part: its rows, and both products."""
        if part == "encoder":
            limits = replace(limits, rows=ENCODER_ROWS)
        numbered = zip(self._layers, self._part_of, strict=True)
        return max((_layer_step_bytes(layer, limits, rank) for layer, own in numbered if own == part), default=0)

    def parts_of(self, numbers: Iterable[int]) -> frozenset[ModelPart]:
        """Return the parts of the model to which layers belong."""
        return frozenset(self._part_of[number] for number in numbers)

    def is_of_encoder(self, number: int) -> bool:
        """Return whether a layer is one of encoders or connectors."""
        return self._part_of[number] == "encoder"

    def is_embedding(self, number: int) -> bool:
        """Return whether a layer is a table of embeddings."""
        return isinstance(self._layers[number], EmbeddingTable)

    def pack(self, pairs: Sequence[ShardPair], replaced: Sequence[ReplacedTensor] = ()) -> Generator[None, None, PackedAdapter]:
        """Return an adapter as the layers read it. Yields after each layer. Errors: see `pack_layer`."""
        table, called, products = AdapterTable(len(self._layers), self.num_bytes(pairs, replaced)), dict[int, LayerChange](), 0
        for number, own in sorted(by_layer(pairs, replaced).items()):
            change = pack_layer(self._layers[number], *own)
            if isinstance(change, LowRankChange):
                table.add(number, change.weights)
                products += 1
            if not isinstance(change, LowRankChange) or change.replaced:
                called[number] = change
            yield
        return PackedAdapter(called, table if products else None)

    @contextmanager
    def applied(self, part: ModelPart, groups: Sequence[RowGroup], num_rows: int | None) -> Iterator[None]:
        """Apply adapters to the rows of a part of the model inside the context. `num_rows`: as in ActiveAdapters."""
        self.active[part].set(groups, num_rows)
        try:
            yield
        finally:
            self.active[part].set((), None)


def adapted_layers(model: Model) -> AdaptedLayers | None:
    """Return the layers that adapters of requests change; None if the model takes no such adapters."""
    layers = getattr(model, "request_adapters", None)
    return layers if isinstance(layers, AdaptedLayers) else None


def change_digest(change: ShardPair | ReplacedTensor) -> str:
    """Return the digest of what an adapter adds to a weight, or of what replaces one."""
    if isinstance(change, ReplacedTensor) and change.token_ids:
        return digest("sensorium.lora.tokens", change.name, change.number, change.token_ids, change.tensor)
    if isinstance(change, ReplacedTensor):
        return digest("sensorium.lora.replaced", change.name, change.tensor)
    return digest("sensorium.lora.pair", change.weight, change.scale, change.down, change.up, change.magnitude)


def content_digest(changes: Iterable[str]) -> str:
    """Return the identity of an adapter, or of a part of it, from the digests of its changes in any order."""
    return digest("sensorium.lora", sorted(changes))


def _of_expert(name: str, number: int) -> str:
    """Return the name of the same layer of another expert."""
    return _EXPERT.sub(f".experts.{number}.", name)


def _shard_rows(layer: AdaptedLayer) -> Sequence[int]:
    return list(layer.shards.values()) if isinstance(layer, Linear) else [layer_shape(layer)[0]]


def _keeps_inputs(converted: Tensor, inputs: Tensor) -> bool:
    """Return whether converting a weight whose rows are `inputs [in]` only moves, joins or scales outputs."""
    if converted.ndim != 2 or converted.shape[1] != len(inputs):
        return False
    some = converted[:: max(1, len(converted) // _CHECKED_ROWS)]
    return torch.allclose(some, some[:, :1] * inputs, rtol=1e-4)


def _layer_step_bytes(layer: AdaptedLayer, limits: StepLimits, rank: int) -> int:
    """Return the bytes that an adapter allocates in a layer: its rows, and both products."""
    (_, inner), shards, dtype = layer_shape(layer), _shard_rows(layer), layer_dtype(layer)
    ops, ranks = OpBytes(dtype, limits), rank * len(shards)
    if isinstance(layer, Norm):
        return limits.rows * (2 * inner * dtype.itemsize + ops.norm(inner, True))
    if isinstance(layer, EmbeddingTable):
        return limits.rows * (2 * inner * dtype.itemsize + rank * dtype.itemsize + ops.linear(rank, inner, limits.rows))
    low = ops.linear(inner, ranks, limits.rows) + rank * dtype.itemsize
    wide = max(ops.linear(rank, rows, limits.rows) for rows in shards)
    return limits.rows * (inner * dtype.itemsize + low + wide)
