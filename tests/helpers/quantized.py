"""Packs weights in the published quantised formats, bit by bit and independently of the code under test.

Each packer takes a weight `[out, in]` and returns the stored tensors by the last part of their name, and the dequantised weight
in float32. `SCHEMES` holds a packer and its quantization_config by name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Scheme:
    pack: Callable[[Tensor], Packed]
    config: Mapping[str, Any]


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes along the last axis into int32, the first in the lowest bits; `order[i]` is the code at place i."""
    each = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    total = torch.zeros(codes.shape[:-1], dtype=torch.int64)
    for place in range(each):
        total |= codes[..., place if order is None else order[place]] << (bits * place)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def grid(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Return the index of each number's block, `[out, in, 2]`."""
    at = torch.meshgrid(torch.arange(weight.shape[0]) // rows, torch.arange(weight.shape[1]) // columns, indexing="ij")
    return torch.stack(at, -1)


def spread(values: Tensor, weight: Tensor, rows: int, columns: int) -> Tensor:
    """Give each number of the weight the value of its block."""
    at = grid(weight, rows, columns)
    return values[at[..., 0], at[..., 1]]


def extremes(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of each block."""
    shape = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    low, high = torch.full(shape, torch.inf), torch.full(shape, -torch.inf)
    for i in range(shape[0]):
        for j in range(shape[1]):
            block = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            low[i, j], high[i, j] = block.min(), block.max()
    return low, high


def integers(weight: Tensor, bits: int, rows: int, columns: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned codes, scales and unsigned zero points: (code - zero) * scale."""
    low, high = extremes(weight, rows, columns)
    top = (1 << bits) - 1
    if symmetric:
        scale = torch.maximum(-low, high) * 2 / top
        zero = torch.full_like(scale, 1 << (bits - 1))
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round().clamp(0, top)
    scale = scale.half().float()
    codes = (weight / spread(scale, weight, rows, columns) + spread(zero, weight, rows, columns)).round().clamp(0, top)
    return codes, scale, zero


def widened(codes: Tensor, scale: Tensor, zero: Tensor, rows: int, columns: int) -> Tensor:
    return (codes - spread(zero, codes, rows, columns)) * spread(scale, codes, rows, columns)


def fp8(weight: Tensor, rows: int, columns: int, name: str, shape: tuple[int, ...] | None = None) -> Packed:
    """`rows`, `columns`: sizes of a block, 0: all."""
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    low, high = extremes(weight, rows, columns)
    scale = torch.maximum(-low, high) / 448
    codes = (weight / spread(scale, weight, rows, columns)).to(torch.float8_e4m3fn)
    stored = {"weight": codes, name: scale if shape is None else scale.view(shape), "input_scale": torch.tensor(0.5)}
    return stored, codes.float() * spread(scale, weight, rows, columns)


def packed_integers(weight: Tensor, bits: int, group: int, symmetric: bool, ordered: bool = False) -> Packed:
    """compressed-tensors `pack-quantized`. `group` 0: one scale per output."""
    columns = group or weight.shape[1]
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1)) if ordered else None
    sorted_weight = weight if order is None else weight[:, order]
    codes, scale, zero = integers(sorted_weight, bits, 1, columns, symmetric)
    wide, stored = widened(codes, scale, zero, 1, columns), {"weight_scale": scale.half()}
    if order is not None:
        back = order.argsort()
        codes, wide = codes[:, back], wide[:, back]
        stored["weight_g_idx"] = (torch.arange(len(order)) // columns)[back].int()
    stored |= {"weight_packed": words(codes, bits), "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        stored["weight_zero_point"] = words(zero.T, bits).T.contiguous()
    return stored, wide


def int8(weight: Tensor, symmetric: bool = True) -> Packed:
    """compressed-tensors `int-quantized`, one scale per output."""
    codes, scale, zero = integers(weight, 8, 1, weight.shape[1], symmetric)
    stored = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale.half()}
    if not symmetric:
        stored["weight_zero_point"] = (zero - 128).to(torch.int8)
    return stored, widened(codes, scale, zero, 1, weight.shape[1])


def e2m1(weight: Tensor, scale: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return two codes per byte, and the values of all codes."""
    ratio = weight / spread(scale, weight, 1, group)
    codes = (ratio[..., None] - E2M1).abs().argmin(-1)
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8), E2M1[codes]


def nvfp4(weight: Tensor) -> Packed:
    low, high = extremes(weight, 1, 16)
    largest = torch.maximum(-low, high)
    top = 448 * 6 / largest.max()
    scale = (largest / 6 * top).to(torch.float8_e4m3fn)
    codes, values = e2m1(weight, scale.float() / top, 16)
    stored = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": top.view(1)}
    return stored, values * spread(scale.float(), weight, 1, 16) / top


def mxfp4(weight: Tensor, group: int = 32) -> Packed:
    low, high = extremes(weight, 1, group)
    exponent = (torch.maximum(-low, high) / 4).log2().floor() + 127
    scale = 2.0 ** (exponent - 127)
    codes, values = e2m1(weight, scale, group)
    return {"weight_packed": codes, "weight_scale": exponent.to(torch.uint8)}, values * spread(scale, weight, 1, group)


def awq(weight: Tensor, group: int) -> Packed:
    codes, scale, zero = integers(weight, 4, 1, group, False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {"qweight": words(codes.T, 4, order), "qzeros": words(zero.T, 4, order), "scales": scale.T.half().contiguous()}
    return stored, widened(codes, scale, zero, 1, group)


def gptq(weight: Tensor, bits: int, group: int, symmetric: bool, ordered: bool = False, version: int = 1) -> Packed:
    """`group` -1: one scale per output."""
    columns = weight.shape[1] if group < 0 else group
    index = torch.arange(weight.shape[1]) // columns
    if ordered:
        index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(len(weight)))]
    place = index.argsort(stable=True)
    codes, scale, zero = integers(weight[:, place], bits, 1, columns, symmetric)
    wide, codes = widened(codes, scale, zero, 1, columns)[:, place.argsort()], codes[:, place.argsort()]
    stored_zero = zero.T - int(version == 1)
    stored = {
        "qweight": words(codes, bits).T,
        "qzeros": words(stored_zero, bits),
        "scales": scale.T.half(),
        "g_idx": index.int(),
    }
    return {name: tensor.contiguous() for name, tensor in stored.items()}, wide


def gptq_config(bits: int, group: int, ordered: bool = False, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": ordered, "sym": True, **more}


def four_bits(weight: Tensor, kind: str, nested: bool, storage: torch.dtype = torch.uint8) -> Packed:
    """bitsandbytes: blocks of 64 numbers of the flat weight."""
    flat, state = weight.flatten(), {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    largest = padded.abs().amax(1)
    fp4 = torch.tensor([0, 0.0052, 0.6667, 1, 0.3333, 0.5, 0.1667, 0.25])
    table = torch.linspace(-1, 1, 16) ** 3 if kind == "nf4" else torch.cat([fp4, -fp4])
    stored = {"weight.quant_map": table}
    if nested:
        offset, map8 = float(largest.mean()), torch.linspace(-1, 1, 256)
        centred = torch.nn.functional.pad(largest - offset, (0, -len(largest) % 256)).view(-1, 256)
        second = centred.abs().amax(1)
        codes8 = ((centred / second[:, None])[..., None] - map8).abs().argmin(-1)
        largest = (map8[codes8] * second[:, None] + offset).flatten()[: len(largest)]
        stored |= {"weight.absmax": codes8.flatten()[: len(largest)].to(torch.uint8), "weight.nested_absmax": second}
        stored["weight.nested_quant_map"] = map8
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        stored["weight.absmax"] = largest
    codes = ((padded / largest[:, None])[..., None] - table).abs().argmin(-1)
    wide = (table[codes] * largest[:, None]).flatten()[: len(flat)].view(weight.shape)
    codes = codes.flatten()[: len(flat)]
    stored["weight"] = (16 * codes[0::2] + codes[1::2]).to(torch.uint8).view(storage)[:, None]
    name = f"weight.quant_state.bitsandbytes__{kind}"
    return stored | {name: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}, wide


def llm_int8(weight: Tensor) -> Packed:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, codes.float() * largest[:, None] / 127


def bnb(kind: str, nested: bool = False) -> dict[str, Any]:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return config | {"bnb_4bit_use_double_quant": nested}


def torchao(weight: Tensor, kind: str, rows: int, columns: int) -> Packed:
    """`kind`: "float8", "int8" or, with zero points, "intx". `rows`, `columns`: sizes of a block, 0: all."""
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    if kind == "float8":
        stored, wide = fp8(weight, rows, columns, "scale")
        return {"_weight_qdata": stored["weight"], "_weight_scale": stored["scale"]}, wide
    codes, scale, zero = integers(weight, 8, rows, columns, kind == "int8")
    stored = {"_weight_qdata": (codes - 128).to(torch.int8), "_weight_scale": scale.bfloat16()}
    if kind == "intx":
        stored["_weight_zero_point"] = (zero - 128).to(torch.int8)
    return stored, widened(codes, scale.bfloat16().float(), zero, rows, columns)


def torchao_int4(weight: Tensor, group: int) -> Packed:
    """Int4Tensor: codes around 8 without their offset, a zero point that is added, grids as `[groups, out]`."""
    low, high = extremes(weight, 1, group)
    scale = (high - low).clamp(min=1e-6) / 15
    codes = ((weight - spread(low, weight, 1, group)) / spread(scale, weight, 1, group)).round().clamp(0, 15)
    signed = (codes - 8).to(torch.int8)
    scale, zero = scale.bfloat16(), (low + scale * 8).bfloat16()
    stored = {
        "qdata": signed[:, ::2] & 15 | signed[:, 1::2] << 4,
        "scale": scale.t().contiguous(),
        "zero_point": zero.t().contiguous(),
    }
    wide = (codes - 8) * spread(scale.float(), weight, 1, group) + spread(zero.float(), weight, 1, group)
    return {f"_weight_{name}": tensor for name, tensor in stored.items()}, wide


def mlx(weight: Tensor, bits: int, group: int) -> Packed:
    """Codes times a scale plus a bias per group; scales may be negative."""
    low, high = extremes(weight, 1, group)
    downwards = low.abs() > high.abs()
    scale, bias = (high - low) / ((1 << bits) - 1), low
    scale, bias = torch.where(downwards, scale, -scale).half(), torch.where(downwards, bias, high).half()
    wide_scale, wide_bias = (spread(one.float(), weight, 1, group) for one in (scale, bias))
    codes = ((weight - wide_bias) / wide_scale).round().clamp(0, (1 << bits) - 1)
    return {"weight": words(codes, bits).view(torch.uint32), "scales": scale, "biases": bias}, codes * wide_scale + wide_bias


def modelopt(weight: Tensor) -> Packed:
    stored, wide = nvfp4(weight)
    found = {"weight": stored["weight_packed"], "weight_scale": stored["weight_scale"], "input_scale": torch.tensor(0.5)}
    return found | {"weight_scale_2": 1 / stored["weight_global_scale"][0]}, wide


def compressed(form: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


def ints(bits: int, strategy: str, group: int | None = None, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"type": "int", "num_bits": bits, "strategy": strategy, "group_size": group, "symmetric": symmetric, **more}


def floats(bits: int, strategy: str, group: int | None = None, **more: Any) -> dict[str, Any]:
    return ints(bits, strategy, group) | {"type": "float", **more}


PACKED, SCALE = "pack-quantized", "weight_scale"
SCHEMES: dict[str, Scheme] = {
    "fp8 block": Scheme(
        partial(fp8, rows=32, columns=48, name="weight_scale_inv"),
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 48]},
    ),
    "fp8 tensor": Scheme(
        partial(fp8, rows=0, columns=0, name="weight_scale_inv", shape=()),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    ),
    "ct w4a16": Scheme(partial(packed_integers, bits=4, group=16, symmetric=True), compressed(PACKED, ints(4, "group", 16))),
    "ct w4a16 asymmetric": Scheme(
        partial(packed_integers, bits=4, group=16, symmetric=False), compressed(PACKED, ints(4, "group", 16, False))
    ),
    "ct w4a16 ordered": Scheme(
        partial(packed_integers, bits=4, group=16, symmetric=True, ordered=True),
        compressed(PACKED, ints(4, "group", 16, actorder="group")),
    ),
    "ct w8a16": Scheme(partial(packed_integers, bits=8, group=0, symmetric=True), compressed(PACKED, ints(8, "channel"))),
    "ct w8a16 asymmetric": Scheme(
        partial(packed_integers, bits=8, group=16, symmetric=False), compressed(PACKED, ints(8, "group", 16, False))
    ),
    "ct w8a8": Scheme(int8, compressed("int-quantized", ints(8, "channel"))),
    "ct w8a8 asymmetric": Scheme(partial(int8, symmetric=False), compressed("int-quantized", ints(8, "channel", None, False))),
    "ct fp8": Scheme(
        partial(fp8, rows=0, columns=0, name=SCALE, shape=(1,)), compressed("float-quantized", floats(8, "tensor"))
    ),
    "ct fp8 dynamic": Scheme(partial(fp8, rows=1, columns=0, name=SCALE), compressed("float-quantized", floats(8, "channel"))),
    "ct fp8 block": Scheme(
        partial(fp8, rows=32, columns=32, name=SCALE),
        compressed("float-quantized", floats(8, "block", block_structure=[32, 32])),
    ),
    "ct nvfp4": Scheme(nvfp4, compressed("nvfp4-pack-quantized", floats(4, "tensor_group", 16))),
    "ct mxfp4": Scheme(mxfp4, compressed("mxfp4-pack-quantized", floats(4, "group", 32))),
    "awq": Scheme(
        partial(awq, group=16), {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    ),
    "gptq": Scheme(partial(gptq, bits=4, group=16, symmetric=True), gptq_config(4, 16)),
    "gptq ordered": Scheme(partial(gptq, bits=4, group=16, symmetric=True, ordered=True), gptq_config(4, 16, True)),
    "gptq 8 bits": Scheme(partial(gptq, bits=8, group=-1, symmetric=True), gptq_config(8, -1)),
    "gptq asymmetric v2": Scheme(
        partial(gptq, bits=4, group=16, symmetric=False, version=2), gptq_config(4, 16, checkpoint_format="gptq_v2")
    ),
    "gptq by module": Scheme(
        partial(gptq, bits=8, group=16, symmetric=True),
        gptq_config(4, 32, dynamic={r"+:.*_proj$": {"bits": 8, "group_size": 16}}),
    ),
    "bnb nf4": Scheme(partial(four_bits, kind="nf4", nested=False), bnb("nf4")),
    "bnb nf4 nested": Scheme(partial(four_bits, kind="nf4", nested=True), bnb("nf4", True)),
    "bnb fp4 stored as bfloat16": Scheme(partial(four_bits, kind="fp4", nested=False, storage=torch.bfloat16), bnb("fp4")),
    "bnb int8": Scheme(llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "torchao float8": Scheme(partial(torchao, kind="float8", rows=1, columns=0), {"quant_method": "torchao"}),
    "torchao float8 tensor": Scheme(partial(torchao, kind="float8", rows=0, columns=0), {"quant_method": "torchao"}),
    "torchao int8": Scheme(partial(torchao, kind="int8", rows=1, columns=0), {"quant_method": "torchao"}),
    "torchao intx": Scheme(partial(torchao, kind="intx", rows=1, columns=16), {"quant_method": "torchao"}),
    "torchao int4": Scheme(partial(torchao_int4, group=32), {"quant_method": "torchao", "quant_type": "int4, group_size=32"}),
    "mlx 4 bits": Scheme(partial(mlx, bits=4, group=32), {"group_size": 32, "bits": 4}),
    "mlx 8 bits": Scheme(
        partial(mlx, bits=8, group=16),
        {"group_size": 64, "bits": 4, "mode": "affine"}
        | {f"model.language_model.layers.0.{name}": {"group_size": 16, "bits": 8} for name in ("q_proj", "k_proj")},
    ),
    "modelopt nvfp4": Scheme(modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "modelopt fp8": Scheme(
        partial(fp8, rows=0, columns=0, name=SCALE, shape=()), {"quant_method": "modelopt", "quant_algo": "FP8"}
    ),
}


def split_experts(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Store each expert's matrices by themselves, where one tensor `[experts, out, in]` holds those of all experts."""
    found = {}
    for name, tensor in stored.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            found[name] = tensor
            continue
        for i, own in enumerate(tensor):
            parts = {"gate_proj": own.chunk(2)[0], "up_proj": own.chunk(2)[1]} if last == "gate_up_proj" else {last: own}
            found |= {f"{stem}.{i}.{part}.weight": matrix.contiguous() for part, matrix in parts.items()}
    return found


def write(source: Path, target: Path, scheme: Scheme, chosen: Callable[[str], bool]) -> tuple[Path, Path]:
    """Write a checkpoint twice: with the chosen weights packed, and with them dequantised. Return both folders."""
    tensors = split_experts(load_file(source / "model.safetensors"))
    packed, wide = {}, {}
    for name, tensor in tensors.items():
        if not chosen(name):
            packed[name] = wide[name] = tensor
            continue
        stored, value = scheme.pack(tensor.float())
        packed |= {f"{name.removesuffix('.weight')}.{part}": own for part, own in stored.items()}
        wide[name] = value
    folders = target / "packed", target / "wide"
    for folder, content in zip(folders, (packed, wide), strict=True):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file({name: tensor.contiguous().clone() for name, tensor in content.items()}, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(config | {"quantization_config": dict(scheme.config)}))
    return folders
