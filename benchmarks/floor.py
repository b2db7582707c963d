"""Lower bound of a workload's time on this machine: products at the measured rate, and linear layers of decode steps.

Everything else (norms, softmax, rotary embeddings, sampling, Python) is left out, so no engine reaches this bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Shapes = list[tuple[int, int]]  # (in, out) of each linear layer


@dataclass(frozen=True)
class Work:
    """The work of a workload: `patches` has one entry per encoded image, `prompts` one per prompt.

    prompts: (computed tokens, tokens that the last of them attends to).
    steps: (decode steps, rows in each).
    """

    patches: list[int]
    prompts: list[tuple[int, int]]
    steps: tuple[int, int]


def best(run: Callable[[], object], seconds: float = 1.0) -> float:
    """Return the seconds of the fastest run within the time given."""
    run()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def tower_shapes(c: dict[str, Any]) -> tuple[Shapes, Shapes]:
    """Return the linear layers applied to every patch, and those applied to merged patches."""
    width, inner, merge = c["hidden_size"], c["intermediate_size"], c.get("spatial_merge_size", 2) ** 2
    patch = 3 * c.get("temporal_patch_size", 2) * c["patch_size"] ** 2
    block = [(width, 3 * width), (width, width), (width, 2 * inner), (inner, width)]
    wide = width * merge
    return [(patch, width), *block * c["depth"]], [(wide, wide), (wide, c["out_hidden_size"])]


def decoder_shapes(c: dict[str, Any]) -> Shapes:
    """Return all linear layers of the decoder; the head is counted per sampled token."""
    width, inner, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    kv = c["num_key_value_heads"] * (width // heads)
    return [(width, width + 2 * kv), (width, width), (width, 2 * inner), (inner, width)] * c["num_hidden_layers"]


def flops(config: dict[str, Any], work: Work) -> float:
    """Count operations of vision tower and prompts: linear layers and both attention products (windowed, causal)."""
    vision, text = config["vision_config"], config["text_config"]
    every, merged = tower_shapes(vision)
    full, merge = len(vision["fullatt_block_indexes"]), vision.get("spatial_merge_size", 2) ** 2
    window = (vision["window_size"] // vision["patch_size"]) ** 2
    total = 0.0
    for n in work.patches:
        total += 2 * n * _weights(every) + 2 * n / merge * _weights(merged)
        total += 4 * n * vision["hidden_size"] * (full * n + (vision["depth"] - full) * min(n, window))
    for rows, seen in work.prompts:
        total += 2 * rows * _weights(decoder_shapes(text)) + 2 * text["hidden_size"] * text["vocab_size"]
        total += 4 * rows * (seen - rows / 2) * text["hidden_size"] * text["num_hidden_layers"]
    return total


def _weights(shapes: Shapes) -> int:
    return sum(a * b for a, b in shapes)


def gemm_rate(rows: int = 4096, size: int = 2048) -> float:
    """Measure bfloat16 operations per second of a large matrix product with prepacked weights."""
    import torch
    from sensorium.kernels.linear import linear, pack

    packed = pack(torch.randn(size, size).bfloat16(), None)
    x = torch.randn(rows, size).bfloat16()
    return 2 * rows * size * size / best(lambda: linear(x, packed))


def step_seconds(config: dict[str, Any], rows: int) -> float:
    """Measure the linear layers and head of one decode step, with as many prepacked weights as the model has."""
    import torch
    from sensorium.kernels.linear import linear, pack

    text = config["text_config"]
    shapes = [*decoder_shapes(text), (text["hidden_size"], text["vocab_size"])]
    layers = [(torch.randn(rows, a).bfloat16(), pack(torch.randn(b, a).bfloat16(), None)) for a, b in shapes]
    return best(lambda: [linear(x, packed) for x, packed in layers])


def floor(config: dict[str, Any], works: dict[str, Work]) -> dict[str, float]:
    """Return the lower bound in seconds of each workload."""
    rate = gemm_rate()
    steps = {rows: step_seconds(config, rows) for rows in {work.steps[1] for work in works.values()}}
    return {name: flops(config, work) / rate + work.steps[0] * steps[work.steps[1]] for name, work in works.items()}
