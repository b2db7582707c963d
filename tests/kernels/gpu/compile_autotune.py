"""The launches on which `sensorium tune` tries configurations."""

from __future__ import annotations

import torch
from sensorium.kernels.gpu import autotune, launch_config

HOT: set[str] = set()


def launches() -> None:
    """Run the workloads on NVIDIA only: AMD's compiler is ten times slower, on much the same code."""
    for run in autotune.workloads(torch.device("cpu")) if launch_config.gpu_info().arch.startswith("sm_") else ():
        run()
