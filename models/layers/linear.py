"""Linear layers and the language model head. All products with weights go through `Linear`, which packs weights per device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from ...checkpoints.formats.base import WeightFormat
from ...kernels.dispatch import backend
from ...kernels.linear import LinearWeight, linear, pack
from ...kernels.linear.eight_bit import Fp8Weight
from ...kernels.linear.grouped import GroupedWeight, QuantizedWeight
from ...kernels.linear.groups import pack_groups
from ...kernels.linear.groups import packed_bytes as packed_group_bytes
from ...kernels.linear.int4 import Int4Options
from ...kernels.linear.int8 import pack_codes
from ..memory_formulas import packed_weight_bytes, panel_bytes
from .adapter import LowRank
from .basic import EmbeddingTable, TensorModule, WeightedLayer
from .ranks import Ranks, Rows, current_ranks

if TYPE_CHECKING:
    from .row_adapter import AdapterSlot

_deferred = ContextVar("sensorium_deferred_weights", default=False)
_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@contextmanager
def deferred_weights() -> Iterator[None]:
    """Build each Linear without memory for its weight, until `Linear.allocate`. For quantised checkpoints."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def weights_deferred() -> bool:
    return _deferred.get()


class Linear(WeightedLayer):
    """`[rows, in] -> [rows, out]`: one product whose weight consists of named shards (q, k and v; gate and up).

    Args:
        in_features: width of the input.
        shards: name in the checkpoint -> outputs, in order: `{"q_proj": 512, "k_proj": 128, "v_proj": 128}`.
            The names replace the last part of the module's own path.
        bias: all shards have a bias, or none.
        exact: never quantised, for products that decide between nearly equal values (routers, logits).
        rows: by shard, the rows of the stored tensors that this rank holds, whose number is the shard's outputs. Empty: all.
        gathered: the ranks whose outputs are joined to the result, `[rows, ranks * out]`.

    Attributes:
        sent_bytes: of a row, to each other rank (`ranks.rank_traffic`).
        quantization: the format in which `pack` stores the weight: None (as it is), "float16", "int8", "fp8", or options of 4
            bits.
        formats: canonical name of a shard's weight -> its format, in a quantised checkpoint. Such a weight is a meta tensor
            that has only the shape; `hold` takes the quantised weights.
        dtype: of the layer's input and result.
        stored_dtypes: dtypes of the stored weights, as far as the headers of the files name them.
        restored: canonical names of the layer's tensors if its packed weight came from another file.
        slot: the layer's place among those that adapters of requests change; None if they do not.
        takes_adapters: False if its rows are not those of the step.
    """

    takes_adapters = True
    quantization: str | Int4Options | None = None

    def __init__(
        self,
        in_features: int,
        shards: Mapping[str, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        *,
        exact: bool = False,
        rows: Mapping[str, Rows] = {},
        gathered: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.shards, self.exact, self.in_features = dict(shards), exact, in_features
        self.rows, self.gathered = rows, gathered
        self.slot: AdapterSlot | None = None
        self.outputs = out = sum(self.shards.values())
        self.sent_bytes = 0 if gathered is None else out * dtype.itemsize
        self.device, self.dtype = device, dtype
        self.formats: dict[str, WeightFormat] = {}
        self.held: dict[str, Sequence[QuantizedWeight]] = {}  # the parts of a shard that this rank holds, in order
        self.stored_dtypes: set[torch.dtype] = set()
        self.weight = torch.empty(out, in_features, dtype=dtype, device="meta" if weights_deferred() else device)
        self.bias: Tensor | None = torch.empty(out, dtype=dtype, device=device) if bias else None
        self.packed: LinearWeight  # exists from `pack` on, in place of `weight`
        self.adapters: list[tuple[slice, LowRank]] = []
        self.restored: frozenset[str] = frozenset()

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        if self.restored:
            return
        start = 0
        for name, rows in zip(self.weight_names(path), self.shards.values(), strict=True):
            yield name, self.weight[start : start + rows]
            if self.bias is not None:
                yield f"{name.removesuffix('.weight')}.bias", self.bias[start : start + rows]
            start += rows

    def weight_names(self, path: str) -> list[str]:
        """Return the canonical names of the shards' weights."""
        return [f"{path[: path.rfind('.') + 1]}{name}.weight" for name in self.shards]

    def held_part(self, name: str, stored: Tensor) -> Tensor:
        rows = self.rows.get(name.rpartition(".")[0].rpartition(".")[2])
        return stored if rows is None else rows.of(stored)

    def held_parts(self, name: str, stored: QuantizedWeight) -> list[QuantizedWeight]:
        """Return the parts of a quantised weight that this rank holds, in order; of one with another shape all of it."""
        rows = self.rows.get(name.rpartition(".")[0].rpartition(".")[2])
        return [stored] if rows is None or stored.shape[0] != rows.total else [stored.select(part) for part in rows.slices]

    def stored_outputs(self) -> list[int]:
        """Return the outputs of each shard as the checkpoint stores it."""
        return [self.rows[name].total if name in self.rows else outputs for name, outputs in self.shards.items()]

    def allocate(self, formats: Mapping[str, WeightFormat]) -> None:
        """Set the formats of a layer that was built in `deferred_weights`; without any, allocate its weight."""
        self.formats = dict(formats)
        if not formats:
            self.weight = torch.empty_like(self.weight, device=self.device)

    def keep_float32(self) -> None:
        """Hold the weight in float32 until it is quantised, so that it is rounded once: bfloat16 has 8 bits, as int8 has."""
        self.weight = torch.empty_like(self.weight, dtype=torch.float32)

    def hold(self, name: str, parts: Sequence[QuantizedWeight]) -> None:
        """Take the quantised weight of a shard, in the parts of `held_parts`, on this layer's device."""
        self.held[name] = parts

    def packed_bytes(self, device: torch.device) -> int:
        (outer, inner), dtype, bias = self.weight.shape, self.dtype, self.bias is not None
        if self.formats and self.quantization is None:
            return packed_group_bytes(self._stored_shapes(), dtype, device) + outer * bias * dtype.itemsize
        return packed_weight_bytes(inner, outer, bias, dtype, device, self.quantization)

    def stores(self, method: str) -> bool:
        """Return whether the checkpoint's weight has one scale per output, so that kernels of "int8" or "fp8" can use it."""
        return bool(self.formats) and all(_output_scales(weight, method) is not None for weight in self._stored_shapes())

    def _stored_shapes(self) -> list[QuantizedWeight]:
        """Return the shards' quantised weights, or the parts of them that this rank holds, on the meta device."""
        shards = zip(self.formats.items(), self.stored_outputs(), strict=True)
        whole = ((name, each.decode(each.layout(rows, self.weight.shape[1]))) for (name, each), rows in shards)
        return [part for name, weight in whole for part in self.held_parts(name, weight)]

    def pack(self) -> None:
        """Lay the weight out for its device and drop the original."""
        if self.formats:
            weights, method = [part for name in self.formats for part in self.held[name]], self.quantization
            scales = [output_scale for weight in weights if (output_scale := _output_scales(weight, str(method))) is not None]
            if method in _CODES and len(scales) == len(weights):
                codes, scale = torch.cat([output_scale.codes for output_scale in weights]), torch.cat(scales)
                self.packed = (
                    Fp8Weight(codes, scale, self.bias) if method == "fp8" else pack_codes(codes, scale, self.bias, self.dtype)
                )
            else:
                self.packed = pack_groups(weights, self.bias, self.dtype)
            self.held = {}
        else:
            self.packed = pack(self.weight, self.bias, self.quantization)
        del self.weight

    def restore(self, path: str, packed: LinearWeight) -> None:
        """Take a packed weight instead of the tensors of the checkpoint."""
        self.restored = frozenset(name for name, _ in self.tensors(path))
        self.packed, self.bias = packed, None
        del self.weight

    def add_adapter(self, adapter: LowRank, start: int) -> None:
        """Add the adapter's output to the outputs from `start` on."""
        self.adapters.append((slice(start, start + adapter.outer), adapter))
        self.add_module(f"adapter{len(self.adapters)}", adapter)

    def forward(self, x: Tensor) -> Tensor:
        out = linear(x, self.packed)
        for shard, adapter in self.adapters:
            adapter.add_(out[:, shard], x)
        if self.slot is not None:
            self.slot.change_(out, x)
        return out if self.gathered is None else self.gathered.gather(out)


def _output_scales(weight: QuantizedWeight, method: str) -> Tensor | None:
    if isinstance(weight, GroupedWeight) and method in _CODES:
        return weight.output_scales(_CODES[method])
    return None


def gathered_linear(
    in_features: int, shard: tuple[str, int], bias: bool, dtype: torch.dtype, device: torch.device, *, exact: bool = False
) -> Linear:
    """Return a layer of one shard (name, size), whose outputs the current ranks divide and gather if they can be divided."""
    (name, out_features), ranks = shard, current_ranks()
    if ranks is None or not ranks.divides(out_features):
        return Linear(in_features, {name: out_features}, bias, dtype, device, exact=exact)
    rows, outputs = {name: Rows(out_features, (ranks.part(out_features),))}, out_features // ranks.size
    return Linear(in_features, {name: outputs}, bias, dtype, device, exact=exact, rows=rows, gathered=ranks)


class LmHead(TensorModule):
    """Hidden states `[n, hidden]` -> float32 logits `[n, vocab]`. Never quantised.

    Args:
        embedding: the token embeddings if the head is tied, else None. `pack` brings their table into the packed layout of the
            device if it has one, which makes a step's logits 2 to 3 times faster. Embeddings and head share the C++ kernel's
            layout; oneDNN's is a copy.
        scale: factor of the logits.
        cap: soft cap; logits l become cap * tanh(l / cap). None: no cap.
        bias: the head has a bias, unless it is tied.
        unpredicted: last tokens of the vocabulary, whose logits are -inf and not computed.

    Attributes:
        slot: of a tied head, as in Linear.
    """

    def __init__(
        self,
        hidden: int,
        vocab: int,
        embedding: EmbeddingTable | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scale: float = 1.0,
        cap: float | None = None,
        bias: bool = False,
        unpredicted: int = 0,
    ) -> None:
        super().__init__()
        vocab, self.unpredicted = vocab - unpredicted, unpredicted
        self.scale, self.cap, self.tied_to = (
            scale,
            cap,
            () if embedding is None else (embedding,),
        )  # in a tuple, so that it is not registered as a submodule
        self.proj = gathered_linear(hidden, ("lm_head", vocab), bias, dtype, device, exact=True) if embedding is None else None
        self.in_features, self.outputs, self.dtype, self.device = hidden, vocab, dtype, device
        self.slot: AdapterSlot | None = None
        self.packed: LinearWeight  # of a tied table, from `pack` on

    def packed_bytes(self, device: torch.device) -> int:
        """Return the bytes that a tied head takes beside the table `[vocab, hidden]`: padding, or a copy in oneDNN's layout."""
        for embedding in self.tied_to:
            (vocab, hidden), dtype = embedding.weight.shape, embedding.weight.dtype
            if shared := embedding.shared_dtype(device):
                return panel_bytes(hidden, vocab, shared) - embedding.weight.nbytes
            if backend("linear", device, dtype) != "torch":
                return packed_weight_bytes(hidden, vocab, False, dtype, device)
        return 0

    def pack(self) -> None:
        """Pack a tied table once it is filled. An untied projection is packed like any other layer."""
        for embedding in self.tied_to:
            table = embedding.weight
            self.packed = embedding.share() if embedding.shared_dtype(table.device) else pack(table, None)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = (self._tied_logits(hidden) if self.proj is None else self.proj(hidden)).float()
        if self.scale != 1.0:
            logits *= self.scale
        if self.cap is not None:
            logits = logits.div_(self.cap).tanh_().mul_(self.cap)
        return F.pad(logits, (0, self.unpredicted), value=-torch.inf) if self.unpredicted else logits

    def _tied_logits(self, hidden: Tensor) -> Tensor:
        logits = linear(hidden, self.packed)
        if self.slot is not None:
            self.slot.apply_(logits, hidden)
        return logits
