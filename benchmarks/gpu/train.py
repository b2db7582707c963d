"""Train the shipped model on the device for a minute: steps per second, and a falling loss. Writes no weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from .machine import Bench
from .record import Figure, Lacks

_RATE, _WARM = 2e-3, 100
_SHARE = 5  # compare the first and the last fifth of the steps


def tiny_vl(bench: Bench) -> Iterator[Figure]:
    """Start as `training.train` does: one character per image, Muon and AdamW, mixed precision."""
    try:
        from training.batch import STAGES, Batch, make
        from training.loop import optimizers
        from training.train import Trainee
    except ImportError as missing:
        raise Lacks(f"{missing.name}: pip install -e '.[test]'") from None

    def batch(step: int) -> Batch:
        made = make(np.random.default_rng([1, step]), STAGES[0], bench.pick(32, 4))
        there = {name: getattr(made, name).to(bench.device) for name in ("ids", "labels", "patches")}
        return replace(made, aux=None if made.aux is None else made.aux.to(bench.device), **there)

    torch.manual_seed(0)
    with torch.device(bench.device):  # computes angles and positions on the fly
        model = Trainee()
        opts = optimizers(model, _RATE)
    losses: list[float] = []
    computing, start, last = 0.0, time.perf_counter(), bench.pick(60.0, 4.0)
    while (len(losses) < 2 * _SHARE or time.perf_counter() - start < last) and len(losses) < bench.pick(5000, 10):
        given = batch(len(losses))
        bench.sync()
        begun = time.perf_counter()
        with torch.device(bench.device), torch.autocast(bench.device.type, torch.bfloat16):
            answer, aux, _ = model.losses(given)
        loss = answer + 0.5 * aux
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.param_groups[0]["lr"] = _RATE * min(1.0, (len(losses) + 1) / _WARM)
            opt.step()
            opt.zero_grad(set_to_none=True)
        losses.append(loss.item())
        computing += time.perf_counter() - begun
    steps, whole = len(losses), time.perf_counter() - start
    yield Figure("steps per second, data made in between", steps / whole, "1/s", note=f"{steps} steps, {whole:.0f} s")
    yield Figure("steps per second on the device", steps / computing, "1/s")
    part = steps // _SHARE
    first, now = sum(losses[:part]) / part, sum(losses[-part:]) / part
    yield Figure("loss of the last fifth over the first's", now / first, "", most=1.0, note=f"{first:.3f} to {now:.3f}")
