"""Fills a model with the weights of a checkpoint: tensors are streamed, renamed and checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..callers.errors import CheckpointError, ConfigError, short_repr
from ..callers.heap import trim_heap
from ..checkpoints.external import ExternalWeights
from ..checkpoints.folder import CheckpointFolder
from ..checkpoints.weight_files import drop_pages, read_adapter, read_checkpoint, rename
from ..kernels.linear.blocks import BlockWeight
from ..kernels.linear.grouped import QuantizedWeight, panel_rows
from ..kernels.linear.int4 import Int4Options
from ..kernels.linear.int8 import supported
from .interface import Model
from .layers.basic import Converter, Convertible, EmbeddingTable, WeightedLayer
from .layers.linear import Linear, LmHead
from .layers.moe import Mixture
from .layers.ranks import is_below
from .quantization import parse_quantization
from .stored_formats import Formats, Joiner
from .upload import Copy, copier

Merge = Callable[[Iterable[tuple[str, Tensor]]], Iterable[tuple[str, Tensor]]]

_CPU = torch.device("cpu")
_PROGRESS_DELAY = 2.0  # seconds before a progress bar is shown
_TRIM_BYTES = 16 << 20  # bytes of packed layers after which the heap is trimmed
_BUFFER = "rotary_emb.inv_freq"  # end of the name of a buffer that old checkpoints store


def load(
    folder: Path,
    model: Model,
    merge: Merge | None = None,
    external: Sequence[ExternalWeights] = (),
) -> None:
    """Load `model` and its adapters from a folder, with a progress bar on a terminal.

    Args:
        merge: changes the stored tensors before they are renamed.
        external: parts of the model that are in other folders.

    Raises:
        CheckpointError: as `fill` and `read_checkpoint`.
    """
    stored = getattr(model, "stored_adapters", {})
    adapters = (read_adapter(folder, name) for name in model.adapters if name not in stored)
    others = (part.rename(read_checkpoint(part_folder)) for part, part_folder in external)
    folders = (folder, *(part_folder for _, part_folder in external))
    files = [file for part_folder in folders for file in CheckpointFolder(part_folder).weight_files()]
    weights = _with_progress(chain(read_checkpoint(folder, model.is_unused), *others, *adapters), files)
    model.load_weights(weights if merge is None else merge(weights))


def _with_progress(weights: Iterable[tuple[str, Tensor]], files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Show a progress bar after a few seconds, if the output is a terminal."""
    from tqdm import tqdm

    total = sum(file.stat().st_size for file in files if file.exists())
    with tqdm(total=total, desc="Reading weights", unit="B", unit_scale=True, delay=_PROGRESS_DELAY, disable=None) as bar:
        for name, tensor in weights:
            yield name, tensor
            bar.update(tensor.nbytes)


def quantize(root: nn.Module, quantization: str | Mapping[str, Any]) -> None:
    """Set the format in which each Linear is packed, as the option `quantization` says. `exact` layers are not changed.

    In a quantised checkpoint, only layers are packed whose stored weights the kernels of the format can use.

    Raises:
        ConfigError: the option is invalid, or the model's device has no fast int8 products or no experts in 4 bits.
    """
    formats, stored = parse_quantization(quantization), getattr(root, "formats", None) is not None
    for path, module in root.named_modules():
        if isinstance(module, Mixture) and module.stacked is not None and isinstance(formats.format_of(path), Int4Options):
            raise ConfigError(
                f"<<param=>>{short_repr(quantization)}: experts in 4 bits run on a CPU only; use 'int8' or <<device=>>'cpu'",
                param="quantization",
            )
        if isinstance(module, Linear) and not module.exact and (not stored or module.stores(str(formats.format_of(path)))):
            module.quantization = formats.format_of(path)
            device = module.device
            wider = bool(module.stored_dtypes & {torch.float32, torch.float16}) and module.dtype == torch.bfloat16
            if module.quantization == "int8" and wider and not module.formats and device.type == "cpu":
                module.keep_float32()  # not on a GPU, where weights of experts are views of one tensor
            if module.quantization == "int8" and device.type != "meta" and not supported(device):
                raise ConfigError(
                    f"<<param=>>{short_repr(quantization)} needs a CPU with AVX2 or AVX-512 VNNI, or a GPU and Triton, not "
                    f"this {device.type}: leave it out, or use <<device=>>'cpu' on such a machine",
                    param="quantization",
                )


def keep_float16(root: nn.Module) -> None:
    """Keep stored float16 weights in float16, in layers that compute in float32 and are not quantised."""
    for module in root.modules():
        if isinstance(module, EmbeddingTable):
            module.float16 = module.stored_dtypes <= {torch.float16}
        if isinstance(module, Linear) and module.quantization is None and not module.formats:
            module.quantization = "float16" if module.stored_dtypes <= {torch.float16} else None


