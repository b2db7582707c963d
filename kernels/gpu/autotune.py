"""Autotuning of launch configurations on the GPU at hand, at the sizes of 7B decoders and vision towers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..activation import triton as activation
from ..attention import triton as attention
from ..metadata import AttentionMetadata
from ..norm import triton as norm
from ..qkv_prepare.triton import prepare_qkv_
from ..rope import triton as rope
from ..varlen import triton as varlen
from . import launch_config
from .launch_config import Config

Run = Callable[[], object]
Measure = Callable[[Run], float]
_ROWS = 4096
_PAGE = 16


def search(measure: Measure, report: Callable[[str], None], device: torch.device) -> dict[tuple[str, str], Config]:
    """Return the configurations that are faster than the current ones, by (op, shape class). Takes minutes."""
    faster: dict[tuple[str, str], Config] = {}
    for run in workloads(device):
        for op, shape in launch_config.requested_configs(run):
            current = launch_config.get_config(op, shape)
            chosen = descend(op, current, run, measure)
            report(f"{op} {shape or 'any'}: " + ", ".join(f"{name}={value}" for name, value in chosen.items()))
            if chosen != current:
                faster[op, shape] = chosen
    return faster


def descend(op: str, config: Config, run: Run, measure: Measure) -> Config:
    """Change one number after the other while that helps: halve or double it, or take one stage less or more."""
    for name in config:
        better = True
        while better:
            before, config = config, launch_config.fastest_config(op, run, [config, *_near(config, name)], measure)
            better = config != before
    return config


def _near(config: Config, name: str) -> Iterator[Config]:
    value = config[name]
    for other in (value - 1, value + 1) if name == "num_stages" else (value // 2, value * 2):
        if 1 <= other <= (16 if name == "num_warps" else 8 if name == "num_stages" else 4096):
            yield {**config, name: other}


def workloads(device: torch.device) -> Iterator[Run]:
    """Yield functions that launch one or a few ops each, in bfloat16."""

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    for dim in (1280, 3584):
        x, weight = noise(_ROWS, dim), noise(dim)
        yield partial(norm.rms_norm, x, weight, 1e-6, x)
    x = noise(_ROWS, 2 * 18944)
    yield lambda: activation.act_and_mul("silu", x)
    for q_heads, kv_heads, dim in ((28, 4, 128), (14, 2, 64)):
        qkv, weight = noise(_ROWS, q_heads + 2 * kv_heads, dim), noise(dim)
        cos, sin = torch.rand(2, _ROWS, dim // 2, device=device).unbind()
        cache = noise(2, 8 * _ROWS // _PAGE, _PAGE, kv_heads, dim)
        for meta in (_step([_ROWS], 1, device), _step([_ROWS] * 8, _ROWS, device)):  # a prompt, decode rows
            part = qkv[: meta.num_rows, :q_heads]
            yield partial(attention.attend, part, cache, meta, 0.1)
        slots = torch.arange(_ROWS, device=device)
        yield partial(prepare_qkv_, qkv, cache, slots, (cos, sin), False, (weight, weight, 1e-6, 0.0))
        yield partial(rope.rotate_, qkv, cos, sin)
    for dim in (72, 80, 128):
        q, k, v = noise(_ROWS, 3, 16, dim).unbind(1)
        yield partial(varlen.varlen_attention, q, k, v, [_ROWS], 0.1)


def _step(lengths: list[int], first: int, device: torch.device) -> AttentionMetadata:
    """Return the metadata of requests with `lengths` keys, whose query rows start at the `first` key (counted from 1)."""
    blocks = -(-max(lengths) // _PAGE)
    tables = torch.arange(len(lengths) * blocks, dtype=torch.int32, device=device).view(len(lengths), blocks)
    rows = [length - first + 1 for length in lengths]
    starts = tuple(sum(rows[:i]) for i in range(len(rows) + 1))
    return AttentionMetadata(starts, tuple(lengths), tables, torch.arange(starts[-1], device=device), _PAGE)
