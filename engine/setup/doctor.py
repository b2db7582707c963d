"""Reports for `sensorium doctor`: the device, its kernels, the checkpoint and its memory plan. Loads no weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...callers.errors import CheckpointError, ConfigError, SensoriumError
from ...checkpoints.files import read_json
from ...checkpoints.folder import CheckpointFolder
from ...checkpoints.gguf.reader import find_gguf
from ...checkpoints.weight_files import file_headers
from ...kernels import bodies, dispatch, installation, native
from ...kernels.linear.panels import linear_kernels
from ...kernels.measure import COST_ROWS, WEIGHTS, row_costs
from ...mm.types import MediaHeader
from ...processors.files import find_template
from ...processors.interface import ProcessingInfo, SupportsTranscription
from ...processors.text.template import load_template
from ...processors.text.tokenizer import Tokenizer
from ..config import EngineConfig, host_memory, make_config
from ..core_info import CoreInfo
from ..model_files import DTYPES, JSON_FILES, ModelFiles, load_model_files
from .draft_model import draft_model_bytes
from .eagle3 import eagle3_bytes
from .hub import find_model
from .implementation import describe_implementation, resolve_architecture
from .memory import plan_memory, row_bytes
from .memory_plan import MemoryPlan
from .model_source import ModelParts, build_model, computing_dtype
from .resolve import ResolvedEngine, describe_dtype, load_processing, resolve_engine
from .talker import talker_bytes

T = TypeVar("T")


def describe_device(name: str) -> dict[str, str]:
    """Return facts about the device that `device=name` selects. Raise ConfigError if it does not exist."""
    device = EngineConfig("", device=name).torch_device
    facts = {"device": str(device), "torch threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        return facts | {"gpu memory": f"{torch.cuda.mem_get_info(device)[1] / 2**30:.1f} GiB"}
    return facts | {
        "torch instructions": torch.backends.cpu.get_cpu_capability(),
        "C++ kernels": native.instructions() if native.library() is not None else "not built",
        "C++ linear layers": ", ".join(f"{name} {kernel}" for name, kernel in linear_kernels().items()) or "none",
    }


def describe_bodies(name: str) -> list[tuple[str, str]]:
    """Return the body of each product on the CPU with the reason, what a few rows cost, and where the rates are kept."""
    if EngineConfig("", device=name).torch_device.type != "cpu" or not bodies.may_measure():
        return []
    rows = [(op, f"{chosen.body} ({chosen.reason})") for op, chosen in bodies.choices(native.products() or "").items()]
    for weights in WEIGHTS:
        costs = row_costs(weights)
        shown = ", ".join(f"{costs[count - 1]:.2f}" for count in COST_ROWS)
        rows.append((f"rows, {weights}", f"{shown} times the cost of one, for {', '.join(map(str, COST_ROWS))} rows"))
    path = bodies.rates_path()
    return rows if path is None else [*rows, ("kept in", str(path) if path.is_file() else f"{path.parent} cannot be written")]


def installation_problems(name: str) -> list[tuple[str, str]]:
    """Return what is wrong with how the package is installed: a clone hides it, or the C++ kernels of its CPU are missing."""
    problems, hidden = list[tuple[str, str]](), installation.hiding_clone()
    if hidden is not None:
        problems.append(("clone", installation.describe_clone(*hidden)))
    if EngineConfig("", device=name).torch_device.type == "cpu" and native.library() is None:
        problems.append(("C++ kernels", _missing_kernels()))
    return problems


def _missing_kernels() -> str:
    hidden = installation.hidden_package()
    if hidden is not None and installation.has_kernels(hidden):
        return "this clone has none, and the installed package that it hides has them (see above)"
    built = installation.has_kernels(installation.PACKAGE)
    reason = "built for another system or from other sources" if built else "not built"
    advice = installation.compiler_advice()
    step = f"{advice}, then build them" if advice else "Build them"
    return f"{reason}, so torch runs in their place, several times slower. {step}: {installation.build_command()}"


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
    build_model(files, info, torch_dtype, torch.device("meta"), ModelParts(info.modalities, load_mtp=config.load_mtp))
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
    folder, problems = Path(config.model), list[tuple[str, SensoriumError]]()

    def check(part: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except SensoriumError as error:
            if str(error) not in [str(problem) for _, problem in problems]:
                problems.append((part, error))
            return None

    if folder.is_dir():
        for name in JSON_FILES:
            check(name, partial(read_json, folder / name))
        check("weights", lambda: _check_weights(folder))
    check("chat template", lambda: _check_template(folder))
    check("tokenizer", lambda: Tokenizer(folder))
    files = check("config.json", lambda: load_model_files(config.model, config.adapter, config.hf_overrides))
    if files is not None and check("architecture", lambda: resolve_architecture(files)) is not None:
        info = check("processor", lambda: load_processing(files, config.mm_processor_kwargs))
        if info is not None:
            check("model", lambda: _build(files, info, config))
    return problems


def _build(files: ModelFiles, info: ProcessingInfo, config: EngineConfig) -> None:
    """Build the model on the meta device."""
    build_model(
        files, info, computing_dtype(config, files), torch.device("meta"), ModelParts(info.modalities, load_mtp=config.load_mtp)
    )


def _check_template(folder: Path) -> None:
    template = find_template(folder)
    if template is not None:
        load_template(template)


def missing_weights(folder: Path) -> CheckpointError | None:
    """Return the error of LLM for a folder without weight files, or None. Such a folder is enough for a memory plan."""
    try:
        if find_gguf(folder) is not None:
            return None
        files = CheckpointFolder(folder).weight_files()
    except ConfigError:  # several GGUF models, which `find_problems` reports
        return None
    except CheckpointError as error:
        return None if CheckpointFolder(folder).has_safetensors else error
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
    files = CheckpointFolder(folder).weight_files()
    missing = [file.name for file in files if not file.exists()]
    if missing:
        named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(f"{folder} lacks {len(missing)} of its {len(files)} weight files ({named}); download them again")
    for file in files:
        file_headers(file)


def _without_template(info: ProcessingInfo) -> str:
    transcribes = isinstance(info, SupportsTranscription)
    return "none: transcribe needs none" if transcribes else "none: chat needs chat_template="


@dataclass(frozen=True)
class CheckedModel:
    """Facts about a model, read from the files beside its weights.

    Args:
        core: what the core will say of the model, as far as that does not need the weights.
        speech: the model's interface for transcription, or None.
        template: the checkpoint's chat template.
        special_tokens: texts of the tokenizer's special tokens.
    """

    config: EngineConfig
    files: ModelFiles
    core: CoreInfo
    plan: MemoryPlan
    speech: SupportsTranscription | None
    template: str | None
    special_tokens: Sequence[str]


def check_model(config: EngineConfig) -> CheckedModel:
    """Check the options of an engine, and plan its memory, from the checkpoint's JSON. Raise ConfigError as LLM does."""
    files = load_model_files(config.model, config.adapter, config.hf_overrides)
    info = load_processing(files, config.mm_processor_kwargs)
    engine, plan = _resolve(config, files, info)
    model = engine.model
    core = CoreInfo(
        max_model_len=engine.sizes.max_model_len,
        max_num_seqs=config.max_num_seqs,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        row_bytes=row_bytes(model),
        dtype=str(computing_dtype(config, files)).removeprefix("torch."),
        device=str(config.torch_device),
        modalities=engine.source.modalities,
        can_generate=model.can_generate and config.parts != "encoder",
    )
    speech = info if isinstance(info, SupportsTranscription) else None
    specials = [*Tokenizer(files.tokenizer_folder).specials]
    return CheckedModel(engine.config, files, core, plan, speech, info.chat_template or files.find_template(), specials)


def explain(config: EngineConfig) -> MemoryPlan:
    """Return the memory plan of an engine with these options, from the checkpoint's JSON. Raise ConfigError as LLM does."""
    files = load_model_files(config.model, config.adapter, config.hf_overrides)
    return _resolve(config, files, load_processing(files, config.mm_processor_kwargs))[1]


def _resolve(config: EngineConfig, files: ModelFiles, info: ProcessingInfo) -> tuple[ResolvedEngine, MemoryPlan]:
    with dispatch.use_backends(config.kernels):
        engine = resolve_engine(config, files, info, on_device=False)
        plan = plan_memory(engine.config, engine.model, info, engine.sizes)
        drafting = draft_model_bytes, eagle3_bytes
        drafts = [measure(engine.config, engine.model, engine.sizes) for measure in drafting]
        plan = replace(
            plan,
            talker=talker_bytes(engine.config, files, engine.sizes.max_model_len),
            draft_model=sum(model for model, _ in drafts),
            draft_cache=plan.draft_cache + sum(caches for _, caches in drafts),
        )
        return engine, plan


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
