"""Writes a checkpoint with the decoder's weights in 4 bits, in compressed-tensors' layout `pack-quantized`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...callers.errors import ConfigError
from ...checkpoints.folder import INDEX_END, WEIGHTS_END, CheckpointFolder
from ...checkpoints.weight_files import ADAPTER_WEIGHTS, read_checkpoint, rename
from ...kernels.linear.int4 import Int4Options, quantize_int4
from ...models.layers.linear import Linear
from ...models.text.scaling import Folding, decoder_layers
from ...models.weights import named_layers
from ..config import make_config
from ..model_files import load_model_files
from .awq import collect_inputs, search_foldings
from .hub import find_model
from .model_source import ModelSource
from .resolve import load_processing

_SHARD_BYTES = 4 << 30
_WEIGHTS = (WEIGHTS_END, ".bin", ".pt", ".pth", ".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack")


def quantize_checkpoint(
    model: str,
    out: str | os.PathLike[str],
    group_size: int,
    report: Callable[[str], object],
    calibrate: Callable[[], object] | None = None,
) -> Path:
    """Round the decoder's weights of a checkpoint to 4 bits with a symmetric scale per group of inputs.

    Head, embeddings, routers, towers, and layers whose number of inputs is not a multiple of `group_size` are not quantised.

    Args:
        out: the folder to write, which must not exist. It is created when all files are complete.
        report: called with one line for each file written.
        calibrate: loads and runs the model in this process on prompts whose activations choose AWQ's scales, see
            `pipelines.calibration`; None: round to nearest. The inverse scales are folded into the norm or linear
            layer before. Layers whose input comes from elsewhere (experts, the MLP's second layer without a gate) are rounded.

    Raises:
        ConfigError: `out` exists, the checkpoint is quantised already, or no layer can be quantised or scaled.
        CheckpointError, HubError: as LLM.
    """
    target = Path(out)
    if target.exists():
        raise ConfigError(f"{target} exists; give a new folder", param="out")
    config = find_model(make_config(model, {"quantization": {"method": "int4", "group_size": group_size}, "device": "cpu"}))
    folder = Path(config.model)
    root, names = _quantised_names(config, group_size)
    changes = {} if calibrate is None else _search(config.model, root, names, group_size, calibrate)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _copy_files(folder, partial)
        wide = _write_weights(folder, partial, names, changes, group_size, report)
        settings = {**CheckpointFolder(folder).json("config.json"), "quantization_config": _config(group_size, wide)}
        (partial / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _quantised_names(config: Any, group_size: int) -> tuple[Any, set[str]]:
    """Return the model on the meta device and the stored names of the weights to quantise."""
    files = load_model_files(config.model)
    if not (Path(config.model) / "config.json").is_file():
        raise ConfigError(f"{config.model} has no config.json; give a checkpoint in the Hub's layout", param="model")
    if files.quantization_config is not None:
        raise ConfigError(
            f"{config.model} is quantised already; give a checkpoint with weights in 16 or 32 bits", param="model"
        )
    model: Any = ModelSource(config, files, load_processing(files, config.mm_processor_kwargs)).build_on_meta()
    prefixes = getattr(model, "prefixes", None)
    if prefixes is None:
        raise ConfigError(f"{files.architecture} runs through transformers, whose layers are not quantised", param="model")
    layers = {name: layer for name, (layer, _) in named_layers(model).items() if name.endswith(".weight")}
    names = set()
    for name, tensor in read_checkpoint(Path(config.model)):
        layer = layers.get(rename(name, prefixes))
        fits = isinstance(layer, Linear) and isinstance(layer.quantization, Int4Options)
        if fits and tensor.ndim == 2 and tensor.shape[1] % group_size == 0:
            names.add(name)
    if not names:
        raise ConfigError(
            f"{config.model} has no layer of the decoder with a multiple of {group_size} inputs; give a smaller group size",
            param="group_size",
        )
    return model, names


def _search(model: str, root: Any, names: set[str], group_size: int, calibrate: Callable[[], object]) -> dict[str, Folding]:
    """Return stored name -> change of each tensor that AWQ scales."""
    inputs, layers = collect_inputs(calibrate), len(decoder_layers(root))
    if not layers or len(inputs) != layers:
        reason = f"the calibration prompts ran {len(inputs)} of {layers} decoder layers that AWQ can scale in {model}"
        raise ConfigError(f"{reason}; round to nearest instead", param="method")
    canonical = {name: rename(name, root.prefixes) for name, _ in read_checkpoint(Path(model))}
    weights = ((canonical[name], tensor) for name, tensor in read_checkpoint(Path(model)))
    changes = search_foldings(root, inputs, weights, {canonical[name] for name in names}, group_size)
    scales = {name: changes[other] for name, other in canonical.items() if other in changes}
    if not scales:
        raise ConfigError(f"{model} has no layer that AWQ can scale; round to nearest instead", param="method")
    return scales


def _copy_files(folder: Path, partial: Path) -> None:
    """Copy all files but weights; of weights, those of adapters. Hidden folders are left out."""
    for file in folder.rglob("*"):
        name = file.relative_to(folder)
        is_weight = file.suffix in _WEIGHTS and file.name != ADAPTER_WEIGHTS
        if not file.is_file() or is_weight or file.name.endswith(INDEX_END) or any(p[0] == "." for p in name.parent.parts):
            continue
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, partial / name)


def _write_weights(
    folder: Path,
    partial: Path,
    names: set[str],
    changes: Mapping[str, Folding],
    group_size: int,
    report: Callable[[str], object],
) -> list[str]:
    """Write the weights and their index. Return the modules, by stored name, whose matrices are not quantised."""
    wide, shards, tensors, used = list[str](), list[list[str]](), dict[str, Tensor](), 0

    def flush() -> None:
        save_file(tensors, partial / f"part-{len(shards)}", {"format": "pt"})
        shards.append(list(tensors))
        report(f"file {len(shards)} of the weights: {len(tensors)} tensors, {used / 1e9:.2f} GB")
        tensors.clear()

    total = 0
    for name, tensor in read_checkpoint(folder):
        if name in changes:
            tensor = changes[name](tensor)
        if name in names:
            parts = pack_tensors(name.removesuffix("weight"), tensor, group_size)
        else:
            parts = {name: tensor.contiguous()}
            if tensor.ndim == 2 and name.endswith(".weight"):
                wide.append(name.removesuffix(".weight"))
        size = sum(part.nbytes for part in parts.values())
        if tensors and used + size > _SHARD_BYTES:
            flush()
            used = 0
        tensors.update(parts)
        used, total = used + size, total + size
    flush()
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for i, file in enumerate(files):
        (partial / f"part-{i}").rename(partial / file)
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (partial / f"model{INDEX_END}").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    with suppress(ValueError):
        wide.remove("lm_head")
    return ["lm_head", *wide]


def pack_tensors(prefix: str, weight: Tensor, group_size: int) -> dict[str, Tensor]:
    """Return a weight as compressed-tensors stores it: eight codes per int32, the first one in the lowest bits."""
    quantised = quantize_int4(weight, Int4Options(group_size))
    return {
        f"{prefix}weight_packed": quantised.codes.contiguous().view(torch.int32),
        f"{prefix}weight_scale": quantised.scale,
        f"{prefix}weight_shape": torch.tensor(weight.shape),
    }


def _config(group_size: int, ignored: list[str]) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    layout = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return {**layout, "config_groups": {"group_0": group}, "ignore": ignored, "kv_cache_scheme": None}