def weight_bytes(model: Model, device: torch.device) -> int:
    """Return the bytes of all layers as `pack` lays them out on `device`, and of the tensors of all other modules.

    The latter are constants that are computed, such as rotary frequencies, and what torch's own layers hold.
    """
    assert isinstance(model, nn.Module)
    total = sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
    for module in model.modules():
        if isinstance(module, WeightedLayer | LmHead):
            total += module.packed_bytes(device)
        else:
            total += sum(value.nbytes for value in vars(module).values() if isinstance(value, Tensor))
    return total


def named_layers(root: nn.Module) -> dict[str, tuple[WeightedLayer, dict[str, Tensor]]]:
    """Map each canonical tensor name to its layer and to all tensors of that layer by name (shards are views)."""
    layers: dict[str, tuple[WeightedLayer, dict[str, Tensor]]] = {}
    for path, module in root.named_modules():
        if isinstance(module, WeightedLayer):
            views = dict(module.tensors(path))
            layers.update(dict.fromkeys(views, (module, views)))
    return layers


def fill(
    root: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    prefixes: Sequence[tuple[str, str]],
    ignored: tuple[str, ...] = (),
    absent: Collection[str] = (),
) -> None:
    """Copy every tensor to its layer and pack each layer once it is complete.

    Memory is touched only when a tensor arrives, and the original is freed when its layer is packed: at most one layer is held
    twice. Tensors for a GPU are copied by `upload` and packed there.

    Args:
        prefixes: (stored, canonical) prefixes of names; the first match is replaced.
        ignored: canonical prefixes of tensors that are not used.
        absent: canonical paths of modules that other ranks hold.

    Raises:
        CheckpointError: missing, surplus or misshapen tensors, the first few by name.
    """
    layers, surplus, converters = named_layers(root), [], _converters(root)
    tied = (head for head in root.modules() if isinstance(head, LmHead))
    heads: dict[WeightedLayer, LmHead] = {embedding: head for head in tied for embedding in head.tied_to}
    restored = {name for module in root.modules() if isinstance(module, Linear) for name in module.restored}
    copy = copier(next((view.device for _, views in layers.values() for view in views.values() if not view.is_meta), _CPU))
    filled = 0  # bytes since the heap was trimmed
    for stored, name, whole in _joined(root, weights, prefixes, ignored, absent):
        for part, tensor in _convert(stored, whole, converters[name][1]) if name in converters else [(name, whole)]:
            if part in layers:
                filled += layers[part][1][part].nbytes if part in layers[part][1] else 0
                _put(tensor, stored, part, *layers[part], copy)
                if not layers[part][1]:
                    _pack(layers[part][0], heads)
                    filled = _trimmed(filled)
            elif not part.endswith(_BUFFER) and part not in restored and not is_below(part, absent):
                surplus.append(stored)
    _check_empty("lacks", {name for _, views in layers.values() for name in views})
    _check_empty("holds unknown", surplus)
    for module in root.modules():
        if isinstance(module, WeightedLayer):
            module.after_load()


def check(
    root: nn.Module,
    headers: Iterable[tuple[str, Tensor]],
    prefixes: Sequence[tuple[str, str]],
    ignored: tuple[str, ...] = (),
    absent: Collection[str] = (),
) -> None:
    """Compare names and shapes of stored tensors (from `read_headers`) with the model, before any weight is read.

    Each Linear gets the dtypes of its stored weights.
    The other arguments and the errors are those of `fill`.
    """
    layers = named_layers(root)
    views = {name: views[name] for name, (_, views) in layers.items()}
    missing, surplus, split, converters = set(views), list[str](), set[str](), _converters(root)
    formats, wide = getattr(root, "formats", None) or Formats({}), list[tuple[str, Tensor]]()
    for stored, header in headers:
        if rename(stored, prefixes) in formats.parts:  # `assign` compared its shape
            module, _ = formats.parts[rename(stored, prefixes)]
            experts = formats.stacks[module].modules if module in formats.stacks else ((module,),)
            missing -= {f"{shard}.weight" for shards in experts for shard in shards}
            if f"{module}.weight" in converters and module not in formats.stacks:
                split.add(f"{converters[f'{module}.weight'][0]}.")
        else:
            wide.append((stored, header))
    for stored, name, whole in _joined(root, wide, prefixes, ignored, absent):
        has_shape = bool(prod(whole.shape))  # without a shape it cannot be said what a converter splits the tensor into
        if name in converters and not has_shape:
            path = converters[name][0]
            split.add(f"{path}.")
            if isinstance(module := root.get_submodule(path), WeightedLayer):
                missing -= dict(module.tensors(path)).keys()  # their names may not start with the module's path
            continue
        for part, tensor in _convert(stored, whole, converters[name][1]) if name in converters else [(name, whole)]:
            if part in views:
                missing.discard(part)
                if has_shape:
                    held = layers[part][0].held_part(part, tensor) if isinstance(tensor, Tensor) else tensor
                    _check_shape(stored, held.shape, views[part])
                    _note_dtype(part, tensor, layers[part][0])
            elif not part.endswith(_BUFFER) and not is_below(part, absent):
                surplus.append(stored)
    _check_empty("lacks", (name for name in missing if not name.startswith(tuple(split))))
    _check_empty("holds unknown", surplus)


