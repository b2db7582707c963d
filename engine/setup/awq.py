"""AWQ: scales that make inputs with large values more exact in 4 bits, chosen with the activations of calibration prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ...kernels.linear.int4 import Int4Options, quantize_int4
from ...models.text.decoder import DecoderLayer
from ...models.text.scaling import Folding, ScalingGroup, decoder_layers, foldings, scaling_groups

_ROWS = 512  # activations kept of each group to compare products
_STEPS = 20  # exponents that are tried


class _Inputs:
    """Mean magnitude of a group's input per channel, and some of its rows."""

    def __init__(self) -> None:
        self.rows, self.total, self.count = torch.empty(0), torch.zeros(()), 0
        self.random = torch.Generator().manual_seed(0)

    def add(self, x: Tensor) -> None:
        x = x.detach().cpu()
        self.total, self.count = self.total + x.abs().sum(0, dtype=torch.float32), self.count + len(x)
        rows = torch.cat([self.rows, x]) if len(self.rows) else x
        self.rows = rows[torch.randperm(len(rows), generator=self.random)[:_ROWS]]

    @property
    def mean(self) -> Tensor:
        return self.total / self.count


def collect_inputs(run: Callable[[], object]) -> list[list[_Inputs]]:
    """Return the inputs of the scaling groups of the model that `run` loads and runs in this process, by decoder layer."""
    layers, targets = dict[DecoderLayer, list[_Inputs]](), dict[nn.Module, _Inputs]()

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, DecoderLayer) and module not in layers:
            groups = scaling_groups(module)
            layers[module] = [_Inputs() for _ in groups]
            targets.update((group.linears[0], inputs) for group, inputs in zip(groups, layers[module], strict=True))
        elif module in targets:
            targets[module].add(args[0])

    handle = register_module_forward_pre_hook(note)
    try:
        run()
    finally:
        handle.remove()
    return list(layers.values())


def search_foldings(
    root: nn.Module,
    inputs: Sequence[Sequence[_Inputs]],
    weights: Iterable[tuple[str, Tensor]],
    quantised: set[str],
    group_size: int,
) -> dict[str, Folding]:
    """Search the scales of every group. Return canonical tensor name -> its change.

    Args:
        root: the model on the meta device.
        inputs: of its decoder layers, see `collect_inputs`.
        weights: canonical name -> tensor, all that are stored.
        quantised: canonical names of the weights that become 4 bits.
    """
    paths = {module: path for path, module in root.named_modules()}
    pairs = [
        (group, inputs_of_group)
        for layer, several in zip(decoder_layers(root), inputs, strict=True)
        for group, inputs_of_group in zip(scaling_groups(layer), several, strict=True)
    ]
    group_of: dict[str, int] = {}
    waiting: dict[int, set[str]] = {}
    for i, (group, _) in enumerate(pairs):
        waiting[i] = {name for linear in group.linears for name in linear.weight_names(paths[linear])}
        group_of.update(dict.fromkeys(waiting[i], i))
    kept, scaled, stored = defaultdict[int, list[Tensor]](list), list[tuple[ScalingGroup, Tensor]](), set[str]()
    for name, tensor in weights:
        stored.add(name)
        i = group_of.get(name, -1)
        if i < 0:
            continue
        waiting[i].discard(name)
        if name in quantised:
            kept[i].append(tensor)
        if not waiting[i] and (parts := kept.pop(i, [])):
            group, inputs_of_group = pairs[i]
            scaled.append((group, _best_scales(group, inputs_of_group, parts, group_size)))
    complete = [(group, scales) for group, scales in scaled if _names(group.source, paths) <= stored]
    return foldings(root, complete)


def _names(layer: Any, paths: Mapping[nn.Module, str]) -> set[str]:
    return {name for name, _ in layer.tensors(paths[layer])}


def _best_scales(group: ScalingGroup, inputs: _Inputs, weights: Sequence[Tensor], group_size: int) -> Tensor:
    """Return the scales `[inputs]` with the smallest squared error of the products: a power of the inputs' mean magnitude."""
    mean, x = group.shared(inputs.mean).clamp_(min=1e-4), inputs.rows.float()
    best, least = torch.ones_like(inputs.mean), float("inf")
    for step in range(_STEPS):
        scales = mean ** (step / _STEPS)
        scales = group.spread(scales / (scales.max() * scales.min()).sqrt())
        error = sum(_error(weight, scales, x, group_size) for weight in weights)
        if error < least:
            best, least = scales, error
    return best


def _error(weight: Tensor, scales: Tensor, x: Tensor, group_size: int) -> float:
    wide = weight.float()
    rounded = quantize_int4((wide * scales).to(weight.dtype), Int4Options(group_size)).dequantize().float() / scales
    return float((x @ (rounded - wide).T).square_().sum())
