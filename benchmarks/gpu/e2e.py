"""Measure engines around models of published shapes with random weights on the device: decode, prefill, vision towers."""

from __future__ import annotations

import gc
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from sensorium.engine.config import EngineConfig
from sensorium.engine.core.engine_core import EngineCore
from sensorium.engine.model_files import resolve
from sensorium.engine.sampling_params import SamplingParams
from sensorium.engine.setup.loader import build_core
from sensorium.engine.setup.memory import MaxSizes
from sensorium.engine.types import EngineRequest
from sensorium.engine.worker.encoder_graphs import EncoderGraphs
from sensorium.engine.worker.encoder_store import EncoderStore
from sensorium.engine.worker.model_runner import RunnerOptions
from sensorium.models.decoder_model import DecoderModel
from sensorium.models.registry import find_architecture
from sensorium.models.weights import named_layers

from . import shapes
from .machine import Bench, of_host
from .parts import Made
from .record import Figure, Lacks

PROMPT = 8192
"""Tokens of the measured prompt."""
KEYS = 1024
"""Tokens of each sequence before the measured decode steps."""
_SWITCHES = ((True, True), (False, True), (True, False), (False, False))  # steps overlap, graphs; all on first
_SPARE = 20 << 30  # bytes beside the weights: caches, activations


def qwen2_5_vl(bench: Bench) -> Iterator[Made]:
    return _model(bench, shapes.qwen2_5_vl(bench.tiny))


def qwen3_vl(bench: Bench) -> Iterator[Made]:
    return _model(bench, shapes.qwen3_vl(bench.tiny))


def _model(bench: Bench, config: Mapping[str, Any]) -> Iterator[Made]:
    ways = [(batch, *switches) for batch in bench.pick((1, 64), (1, 3)) for switches in _SWITCHES]
    decodes = [partial(decode, batch=batch, overlaps=overlaps, graphs=graphs) for batch, overlaps, graphs in ways]
    return of_model(bench, config, build, [tower, image, prompts, *decodes])


def of_model(
    bench: Bench,
    config: Mapping[str, Any],
    make: Callable[..., Any],
    wanted: Iterable[Callable[..., Figure] | Callable[..., Iterator[Figure]]],
) -> Iterator[Made]:
    """Measure how long a model takes to build, then run each measurement with (bench, model, config)."""
    need_memory(bench, config)
    start = time.perf_counter()
    model = make(bench, config)
    bench.sync()
    yield Figure("model made and filled on the device", time.perf_counter() - start, "s")
    yield from (partial(one, bench, model, config) for one in wanted)


def need_memory(bench: Bench, config: Mapping[str, Any]) -> None:
    """Raise Lacks if the weights and the memory beside them do not fit."""
    if not bench.cuda:
        return
    sums, free = shapes.decoder(config), torch.cuda.mem_get_info(bench.device)[0]
    wanted = 2 * (sums.linear + 2 * sums.head) + _SPARE
    if free < wanted:
        raise Lacks(f"memory: {wanted / 2**30:.0f} GiB are needed, {free / 2**30:.0f} GiB are free")


def build(bench: Bench, config: Mapping[str, Any]) -> DecoderModel:
    """Make the family's model with small random weights."""
    kind = resolve(find_architecture(config["architectures"][0]).model)
    model = cast(DecoderModel, kind(config, bench.dtype, bench.device))
    shapes_ = {name: view.shape for _, views in named_layers(model).values() for name, view in views.items()}
    torch.manual_seed(0)
    with torch.inference_mode():
        model.load_weights((name, _random(bench, name, shape)) for name, shape in shapes_.items())
    return model


def _random(bench: Bench, name: str, shape: torch.Size) -> torch.Tensor:
    if len(shape) == 1:
        return bench.randn(*shape) * 0.01 + (1.0 if name.endswith("weight") else 0.0)
    return bench.randn(*shape) * 0.02


def engine(bench: Bench, model: DecoderModel, seqs: int, length: int, rows: int, overlaps: bool, graphs: bool) -> EngineCore:
    """Make an engine for `seqs` sequences of `length` tokens and steps of at most `rows`, without a prefix cache."""
    gc.collect()  # of the engine before, its caches
    config = EngineConfig(
        "random",
        device=str(bench.device),
        max_num_seqs=seqs,
        max_num_batched_tokens=rows,
        kv_cache_memory_bytes=bench.pick(12 << 30, 64 << 20),
        enable_prefix_caching=False,
        async_scheduling=overlaps,
    )
    store = EncoderStore((), "random", model.row_size, bench.dtype, bench.device)
    core = build_core(model, config, MaxSizes(length, rows, 1 << 20), store, RunnerOptions())
    if not graphs:
        core.executor.runner.decode_graphs = lambda forward, batch: forward(batch)  # type: ignore[assignment]
    return core


