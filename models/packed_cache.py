"""Packed weights of linear layers in one file, which a later start maps instead of packing the checkpoint again."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..callers.errors import CheckpointError
from ..checkpoints.weight_files import DTYPE_NAMES, file_headers, file_metadata, read_file
from ..kernels.linear.groups import GroupPanels, GroupPanelWeight
from ..kernels.linear.panels import Panels, layout
from .layers.linear import Linear

_ALIGNMENT = 64  # bytes; the first tensor begins at a multiple of it
_KEY = "sensorium"
_log = logging.getLogger(__name__)


def restore_packed(root: nn.Module, file: Path) -> set[str]:
    """Give layers of `root` their packed weights from the file; their tensors in the checkpoint are then skipped.

    Returns:
        The paths of these layers: none if the file is missing, broken or of other layers.
    """
    layers = {path: module for path, module in root.named_modules() if isinstance(module, Linear)}
    try:
        stored = json.loads(file_metadata(file)[_KEY]) if file.is_file() else {}
        sizes = {name: header.nbytes for name, header in file_headers(file).items()} if stored else {}
        fitting = {path for path in stored if path in layers and _fits(path, layers[path], stored[path], sizes)}
        tensors = dict(read_file(file, lambda name: name.rpartition(":")[0] not in fitting)) if fitting else {}
        made = {path: _join(path, stored[path], tensors) for path in fitting}
    except (CheckpointError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        _log.warning("%s is not used and will be written again: %s", file, error)
        return set()
    for path, packed in made.items():
        layers[path].restore(path, packed)
    return set(made)


def save_packed(root: nn.Module, file: Path, saved: set[str]) -> None:
    """Write the packed weights of all layers, unless all of them are `saved`. The file appears when it is complete.

    Weights without C++ kernels are left out. If the folder cannot be written, that is logged.
    """
    layers = {path: _split(packed) for path, packed in _packed_layers(root)}
    if layers.keys() <= saved:
        return
    tensors = {f"{path}:{name}": tensor for path, (_, parts) in layers.items() for name, tensor in parts.items()}
    partial = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        with open(handle, "wb") as opened:
            opened.write(_header(tensors, {path: numbers for path, (numbers, _) in layers.items()}))
            for tensor in tensors.values():
                opened.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        os.replace(partial, file)
    except (OSError, ValueError) as error:  # ValueError: a name that the file system cannot encode
        _log.warning("packed weights cannot be kept in %s: %s", file.parent, error)
        if partial is not None:
            Path(partial).unlink(missing_ok=True)


def _packed_layers(root: nn.Module) -> Iterator[tuple[str, Panels | GroupPanelWeight]]:
    for path, module in root.named_modules():
        packed = getattr(module, "packed", None) if isinstance(module, Linear) else None
        if isinstance(packed, Panels | GroupPanelWeight):
            yield path, packed


def _header(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> bytes:
    """Return the beginning of a safetensors file. It is written by hand, since `save_file` copies all tensors first."""
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(numbers)}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _split(packed: Panels | GroupPanelWeight) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the numbers and the tensors of a packed weight."""
    parts: list[Any] = list(packed.panels) if isinstance(packed, GroupPanelWeight) else [packed]
    tensors, numbers = dict[str, Tensor](), list[dict[str, int]]()
    for i, part in enumerate(parts):
        values = {field.name: getattr(part, field.name) for field in fields(part)}
        tensors |= {f"{i}.{name}": value for name, value in values.items() if isinstance(value, Tensor)}
        numbers.append({name: value for name, value in values.items() if isinstance(value, int)})
    return {"int8_rows": getattr(packed, "int8_rows", None), "parts": numbers}, tensors


def _fits(path: str, layer: Linear, stored: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
    """Return whether a stored weight has the outputs and the bytes that the layer will have."""
    start = f"{path}:"
    size = sum(count for name, count in sizes.items() if name.startswith(start))
    weight_bytes = layer.packed_bytes(torch.device("cpu")) - (0 if layer.bias is None else layer.bias.nbytes)
    return size == weight_bytes and sum(part["outputs"] for part in stored["parts"]) == layer.outputs


def _join(path: str, stored: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Panels | GroupPanelWeight:
    """Put a packed weight together again."""
    parts = list[Any]()
    for i, numbers in enumerate(stored["parts"]):
        kind: Any = Panels if stored["int8_rows"] is None else GroupPanels
        values = {field.name: tensors.get(f"{path}:{i}.{field.name}") for field in fields(kind)} | numbers
        if kind is Panels:
            values["form"] = layout(values["weight"].dtype)
        parts.append(kind(**values))
    return parts[0] if stored["int8_rows"] is None else GroupPanelWeight(parts, stored["int8_rows"])
