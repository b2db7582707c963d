"""Checkpoint files to a model's tensors: streamed, renamed, checked. Knows no architecture."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from ..kernels.int8 import supported
from ..mm.errors import CheckpointError, ConfigError
from .interface import Model
from .layers.adapter import tensor_name
from .layers.basic import Form, Weighted
from .layers.linear import Head, Linear
from .upload import copier

_CPU = torch.device("cpu")
_MAPPED_BYTES = 64 << 20
_PATIENCE = 2.0  # seconds without a progress bar
_STEMS = ("model", "consolidated")  # of the Hub's layout, and of a publisher's own


def read_checkpoint(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor, one at a time, from one file or from shards; CheckpointError names a missing or broken file."""
    for file in _files(folder):
        yield from _read(file)


def read_adapter(folder: Path, name: str) -> Iterator[tuple[str, Tensor]]:
    """Those of an adapter in the layout of peft, by the names of what they are added to; see `layers.adapter.tensor_name`."""
    for stored, tensor in _read(folder / name / "adapter_model.safetensors"):
        stem, cut, letter = stored.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        yield tensor_name(stem, letter, name) if cut else stored, tensor


def _read(file: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            names = deque(tensors.keys())
        while names:  # the file stays mapped, and its pages in memory, only for so many bytes
            with safe_open(file, framework="pt") as tensors:
                seen = 0
                while names and seen < _MAPPED_BYTES:
                    name = names.popleft()
                    tensor = tensors.get_tensor(name)
                    seen += tensor.nbytes
                    yield name, tensor
                    del tensor
    except FileNotFoundError:
        raise CheckpointError(f"{file.name} is missing from {file.parent}; download it again") from None
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not readable safetensors ({error}); download it again") from None


def _files(folder: Path) -> list[Path]:
    for stem in _STEMS:
        single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
        if single.exists():
            return [single]
        if index.exists():
            return _shards(index)
    raise CheckpointError(f"{folder} holds neither model.safetensors nor an index of its shards; only safetensors are read")


def _shards(index: Path) -> list[Path]:
    try:
        shards = json.loads(index.read_text("utf-8"))["weight_map"].values()
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{index} is no index of shards; download it again") from None
    outside = [name for name in shards if Path(str(name)).name != name]
    if outside:
        raise CheckpointError(f"{index} names {outside[0]!r}; shards lie beside it, under plain names")
    return [index.parent / name for name in sorted(set(shards))]


def load(folder: Path, model: Model, quantization: str | None = None) -> None:
    """Fill `model` and its adapters from a folder, with a progress bar for who waits at a terminal.

    CheckpointError as `fill` and `read_checkpoint` say, ConfigError as `quantize` says.
    """
    if quantization is not None:
        assert isinstance(model, nn.Module)
        quantize(model, quantization)
    adapters = (read_adapter(folder, name) for name in model.adapters)
    model.load_weights(_shown(chain(read_checkpoint(folder), *adapters), _files(folder)))


def _shown(weights: Iterable[tuple[str, Tensor]], files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """The bar is there once it has taken seconds, and never where the output is no terminal."""
    from tqdm import tqdm

    total = sum(file.stat().st_size for file in files if file.exists())
    with tqdm(total=total, desc="Reading weights", unit="B", unit_scale=True, delay=_PATIENCE, disable=None) as bar:
        for name, tensor in weights:
            yield name, tensor
            bar.update(tensor.nbytes)


def quantize(root: nn.Module, quantization: str) -> None:
    """Have every linear layer, towers included, packed as `quantization` says ("int8", "fp8"), those that are exact excepted.

    Raises:
        ConfigError: the model's device has no fast products of 8-bit numbers.
    """
    for module in root.modules():
        if isinstance(module, Linear) and not module.exact:
            assert module.weight is not None, "weights are packed already"
            if quantization == "int8" and not supported(module.weight.device):
                raise ConfigError(
                    f"quantization={quantization!r} needs a CPU with avx512_vnni, or a GPU and Triton, not this "
                    f"{module.weight.device.type}: leave it out, or use device='cpu' on such a machine"
                )
            module.quantization = quantization


def named_layers(root: nn.Module) -> dict[str, tuple[Weighted, dict[str, Tensor]]]:
    """Canonical name -> its layer and all views of that layer by name; slices take the place of the layer's own name."""
    found: dict[str, tuple[Weighted, dict[str, Tensor]]] = {}
    for path, module in root.named_modules():
        if isinstance(module, Weighted):
            views = dict(module.tensors(path))
            found.update(dict.fromkeys(views, (module, views)))
    return found


def rename(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    """The canonical name: the first prefix that matches is replaced."""
    return next((new + name[len(old) :] for old, new in prefixes if name.startswith(old)), name)


def fill(
    root: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    prefixes: Sequence[tuple[str, str]],
    aliases: Mapping[str, str],
    ignored: tuple[str, ...] = (),
    kept: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Copy every tensor to its place, pack each layer once it is complete, check that none is missing or left over.

    Memory is touched only when a tensor arrives and the original goes when its layer is packed: one layer is held twice.
    To a GPU it goes by `upload`, and is packed there.

    Args:
        prefixes: (as stored, canonical) prefixes, the first match wins.
        aliases: canonical name that may be stored beside -> name of the tensor it repeats (a tied head).
        ignored: beginnings of canonical names of tensors that are left where they are.
        kept: those of tensors that are handed back, as they are stored, by their canonical names.

    Raises:
        CheckpointError: missing, surplus or misshapen tensors, the first few by name.
    """
    wanted, surplus, spare = named_layers(root), [], {}
    copy = copier(next((view.device for _, views in wanted.values() for view in views.values()), _CPU))
    forms = dict(form for path, module in root.named_modules() if isinstance(module, Weighted) for form in module.forms(path))
    for stored, whole in weights:
        name = rename(stored, prefixes)
        if name.startswith(kept):
            spare[name] = whole
        if name.startswith((*kept, *ignored)):
            continue
        for part, tensor in _parts(stored, whole, forms[name]) if name in forms else [(name, whole)]:
            if part in wanted:
                _put(tensor, stored, part, *wanted[part], copy)
            elif part not in aliases and not part.endswith("rotary_emb.inv_freq"):
                surplus.append(stored)
    _complain("lacks", {name for _, views in wanted.values() for name in views})
    _complain("holds unknown", surplus)
    for module in root.modules():
        if isinstance(module, Head):
            module.pack()
        elif isinstance(module, Weighted):
            module.filled()
    return spare


def _parts(stored: str, whole: Tensor, form: Form) -> list[tuple[str, Tensor]]:
    """Of a tensor that is stored in another way; CheckpointError for one that is of no such shape."""
    try:
        return list(form(whole))
    except (IndexError, ValueError, RuntimeError):
        raise CheckpointError(f"{stored} has shape {list(whole.shape)}, which is not what the config wants") from None


def _put(
    tensor: Tensor, stored: str, name: str, layer: Weighted, views: dict[str, Tensor], copy: Callable[[Tensor, Tensor], object]
) -> None:
    """Copy to the view of this name and pack the layer if it was the last one."""
    if name not in views:
        raise CheckpointError(f"the checkpoint holds {stored} twice, under its old and its new name")
    target = views.pop(name)
    if tensor.numel() != target.numel() or (tensor.ndim <= 2 and tensor.shape != target.shape):
        raise CheckpointError(f"{stored} has shape {list(tensor.shape)}, the config wants {list(target.shape)}")
    if not tensor.is_floating_point():
        raise CheckpointError(f"{stored} holds {str(tensor.dtype).removeprefix('torch.')}; quantised weights are not supported")
    copy(target, tensor.reshape(target.shape))
    del target
    if not views:
        layer.pack()


def _complain(verb: str, names: Iterable[str]) -> None:
    found = sorted(names)
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise CheckpointError(f"the checkpoint {verb} {', '.join(found[:3])}{more}; it does not fit its config.json")