def ask(core: EngineCore, name: str, rows: int, tokens: int) -> None:
    """Make a greedy request with a new prompt."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    vocab = core.executor.runner.model.vocab_size
    prompt = torch.randint(0, min(vocab, 280), (rows,), generator=generator).tolist()
    core.add(EngineRequest(name, tuple(prompt), SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), ()))


def prompts(bench: Bench, model: DecoderModel, config: Mapping[str, Any]) -> Figure:
    """Measure one prompt in one step, including its first token."""
    rows = bench.pick(PROMPT, 40)
    core, times = engine(bench, model, 1, rows + 16, rows, False, True), []
    for i in range(bench.pick(4, 2)):
        ask(core, f"prompt {i}", rows, 1)
        bench.sync()
        start = time.perf_counter()
        finish(core)
        bench.sync()
        times.append(time.perf_counter() - start)
    seconds = min(times[1:])
    operations = shapes.decoder(config).prompt(rows)
    note = f"{seconds * 1e3:,.1f} ms, {rows / seconds:,.0f} rows/s, first call {times[0]:.1f} s"
    return Figure(f"prompt of {rows} rows", operations / seconds / bench.matmul, bench.ceiling, 0.55, note=note)


def decode(bench: Bench, model: DecoderModel, config: Mapping[str, Any], batch: int, overlaps: bool, graphs: bool) -> Figure:
    """Measure decode steps of `batch` tokens; the figure is the time to read their bytes at copy bandwidth over their time."""
    keys, warm, count = bench.pick((KEYS, 8, 48), (20, 4, 4))
    core = engine(bench, model, batch, keys + warm + count + 64, bench.pick(8192, 64), overlaps, graphs)
    for i in range(batch):
        ask(core, f"sequence {i}", keys, warm + count + 60)
    start = time.perf_counter()
    while min(len(request.token_ids) for request in core.scheduler.requests.values()) < keys + warm:
        _step(core)
    bench.sync()
    first = time.perf_counter() - start
    seconds = _steps(bench, core, count)
    ways = f"graphs: {recorded(core)}, {core.stats.steps_ahead} of {core.stats.steps} steps ahead"
    for request in list(core.scheduler.requests):
        core.abort(request)
    floor = shapes.decoder(config).step(batch, keys + warm + count // 2, bench.dtype.itemsize) / bench.copy
    name = f"decode, batch {batch}, overlapping {_word(overlaps)}, graphs {_word(graphs)}"
    note = f"{seconds * 1e3:.2f} ms a step, {batch / seconds:,.0f} tokens/s, floor {floor * 1e3:.2f} ms"
    note += f", warm-up {first:.1f} s; {ways}"
    return Figure(name, floor / seconds, "of bandwidth floor", 0.75 if overlaps and graphs else None, note=note)


def _steps(bench: Bench, core: EngineCore, count: int) -> float:
    """Return the mean seconds of a step, as the median of three runs."""
    each, times = max(1, count // 3), []
    for _ in range(3):
        bench.sync()
        start = time.perf_counter()
        for _ in range(each):
            _step(core)
        times.append((time.perf_counter() - start) / each)
    return statistics.median(times)


def tower(bench: Bench, model: DecoderModel, config: Mapping[str, Any]) -> Figure:
    """Measure the encoder on images of one size, from patches to embeddings."""
    side, count = bench.pick(64, 8), bench.pick(4, 2)
    tensors = _pixels(bench, config, side, count)
    with torch.inference_mode():
        seconds = bench.seconds(lambda: model.embed_multimodal("image", tensors))
    operations = count * shapes.tower(config, side)
    note = f"{seconds * 1e3:,.1f} ms, {count * side**2 / seconds:,.0f} patches/s"
    name = f"tower, {count} x {side} x {side} patches"
    return Figure(name, operations / seconds / bench.matmul, bench.ceiling, 0.50, note=note)


def image(bench: Bench, model: DecoderModel, config: Mapping[str, Any]) -> Iterator[Figure]:
    """Measure one small image, launched kernel by kernel and as a CUDA graph, launch time included."""
    side, graphs, encode = bench.pick(32, 8), EncoderGraphs(bench.device), model.embed_multimodal
    seen, tensors = _pixels(bench, config, side, 1), _pixels(bench, config, side, 1)
    with torch.inference_mode():
        for _ in range(2):
            graphs(encode, "image", seen)
        pairs = zip(graphs(encode, "image", tensors), encode("image", tensors), strict=True)
        wrong = sum(not torch.equal(replayed, launched) for replayed, launched in pairs)
        launched = of_host(lambda: (encode("image", tensors), bench.sync()), bench.pick(20, 2))
        replayed = of_host(lambda: (graphs(encode, "image", tensors), bench.sync()), bench.pick(20, 2))
    name, operations = f"an image of {side} x {side} patches alone", shapes.tower(config, side)
    yield Figure(f"{name}, rows unlike those not replayed", wrong, "items", most=0)
    for word, seconds in (("on", replayed), ("off", launched)):
        share = operations / seconds / bench.matmul
        yield Figure(f"{name}, graphs {word}", share, bench.ceiling, note=f"{seconds * 1e3:.2f} ms")


def _pixels(bench: Bench, config: Mapping[str, Any], side: int, count: int) -> dict[str, torch.Tensor]:
    """Make encoder inputs for `count` images of `side` x `side` patches."""
    vision = config["vision_config"]
    numbers = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    grids = torch.tensor([[1, side, side]] * count)
    return {"pixel_values": bench.randn(count * side**2, numbers), "image_grid_thw": grids}


def recorded(core: EngineCore) -> int:
    """Return the recorded decode steps, which are replayed from now on."""
    return sum(graph is not None for graph in getattr(core.executor.runner.decode_graphs, "_graphs", {}).values())


def finish(core: EngineCore) -> None:
    while core.scheduler.requests:
        _step(core)


def _step(core: EngineCore) -> None:
    for output in core.step().outputs:
        if output.error is not None:
            raise RuntimeError(f"{output.request_id}: {output.error}")


def _word(on: bool) -> str:
    return "on" if on else "off"
