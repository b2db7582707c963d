"""AWQ: scales that make inputs with large values more exact in 4 bits, chosen with the activations of calibration prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ...kernels.int4 import Int4Options, quantize_int4
from ...mm.errors import ConfigError
from ...models.text.decoder import DecoderLayer
from ...models.text.scaling import Folding, ScalingGroup, decoder_layers, foldings, scaling_groups
from ..llm import LLM
from ..sampling_params import SamplingParams

_ROWS = 512  # activations kept of each group to compare products
_STEPS = 20  # exponents that are tried
_TOKENS = 64  # of each sample that the model writes itself
_MAX_SAMPLES = 65536


@dataclass(frozen=True)
class Calibration:
    """Prompts whose activations choose the scales.

    Args:
        samples: how many prompts are used, 1 to 65536.
        prompts: as `LLM.generate` takes them, or lists of messages as `LLM.chat` takes them. None: the model writes them.
    """

    samples: int = 128
    prompts: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= _MAX_SAMPLES:
            raise ConfigError(f"samples={self.samples} must be from 1 to {_MAX_SAMPLES}", param="samples")
        if self.prompts is not None and not self.prompts:
            raise ConfigError("there are no calibration prompts; give at least one, or leave them out", param="prompts")


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


@contextmanager
def _observing() -> Iterator[dict[DecoderLayer, list[_Inputs]]]:
    """Collect the inputs of all scaling groups of the models that run in this context, by layer in the order of their calls."""
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
        yield layers
    finally:
        handle.remove()


def collect_inputs(model: str, calibration: Calibration) -> list[list[_Inputs]]:
    """Run the prompts. Return the inputs of the groups of each decoder layer."""
    with LLM(model, max_num_seqs=16, enable_prefix_caching=False) as llm:
        prompts = calibration.prompts or _write_prompts(llm, calibration.samples)
        first = SamplingParams(temperature=0.0, max_tokens=1)
        chats = [prompt for prompt in prompts[: calibration.samples] if _is_chat(prompt)]
        others = [prompt for prompt in prompts[: calibration.samples] if not _is_chat(prompt)]
        with _observing() as layers:
            if chats:
                llm.chat(chats, first, use_tqdm=False, on_error="raise")
            if others:
                llm.generate(others, first, use_tqdm=False, on_error="raise")
    return list(layers.values())


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)


def _write_prompts(llm: LLM, count: int) -> list[Any]:
    """Sample texts from the model, each after another single character."""
    starts = [chr(ord("A") + i % 26) for i in range(count)]
    params = [SamplingParams(temperature=1.0, max_tokens=_TOKENS, seed=i) for i in range(count)]
    outputs = llm.generate(starts, params, use_tqdm=False, on_error="raise")
    return [start + output.outputs[0].text for start, output in zip(starts, outputs, strict=True)]


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
        (group, seen)
        for layer, several in zip(decoder_layers(root), inputs, strict=True)
        for group, seen in zip(scaling_groups(layer), several, strict=True)
    ]
    group_of: dict[str, int] = {}
    waiting: dict[int, set[str]] = {}
    for i, (group, _) in enumerate(pairs):
        waiting[i] = {name for linear in group.linears for name in linear.weight_names(paths[linear])}
        group_of.update(dict.fromkeys(waiting[i], i))
    held, scaled, stored = defaultdict[int, list[Tensor]](list), list[tuple[ScalingGroup, Tensor]](), set[str]()
    for name, tensor in weights:
        stored.add(name)
        i = group_of.get(name, -1)
        if i < 0:
            continue
        waiting[i].discard(name)
        if name in quantised:
            held[i].append(tensor)
        if not waiting[i] and (parts := held.pop(i, [])):
            group, seen = pairs[i]
            scaled.append((group, _best_scales(group, seen, parts, group_size)))
    complete = [(group, scales) for group, scales in scaled if _names(group.source, paths) <= stored]
    return foldings(root, complete)


def _names(layer: Any, paths: Mapping[nn.Module, str]) -> set[str]:
    return {name for name, _ in layer.tensors(paths[layer])}


def _best_scales(group: ScalingGroup, seen: _Inputs, weights: Sequence[Tensor], group_size: int) -> Tensor:
    """Return the scales `[inputs]` with the smallest squared error of the products: a power of the inputs' mean magnitude."""
    mean, x = group.shared(seen.mean).clamp_(min=1e-4), seen.rows.float()
    best, least = torch.ones_like(seen.mean), float("inf")
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
