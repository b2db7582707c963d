"""Reports for `sensorium doctor`: the device, its kernels, the checkpoint and its memory plan. Loads no weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...kernels import dispatch, native
from ...kernels.panels import linear_kernels
from ...mm.errors import CheckpointError, ConfigError, SensoriumError
from ...mm.gguf import find_gguf
from ...mm.types import MediaHeader
from ...models.weight_files import file_headers, has_weights, weight_files
from ...processors.files import find_template, read_json
from ...processors.interface import ProcessingInfo, SupportsTranscription
from ...processors.text.template import load_template
from ...processors.text.tokenizer import Tokenizer
from ..config import EngineConfig, host_memory, make_config
from ..model_files import DTYPES, JSON_FILES, ModelFiles, load_model_files
from .hub import find_model
from .implementation import describe_implementation, resolve_architecture
from .memory import plan_memory
from .memory_plan import MemoryPlan
from .model_source import build_model, computing_dtype
from .resolve import describe_dtype, load_processing, resolve_engine
from .talker import talker_bytes

T = TypeVar("T")


def describe_device(name: str) -> dict[str, str]:
    """Return facts about the device that `device=name` selects. Raise ConfigError if it does not exist."""
    device = EngineConfig("", device=name).torch_device
    found = {"device": str(device), "torch threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        return found | {"gpu memory": f"{torch.cuda.mem_get_info(device)[1] / 2**30:.1f} GiB"}
    return found | {
        "torch instructions": torch.backends.cpu.get_cpu_capability(),
        "C++ kernels": native.instructions() if native.library() is not None else f"not built; to build them: {native.REBUILD}",
        "C++ linear layers": ", ".join(f"{name} {kernel}" for name, kernel in linear_kernels().items()) or "none",
    }


def active_backends(name: str, overrides: str = "") -> dict[str, dict[str, str]]:
    """Return dtype -> op -> backend on the device that `device=name` selects, with `kernels=overrides`."""
    config = EngineConfig("", device=name, kernels=overrides)
    with dispatch.use_backends(overrides):
        return {label: dispatch.active_backends(config.torch_device, dtype) for label, dtype in DTYPES.items()}


def describe_checkpoint(
    model: str | os.PathLike[str], dtype: str = "auto", device: str = "auto", **options: Any
) -> dict[str, str]:
    """Return how a checkpoint is served, from its JSON and tokenizer files.

    Args:
        model: a folder, or a name on the Hub, of which only the files beside the weights are needed.
        dtype, device, options: as for LLM.

    Raises:
        ConfigError, CheckpointError, HubError: the same error that LLM raises for this model.
    """
    config = find_model(make_config(model, options | {"dtype": dtype, "device": device}), weights=False)
    files = load_model_files(config.model, config.adapter, config.hf_overrides)
    row, torch_dtype = resolve_architecture(files), computing_dtype(config, files)
    tokenizer = Tokenizer(files.tokenizer_folder)
    info = load_processing(files, {}, tokenizer)
    template = info.chat_template or files.find_template()
    build_model(files, info, torch_dtype, torch.device("meta"), info.modalities, load_mtp=config.load_mtp)
    return {
        "architecture": files.architecture,
        "path": describe_implementation(row, files),
        "model": row.model,
        "processing": row.processing,
        "dtype": str(torch_dtype).removeprefix("torch."),
        "takes": ", ".join(("text", *info.modalities)),
        "tokenizer": tokenizer.kind,
        "chat template": "found" if template is not None else _without_template(info),
    } | ({"note": describe_dtype(files, torch_dtype)} if files.dtype(config.dtype) != torch_dtype else {})


def find_problems(config: EngineConfig) -> list[tuple[str, SensoriumError]]:
    """Return each part of a checkpoint that cannot be used, and its error. A part that needs a broken one is not checked.

    Args:
        config: the result of `find_model`.
    """
    folder, found = Path(config.model), list[tuple[str, SensoriumError]]()

    def check(part: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except SensoriumError as error:
            if str(error) not in [str(known) for _, known in found]:
                found.append((part, error))
            return None

    if folder.is_dir():
        for name in JSON_FILES:
            check(name, lambda name=name: read_json(folder / name))  # type: ignore[misc]
        check("weights", lambda: _check_weights(folder))
    check("chat template", lambda: _check_template(folder))
    check("tokenizer", lambda: Tokenizer(folder))
    files = check("config.json", lambda: load_model_files(config.model, config.adapter, config.hf_overrides))
    if files is not None and check("architecture", lambda: resolve_architecture(files)) is not None:
        info = check("processor", lambda: load_processing(files, config.mm_processor_kwargs))
        if info is not None:
            check("model", lambda: _build(files, info, config))
    return found


def _build(files: ModelFiles, info: ProcessingInfo, config: EngineConfig) -> None:
    """Build the model on the meta device."""
    build_model(files, info, computing_dtype(config, files), torch.device("meta"), info.modalities, load_mtp=config.load_mtp)


def _check_template(folder: Path) -> None:
    template = find_template(folder)
    if template is not None:
        load_template(template)


def missing_weights(folder: Path) -> CheckpointError | None:
    """Return the error of LLM for a folder without weight files, or None. Such a folder is enough for a memory plan."""
    try:
        if find_gguf(folder) is not None:
            return None
        files = weight_files(folder, lambda name: (folder / name).exists())
    except ConfigError:  # several GGUF models, which `find_problems` reports
        return None
    except CheckpointError as error:
        return None if has_weights(lambda name: (folder / name).exists()) else error
    if any(file.exists() for file in files):
        return None
    return CheckpointError(f"{folder} holds an index, but none of its {len(files)} weight files; download them")


def _check_weights(folder: Path) -> None:
    """Check the headers of the weight files. A folder without any of them passes: see `missing_weights`.

    Raises:
        ConfigError: the folder holds several GGUF models.
        CheckpointError: the index or a file is broken, or some files of the index are missing.
    """
    if find_gguf(folder) is not None or missing_weights(folder) is not None:  # `load_model_files` reads a GGUF file's header
        return
    files = weight_files(folder, lambda name: (folder / name).exists())
    missing = [file.name for file in files if not file.exists()]
    if missing:
        named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(f"{folder} lacks {len(missing)} of its {len(files)} weight files ({named}); download them again")
    for file in files:
        file_headers(file)


def _without_template(info: ProcessingInfo) -> str:
    transcribes = isinstance(info, SupportsTranscription)
    return "none: transcribe needs none" if transcribes else "none: chat needs chat_template="


def explain(config: EngineConfig) -> MemoryPlan:
    """Return the memory plan of an engine with these options, from the checkpoint's JSON. Raise ConfigError as LLM does."""
    files = load_model_files(config.model, config.adapter, config.hf_overrides)
    info = load_processing(files, config.mm_processor_kwargs)
    with dispatch.use_backends(config.kernels):
        engine = resolve_engine(config, files, info, on_device=False)
        plan = plan_memory(engine.config, engine.model, info, engine.sizes)
        return replace(plan, talker=talker_bytes(engine.config, files, engine.sizes.max_model_len))


