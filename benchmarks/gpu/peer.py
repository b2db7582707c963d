"""Measure transformers on the same shapes, dtype and device, with sdpa and a static cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import shapes
from .e2e import KEYS, PROMPT, of_model
from .machine import Bench
from .parts import Made
from .record import Figure, Lacks


def qwen2_5_vl(bench: Bench) -> Iterator[Made]:
    return _model(bench, shapes.qwen2_5_vl(bench.tiny))


def qwen3_vl(bench: Bench) -> Iterator[Made]:
    return _model(bench, shapes.qwen3_vl(bench.tiny))


def _model(bench: Bench, config: Mapping[str, Any]) -> Iterator[Made]:
    decodes = [partial(_decode, batch=batch) for batch in bench.pick((1, 64), (1, 3))]
    return of_model(bench, config, build, [_tower, _prompt, *decodes])


def build(bench: Bench, config: Mapping[str, Any]) -> Any:
    """Make transformers' model with random weights; raise Lacks if its class cannot be imported."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
    try:
        from oracle import ensure_torchvision

        ensure_torchvision()
        import transformers

        kind = getattr(transformers, config["architectures"][0])
    except (ImportError, AttributeError) as error:
        raise Lacks(f"what this model of transformers needs ({error}): pip install -e '.[test]'") from None
    made = kind.config_class(**{name: value for name, value in config.items() if name not in ("architectures", "model_type")})
    with torch.device(bench.device):
        model = kind._from_config(made, dtype=bench.dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _generate(model: Any, ids: torch.Tensor, tokens: int) -> Any:
    """Decode greedily without compilation, which would take minutes per shape."""
    options = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, cache_implementation="static", disable_compile=True, **options)


@torch.inference_mode()
def _prompt(bench: Bench, model: Any, config: Mapping[str, Any]) -> Figure:
    rows = bench.pick(PROMPT, 40)
    ids = torch.randint(0, 280, (1, rows), device=bench.device)
    seconds = _best(bench, lambda: _generate(model, ids, 1))
    operations = shapes.decoder(config).prompt(rows)
    note = f"{seconds * 1e3:,.1f} ms, {rows / seconds:,.0f} rows/s"
    return Figure(f"prompt of {rows} rows", operations / seconds / bench.matmul, bench.ceiling, note=note)


@torch.inference_mode()
def _decode(bench: Bench, model: Any, config: Mapping[str, Any], batch: int) -> Figure:
    """Measure the time of an answer after its first token."""
    keys, count = bench.pick((KEYS, 32), (20, 4))
    ids = torch.randint(0, 280, (batch, keys), device=bench.device)
    first = _best(bench, lambda: _generate(model, ids, 1))
    seconds = max(_best(bench, lambda: _generate(model, ids, 1 + count)) - first, 1e-9) / count
    floor = shapes.decoder(config).step(batch, keys + count // 2, bench.dtype.itemsize) / bench.copy
    note = f"{seconds * 1e3:.2f} ms a step, {batch / seconds:,.0f} tokens/s; static cache, not compiled"
    return Figure(f"decode, batch {batch}", floor / seconds, "of bandwidth floor", note=note)


@torch.inference_mode()
def _tower(bench: Bench, model: Any, config: Mapping[str, Any]) -> Figure:
    vision, side, count = config["vision_config"], bench.pick(64, 8), bench.pick(4, 2)
    numbers = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    pixels = bench.randn(count * side**2, numbers)
    grids = torch.tensor([[1, side, side]] * count, device=bench.device)
    seconds = bench.seconds(lambda: model.model.visual(pixels, grid_thw=grids))
    note = f"{seconds * 1e3:,.1f} ms, {count * side**2 / seconds:,.0f} patches/s"
    operations = count * shapes.tower(config, side)
    name = f"tower, {count} x {side} x {side} patches"
    return Figure(name, operations / seconds / bench.matmul, bench.ceiling, note=note)


def _best(bench: Bench, run: Callable[[], object]) -> float:
    """Return the shortest of three calls."""
    times = []
    for _ in range(3):
        bench.sync()
        start = time.perf_counter()
        run()
        bench.sync()
        times.append(time.perf_counter() - start)
    return min(times)
