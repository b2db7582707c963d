"""Measure the real memory of tensors and calls."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from sensorium.models.interface import StepLimits
from sensorium.models.weights import fill, named_layers

Made = TypeVar("Made", bound=torch.nn.Module)
CPU = torch.device("cpu")


def filled(model: Made) -> Made:
    """Fill the model with random weights, pack them, and return the model."""
    draw = torch.Generator().manual_seed(0)
    views = dict(view for _, layers in named_layers(model).values() for view in layers.items())
    weights = [(name, torch.randn(view.shape, generator=draw).to(view.dtype)) for name, view in views.items()]
    fill(model, weights, ())
    return model


def held(root: Any) -> int:
    """Return the bytes of all tensors that a model holds, in modules, lists, tuples, dicts and dataclasses.

    Each storage counts once. Weights in oneDNN's layout have no storage and count by object.
    """
    seen, sizes = set[int](), dict[object, int]()

    def look(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor) and not value.is_meta:
            if value.layout == torch.strided:
                sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            else:
                sizes["oneDNN", id(value)] = value.numel() * value.itemsize
        elif isinstance(value, dict | list | tuple | set):
            for entry in value.values() if isinstance(value, dict) else value:
                look(entry)
        elif isinstance(value, torch.nn.Module) or hasattr(value, "__dataclass_fields__"):
            look(vars(value))

    look(root)
    return sum(sizes.values())


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the peak bytes of tensors created during a call, from the profiler; calls it twice."""
    with torch.inference_mode():
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            call()
    events = [(e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    return int(np.cumsum([size for _, size in sorted(events)]).max())


def kept_bytes(call: Callable[[], Any]) -> int:
    """Return the bytes of tensors that a call makes and its result holds; calls it twice."""
    with torch.inference_mode():
        call()
        before = _storages()
        kept = call()
        found = _storages()
    assert kept is not None
    return sum(size for place, size in found.items() if place not in before)


def _storages() -> dict[int, int]:
    """Return the bytes of the storage of each tensor that is alive, by address."""
    gc.collect()
    dense = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.device == CPU and one.layout == torch.strided]
    storages = [one.untyped_storage() for one in dense]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@contextmanager
def allocating_at_most(size: int) -> Iterator[None]:
    """Fail if Python (numpy included) allocates more than `size` bytes inside the context, as slow algorithms would."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= size


def given_bytes(*values: Any) -> int:
    """Return the bytes of all tensors in these values, nested ones included, each counted once."""
    seen: dict[int, int] = {}

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            seen[value.data_ptr()] = value.numel() * value.itemsize
        elif isinstance(value, list | tuple):
            for entry in value:
                look(entry)
        elif isinstance(value, dict):
            look(list(value.values()))

    look(list(values))
    return sum(seen.values())


@contextmanager
def measured_steps(model: Any) -> Iterator[list[tuple[str, int, int]]]:
    """Yield a list that gets (what, planned, live) bytes of each forward pass ("forward") and encoder call (its modality)."""
    forward, encode, found = model.forward, model.embed_multimodal, list[tuple[str, int, int]]()

    def spy_forward(batch: Any) -> torch.Tensor:
        lengths = max((attn.seq_lens for attn in batch.attn), key=sum)
        read = 0 if batch.cross_rows is None else len(batch.cross_rows)
        work = StepLimits(len(batch.input_ids), sum(lengths), max(lengths), CPU, cross_keys=read)
        given = given_bytes(batch.input_ids, batch.positions, batch.embed_index, batch.embed_rows, batch.attn[0].slot_mapping)
        given += given_bytes(batch.cross_rows, batch.adapters)
        found.append(("forward", model.forward_bytes(work), given + peak_bytes(lambda: forward(batch))))
        result: torch.Tensor = forward(batch)
        return result

    def spy_encode(modality: str, tensors: Any) -> list[torch.Tensor]:
        rows: list[torch.Tensor] = encode(modality, tensors)
        planned = model.encoder_bytes(modality, sum(map(len, rows)), StepLimits(1, 1, 1, CPU))
        found.append((modality, planned, given_bytes(dict(tensors)) + peak_bytes(lambda: encode(modality, tensors))))
        return rows

    model.forward, model.embed_multimodal = spy_forward, spy_encode
    try:
        yield found
    finally:
        del model.forward, model.embed_multimodal
