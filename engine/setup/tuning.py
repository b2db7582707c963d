"""Finds the fastest launch configurations for this GPU by trying them, for `sensorium tune`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ...callers.errors import ConfigError
from ...kernels.backends import has_triton
from ..config import EngineConfig


def tune(name: str, report: Callable[[str], None]) -> Path | None:
    """Try configurations on the device that `device=name` selects.

    Returns the path of the user's file, which holds the faster ones; None if none is faster than the shipped configuration.

    Raises:
        ConfigError: there is no GPU or no Triton, or the user's file is invalid.
    """
    device = EngineConfig("", device=name).torch_device
    if device.type != "cuda" or not has_triton():
        raise ConfigError("sensorium tune needs a GPU and triton: pip install 'sensorium[gpu]'")
    from triton.testing import do_bench

    from ...kernels.gpu import autotune
    from ...kernels.gpu.launch_config import save_config

    path, card = None, torch.cuda.get_device_name(device)
    try:
        with torch.cuda.device(device):
            settings = autotune.search(lambda run: float(do_bench(run)), report, device)
        for (op, shape), config in settings.items():
            path = save_config(card, op, shape, config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return path
