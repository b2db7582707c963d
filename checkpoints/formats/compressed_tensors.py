"""compressed-tensors, as llm-compressor writes it: packed integers, int8, FP8, NVFP4 and MXFP4.

Its runtime also quantises activations (`input_activations`), and caches with `kv_cache_scheme`; here neither is quantised.

Source: the compressors of the compressed-tensors project.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...callers.errors import CheckpointError
from ...kernels.linear.grouped import GroupedWeight
from .base import empty, name_patterns, names_match, scale_dtype, unsupported
from .fp4 import fp4_weight
from .fp8 import grid_weight

_SUPPORTED = "int (4 or 8 bits) or float (4 or 8 bits) weights per tensor, channel, group or block"
_STRATEGIES = {"tensor", "channel", "group", "block", "tensor_group"}


@dataclass(frozen=True)
class Scheme:
    """The weights of a config group.

    Args:
        kind: "int" or "float". bits: 4 or 8.
        strategy: what has a scale of its own: "tensor", "channel", "group" (of inputs), "block" or "tensor_group".
        group: inputs of a group. block: outputs and inputs of a block.
        packed: integers are packed into int32.
        ordered: groups are of columns in another order (`weight_g_idx`).
        dtype: of the scales.
    """

    kind: str
    bits: int
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    symmetric: bool
    packed: bool
    ordered: bool = False
    dtype: torch.dtype = torch.bfloat16

    def grid(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return outputs and inputs that share a scale."""
        if self.strategy == "block" and self.block is not None:
            return self.block
        if self.strategy == "tensor":
            return outputs, inputs
        return 1, inputs if self.strategy == "channel" or self.group is None else self.group

    def layout(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        rows, columns = self.grid(outputs, inputs)
        grid = -(-outputs // rows), -(-inputs // columns)
        tensors = {"weight_scale": empty(*((1,) if self.strategy == "tensor" else grid), dtype=self.dtype)}
        if self.kind == "float" and self.bits == 4:
            tensors["weight_packed"] = empty(outputs, inputs // 2, dtype=torch.uint8)
            if self.strategy == "tensor_group":
                tensors["weight_global_scale"] = empty(1, dtype=torch.float32)
        elif self.packed:
            each = 32 // self.bits
            tensors["weight_packed"] = empty(outputs, -(-inputs // each), dtype=torch.int32)
            tensors["weight_shape"] = torch.tensor([outputs, inputs])
            if not self.symmetric:
                tensors["weight_zero_point"] = empty(-(-outputs // each), grid[1], dtype=torch.int32)
            if self.ordered:
                tensors["weight_g_idx"] = empty(inputs, dtype=torch.int32)
        else:
            tensors["weight"] = empty(outputs, inputs, dtype=torch.int8 if self.kind == "int" else torch.float8_e4m3fn)
            if not self.symmetric:
                tensors["weight_zero_point"] = empty(*tensors["weight_scale"].shape, dtype=torch.int8)
        return tensors

    def decode(self, parts: Mapping[str, Tensor]) -> GroupedWeight:
        if self.kind == "float" and self.bits == 4:
            return fp4_weight(parts["weight_packed"], parts["weight_scale"], _reciprocal(parts.get("weight_global_scale")))
        scale, zero = parts["weight_scale"], None if self.symmetric else parts["weight_zero_point"]
        if self.packed:
            return self._decode_packed(parts["weight_packed"], scale, zero, parts)
        codes = parts["weight"]
        block = self.grid(*codes.shape)
        weight = grid_weight(codes, scale.view(1, 1) if self.strategy == "tensor" else scale, block)
        if zero is None:
            return weight
        zero = zero.view(weight.scale.shape)
        return GroupedWeight(codes, weight.scale, weight.group, weight.inputs, weight.block_rows, zero=zero)

    def _decode_packed(self, words: Tensor, scale: Tensor, zero: Tensor | None, parts: Mapping[str, Tensor]) -> GroupedWeight:
        outputs, inputs = (int(number) for number in parts["weight_shape"].tolist())
        rows, columns = self.grid(outputs, inputs)
        if self.strategy == "tensor":
            scale = scale.view(1, 1)
        grid = -(-outputs // rows), -(-inputs // columns)
        if words.shape != (outputs, -(-inputs * self.bits // 32)) or scale.shape != grid:
            raise ValueError(f"words {list(words.shape)} with scales {list(scale.shape)}")
        each = 32 // self.bits
        if zero is not None:
            shifts = torch.arange(0, 32, self.bits, dtype=torch.int32, device=zero.device)[:, None]
            zero = ((zero[:, None] >> shifts) & (1 << self.bits) - 1).flatten(0, 1)[:outputs].to(torch.uint8)
            if zero.shape != grid or words.shape[1] != -(-inputs // each):
                raise ValueError(f"zero points {list(zero.shape)} with scales {list(scale.shape)}")
        index = parts["weight_g_idx"] if self.ordered else None
        if index is not None and not index.is_meta and not (index >= 0).all():
            index = None  # filled with -1: no order
        codes = words.contiguous().view(torch.uint8)
        return GroupedWeight(
            codes if self.bits == 4 else codes[:, :inputs],
            scale,
            columns,
            inputs,
            rows,
            packed=self.bits == 4,
            offset=0 if zero is not None else 1 << (self.bits - 1),
            zero=zero,
            group_index=index,
        )


def _reciprocal(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.float().reciprocal()


@dataclass(frozen=True)
class ConfigGroup:
    """Modules that share a scheme. `scheme` is None if their weights stay wide; `weights` is as the config has it."""

    targets: Sequence[str]
    weights: Mapping[str, Any] | None
    form: str


@dataclass(frozen=True)
class CompressedTensors:
    groups: Sequence[ConfigGroup]
    ignored: Sequence[str]
    parts: Sequence[str] = (
        "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
        "input_scale", "input_zero_point", "input_global_scale",
    )  # fmt: skip

    def format_of(self, names: Sequence[str], stored: Mapping[str, Tensor] | None) -> Scheme | None:
        if stored is not None and "weight_scale" not in stored and "weight_packed" not in stored:
            return None
        group = self._group(names, stored is not None)
        if group is None or (stored is None and names_match(names, self.ignored)):
            return None
        if group.weights is None:
            if stored is None:
                return None
            raise unsupported("a module whose config group has no weights", names[0], _SUPPORTED)
        return _scheme(group, names[0], stored)

    def _group(self, names: Sequence[str], quantized: bool) -> ConfigGroup | None:
        """Return the group that names a module, else that of its class. `quantized`: the only group has all such modules."""
        named = next((group for group in self.groups if names_match(names, group.targets)), None)
        by_class = next((group for group in self.groups if "Linear" in group.targets), None)
        if named is None and by_class is None and quantized:
            if len(self.groups) == 1:
                return self.groups[0]
            raise unsupported("a module of no config group", names[0], "targets for all quantised modules")
        return named or by_class


def _scheme(group: ConfigGroup, module: str, stored: Mapping[str, Tensor] | None) -> Scheme:
    weights = group.weights or {}
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    strategy, size = weights.get("strategy"), weights.get("group_size")
    block = _block(weights.get("block_structure"))
    if strategy is None:
        strategy = "tensor" if size is None else "group" if size > 0 else "channel"
    is_known = kind in ("int", "float") and bits in (4, 8) and strategy in _STRATEGIES
    sized = strategy not in ("group", "tensor_group") or (isinstance(size, int) and size > 0)
    if not is_known or not sized or (strategy == "block" and block is None):
        raise unsupported(f"{kind} with {bits} bits, strategy {strategy}", module, _SUPPORTED)
    packed = group.form == "pack-quantized" if stored is None else "weight_packed" in stored
    if kind == "int" and bits == 4 and not packed:
        raise unsupported(f"{group.form} with 4 bits", module, "packed integers")
    return Scheme(
        kind,
        bits,
        strategy,
        size if strategy in ("group", "tensor_group") else None,
        block if strategy == "block" else None,
        bool(weights.get("symmetric", True)),
        packed and kind == "int",
        "weight_g_idx" in stored if stored is not None else weights.get("actorder") == "group",
        scale_dtype(stored, "weight_scale", _default_scale(kind, bits, strategy)),
    )


def _block(sizes: object) -> tuple[int, int] | None:
    """Return outputs and inputs of a block, None if they are not two integers."""
    if isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes):
        return sizes[0], sizes[1]
    return None


def _default_scale(kind: str, bits: int, strategy: str) -> torch.dtype:
    if kind == "float" and bits == 4:
        return torch.float8_e4m3fn if strategy == "tensor_group" else torch.uint8
    return torch.bfloat16


def read_compressed_tensors(config: Mapping[str, Any]) -> CompressedTensors:
    """Read the config. Raise CheckpointError for sparsity, rotations or config groups that cannot be read."""
    sparsity = config.get("sparsity_config") or {}
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise CheckpointError(f"quantization_config has sparsity_config format {sparsity['format']!r}, which is not supported")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise CheckpointError("quantization_config has a transform_config (rotated weights), which is not supported")
    groups, default_format = config.get("config_groups"), str(config.get("format") or "dense")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(group, Mapping) for group in groups.values()):
        raise CheckpointError(
            "quantization_config of compressed-tensors has no readable config_groups; download config.json again"
        )
    config_groups = [
        ConfigGroup(name_patterns(group, "targets"), group.get("weights"), str(group.get("format") or default_format))
        for group in groups.values()
    ]
    return CompressedTensors(config_groups, name_patterns(config, "ignore"))
