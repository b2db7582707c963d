"""What `sensorium doctor` asks: device, kernels in use, whether a checkpoint is known. Loads no weights."""

from __future__ import annotations

import os

import torch

from ..kernels import dispatch
from ..mm.registry import find
from ..mm.types import MediaHeader
from .config import DTYPES, EngineConfig, load_model_files
from .loader import load_processing, resolve


def describe_device(name: str) -> dict[str, str]:
    """The device that `device=name` means, and what torch makes of it. ConfigError if it is not there."""
    device = EngineConfig("", device=name).torch_device
    found = {"device": str(device), "torch threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        return found | {"gpu memory": f"{torch.cuda.mem_get_info(device)[1] / 2**30:.1f} GiB"}
    return found | {"torch instructions": torch.backends.cpu.get_cpu_capability()}


def kernels(name: str) -> dict[str, dict[str, str]]:
    """dtype -> op -> backend in use on the device that `device=name` means."""
    device = EngineConfig("", device=name).torch_device
    return {label: dispatch.active(device, dtype) for label, dtype in DTYPES.items()}


def describe_checkpoint(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Which row of the registry a checkpoint takes, from its JSON files. ConfigError if none does."""
    files = load_model_files(folder)
    row = find(files.architecture)
    resolve(row.model)
    info = load_processing(row, files, {})
    return {
        "architecture": files.architecture,
        "model": row.model,
        "processing": row.processing,
        "dtype": str(files.dtype("auto")).removeprefix("torch."),
        "takes": ", ".join(("text", *info.modalities)),
    }


def embedding_grid(folder: str | os.PathLike[str], size: tuple[int, int]) -> tuple[int, int]:
    """(rows, columns) of the embeddings that a picture of `size` (height, width) becomes in this checkpoint."""
    files = load_model_files(folder)
    return load_processing(find(files.architecture), files, {}).geometry(MediaHeader("image", *size)).merged[1:]
