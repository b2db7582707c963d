"""The launches on which `sensorium tune` tries configurations."""

from __future__ import annotations

import torch
from sensorium.kernels.gpu import trials, tune

HOT: set[str] = set()


def launches() -> None:
    """AMD's compiler takes ten times as long as NVIDIA's, over much the same."""
    for run in trials.workloads(torch.device("cpu")) if tune.card().arch.startswith("sm_") else ():
        run()