def describe_memory(model: str | os.PathLike[str], options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the memory plan of `LLM(model, **options)`. Raise ConfigError and HubError as LLM does."""
    return plan_of(model, options).rows()


def plan_of(model: str | os.PathLike[str], options: Mapping[str, Any]) -> MemoryPlan:
    """Return the memory plan of `LLM(model, **options)`. Raise ConfigError and HubError as LLM does."""
    return explain(find_model(make_config(model, options), weights=False))


def lacking_memory(plan: MemoryPlan) -> str | None:
    """Return an error text if a plan needs more memory than this machine or the device has, else None."""
    gpu, has = plan.device != "cpu", host_memory()
    needs = [(plan.on_host if gpu else plan.total, has, "this machine")]
    if gpu:
        needs.append((plan.total, torch.cuda.mem_get_info(torch.device(plan.device))[1], plan.device))
    for needed, has, where in needs:
        if needed > has:
            how = "choose quantization, or a smaller max_model_len, max_num_seqs or kv_cache_memory_bytes"
            return f"the plan takes {needed / 2**30:.1f} GiB at most, but {where} has {has / 2**30:.1f} GiB; {how}"
    return None


def embedding_grid(model: str | os.PathLike[str], size: tuple[int, int]) -> tuple[int, int]:
    """Return (rows, columns) of the embeddings that an image of `size` (height, width) becomes in this checkpoint."""
    folder = find_model(make_config(model, {}), weights=False).model
    return load_processing(load_model_files(folder), {}).geometry(MediaHeader("image", *size)).merged[1:]
