"""What `sensorium doctor` asks: device, kernels in use, whether a checkpoint is known. Loads no weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ..kernels import dispatch
from ..mm.types import MediaHeader
from .config import DTYPES, EngineConfig, load_model_files, make_config
from .loader import check_kernels, load_processing, resolve_max_model_len, slow_dtype
from .memory import MemoryPlan, plan_memory, settle
from .paths import check, choose, describe
from .source import Source, build_model


def describe_device(name: str) -> dict[str, str]:
    """The device that `device=name` means, and what torch makes of it. ConfigError if it is not there."""
    device = EngineConfig("", device=name).torch_device
    found = {"device": str(device), "torch threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        return found | {"gpu memory": f"{torch.cuda.mem_get_info(device)[1] / 2**30:.1f} GiB"}
    return found | {"torch instructions": torch.backends.cpu.get_cpu_capability()}


def kernels(name: str, told: str = "") -> dict[str, dict[str, str]]:
    """dtype -> op -> backend in use on the device that `device=name` means, where the engine is told `kernels=told`."""
    config = EngineConfig("", device=name, kernels=told)
    with dispatch.using(told):
        return {label: dispatch.active(config.torch_device, dtype) for label, dtype in DTYPES.items()}


def check_folder(folder: str | os.PathLike[str]) -> None:
    """ConfigError or CheckpointError where no checkpoint lies there."""
    load_model_files(folder)


def describe_checkpoint(folder: str | os.PathLike[str], asked: str = "auto", device: str = "auto") -> dict[str, str]:
    """Which row of the registry a checkpoint takes, from its JSON files. ConfigError if none does.

    `asked`, `device`: as LLM takes its dtype and device.
    """
    files = load_model_files(folder)
    row, dtype = choose(files), files.dtype(asked)
    info = load_processing(row, files, {})
    build_model(row, files, info, dtype, torch.device("meta"))
    slow = slow_dtype(EngineConfig(os.fspath(folder), dtype=asked, device=device), dtype)
    return {
        "architecture": files.architecture,
        "path": describe(row, files),
        "model": row.model,
        "processing": row.processing,
        "dtype": str(dtype).removeprefix("torch."),
        "takes": ", ".join(("text", *info.modalities)),
    } | ({"warning": slow} if slow else {})


def explain(config: EngineConfig) -> MemoryPlan:
    """What an engine with these options takes and holds, from the checkpoint's JSON alone. ConfigError as LLM raises it."""
    files = load_model_files(config.model)
    row, dtype = choose(files), files.dtype(config.dtype)
    check(row, config)
    check_kernels(config, dtype)
    info = load_processing(row, files, config.mm_processor_kwargs)
    model = Source(config, files, row, info).planned()
    with dispatch.using(config.kernels):
        config = settle(config, lambda: model, info)
        return plan_memory(config, model, info, resolve_max_model_len(config, model, config.torch_device))


def describe_memory(folder: str | os.PathLike[str], options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows of the memory plan of `LLM(folder, **options)`. ConfigError as LLM raises it."""
    return explain(make_config(folder, options)).rows()


def embedding_grid(folder: str | os.PathLike[str], size: tuple[int, int]) -> tuple[int, int]:
    """(rows, columns) of the embeddings that a picture of `size` (height, width) becomes in this checkpoint."""
    files = load_model_files(folder)
    return load_processing(choose(files), files, {}).geometry(MediaHeader("image", *size)).merged[1:]
