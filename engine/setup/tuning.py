"""What `sensorium tune` asks: launch configurations by trial, on the card at hand. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ..kernels.dispatch import has_triton
from ..mm.errors import ConfigError
from .config import EngineConfig


def tune(name: str, report: Callable[[str], None]) -> Path | None:
    """Try configurations on the device that `device=name` means; the user's file, None where nothing was faster.

    Raises:
        ConfigError: no GPU, no Triton, or a file that holds something else.
    """
    device = EngineConfig("", device=name).torch_device
    if device.type != "cuda" or not has_triton():
        raise ConfigError("sensorium tune needs a GPU and triton: pip install 'sensorium[gpu]'")
    from triton.testing import do_bench

    from ..kernels.gpu import trials
    from ..kernels.gpu.tune import keep

    path, card = None, torch.cuda.get_device_name(device)
    try:
        with torch.cuda.device(device):
            found = trials.search(lambda run: float(do_bench(run)), report, device)
        for (op, shape), config in found.items():
            path = keep(card, op, shape, config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return path