def _trimmed(filled: int) -> int:
    """Trim the heap if `filled` bytes, those filled since the last trim, are enough. Return the bytes filled since then.

    The originals of packed layers and the temporary buffers of packing leave holes between blocks in use. Later blocks may be
    larger than the holes, so without this the heap grows by several times the bytes of each layer; how much depends on the
    layout of the weights, and so on the CPU, and on the addresses, which differ in each process.
    """
    if filled < _TRIM_BYTES:
        return filled
    trim_heap()
    return 0


def _converters(root: nn.Module) -> dict[str, tuple[str, Converter]]:
    """Return the stored name of each tensor that is converted -> the path of its module, and the converter."""
    modules = [(path, module) for path, module in root.named_modules() if isinstance(module, Convertible)]
    return {name: (path, converter) for path, module in modules for name, converter in module.converters(path)}


def _joined(
    root: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    prefixes: Sequence[tuple[str, str]],
    ignored: tuple[str, ...],
    absent: Collection[str],
) -> Iterator[tuple[str, str, Tensor | QuantizedWeight]]:
    """Yield stored name, canonical name and weight, without ignored ones; the parts of a quantised weight are joined."""
    joiner = Joiner(getattr(root, "formats", None) or Formats({}))
    for stored, tensor in weights:
        name = rename(stored, prefixes)
        if not name.startswith(ignored) and not is_below(name, absent):
            for canonical, weight in joiner.join(name, tensor):
                yield stored, canonical, weight
                del weight
        del tensor


def _convert(stored: str, whole: Tensor | QuantizedWeight, converter: Converter) -> list[tuple[str, Tensor]]:
    """Apply a converter; CheckpointError if it cannot split the shape. Quantised weights are dequantised first."""
    if isinstance(whole, QuantizedWeight):
        whole = whole.dequantize()
    try:
        return list(converter(whole))
    except (IndexError, ValueError, RuntimeError):
        raise CheckpointError(f"{stored} has shape {list(whole.shape)}, which does not fit the config") from None


def _put(
    tensor: Tensor | QuantizedWeight, stored: str, name: str, layer: WeightedLayer, views: dict[str, Tensor], copy: Copy
) -> None:
    """Copy the tensor into the layer's view of this name."""
    if name not in views:
        raise CheckpointError(f"the checkpoint holds {stored} twice, under its old and its new name")
    target = views.pop(name)
    if isinstance(tensor, QuantizedWeight):
        _put_quantized(tensor, stored, name, layer, target, copy)
        return
    tensor = layer.held_part(name, tensor)
    _check_shape(stored, tensor.shape, target)
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{stored} holds {kind}: it is quantised, and config.json does not say how")
    else:
        copy(target, tensor.reshape(target.shape))
        drop_pages(tensor)


def _put_quantized(weight: QuantizedWeight, stored: str, name: str, layer: WeightedLayer, target: Tensor, copy: Copy) -> None:
    """Give the layer the parts of a quantised weight that it holds, in floats if it is not quantised itself."""
    parts = layer.held_parts(name, weight) if isinstance(layer, Linear) else [weight]
    _check_shape(stored, (sum(part.shape[0] for part in parts), weight.shape[1]), target)
    if isinstance(layer, Linear) and layer.formats:
        if not isinstance(weight, BlockWeight) or layer.device.type != "cpu":  # else its blocks stay in the mapped file
            parts = [part.map(lambda tensor: _moved(tensor, layer.device, copy)) for part in parts]
        layer.hold(name, parts)
        return
    start, each = 0, panel_rows(weight.inputs)
    for part in parts:
        for first in range(0, part.shape[0], each):
            panel = part.dequantize(first, min(first + each, part.shape[0]))
            copy(target[start : start + len(panel)], panel)
            start += len(panel)


def _pack(layer: WeightedLayer, heads: Mapping[WeightedLayer, LmHead]) -> None:
    """Pack a layer whose tensors are there, and the head that is tied to it, so that the table is not held until the end."""
    layer.pack()
    if layer in heads:
        heads[layer].pack()


def _moved(tensor: Tensor, device: torch.device, copy: Copy) -> Tensor:
    """Return a copy on the device, in memory of its own."""
    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    copy(moved, tensor)
    return moved


def _check_shape(stored: str, shape: Sequence[int], target: Tensor) -> None:
    if prod(shape) != target.numel() or (len(shape) <= 2 and shape != target.shape):
        raise CheckpointError(f"{stored} has shape {list(shape)}, the config needs {list(target.shape)}")


def _note_dtype(name: str, tensor: Tensor | QuantizedWeight, layer: WeightedLayer) -> None:
    """Record the stored dtype of a weight in its Linear or EmbeddingTable."""
    if isinstance(layer, Linear | EmbeddingTable) and isinstance(tensor, Tensor) and name.endswith(".weight"):
        layer.stored_dtypes.add(tensor.dtype)


def _check_empty(verb: str, names: Iterable[str]) -> None:
    """Raise CheckpointError if there are any names."""
    ordered = sorted(names)
    if ordered:
        more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
        raise CheckpointError(f"the checkpoint {verb} {', '.join(ordered[:3])}{more}; it does not fit its config.json")
