"""Replayed decode steps give the same bits as eager ones, and steps that cannot be replayed run eagerly."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu import needs_int8
from oracle import build_checkpoint
from sensorium import LLM, SamplingParams
from sensorium.engine.types import EngineRequest
from sensorium.engine.worker.decode_graphs import _BATCH_SIZES, CaptureConfig, DecodeGraphs, graph_bytes
from sensorium.kernels import native
from sensorium.kernels.graph import CallGraph, CaptureFailed
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.models.interface import CacheSpec, ForwardBatch, StepLimits

needs_library = pytest.mark.skipif(native.library() is None, reason="the C++ kernels are not built")


@pytest.fixture(
    scope="module",
    params=[("float32", None), ("bfloat16", None), pytest.param(("bfloat16", "int8"), marks=needs_int8)],
    ids=str,
)
def llm(request, tmp_path_factory):
    path = build_checkpoint(tmp_path_factory.mktemp("graphs"), "qwen2_5_vl", 3)
    dtype, quantization = request.param
    return LLM(path, max_model_len=1024, dtype=dtype, quantization=quantization)


@pytest.fixture
def replays(monkeypatch) -> list[CallGraph]:
    """Return a list to which each replay appends its graph."""
    found: list[CallGraph] = []
    replay = CallGraph.replay
    monkeypatch.setattr(CallGraph, "replay", lambda graph: (found.append(graph), replay(graph))[1])
    return found


def eager(forward, batch):
    return forward(batch)


def requests(seed: int, count: int, tokens: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    params = [
        SamplingParams(temperature=0.0, max_tokens=rng.randint(1, tokens), ignore_eos=True, logprobs=4) for _ in range(count)
    ]
    return [
        EngineRequest(str(i), tuple(rng.randrange(5, 150) for _ in range(rng.randint(1, 60))), p, ())
        for i, p in enumerate(params)
    ]


def answers(core: Any, asked: list[EngineRequest], every: int) -> dict[str, list[Any]]:
    """Return the log probabilities of all requests; one is added every `every` steps."""
    found: dict[str, list[Any]] = {request.request_id: [] for request in asked}
    waiting, step = list(asked), 0
    while waiting or core.scheduler.requests:
        if waiting and step % every == 0:
            core.add(waiting.pop(0))
        step += 1
        for output in core.step().outputs:
            assert output.error is None
            found[output.request_id] += output.logprobs or ()
    return found


@needs_library
@pytest.mark.parametrize(
    ("blocks", "every", "tokens"), [(400, 1, 40), (400, 9, 60), (40, 1, 60)], ids=["together", "changing", "preempted"]
)
def test_answers_are_the_same_bits(llm, toy, replays, blocks, every, tokens):
    def run(graphs: Any) -> Any:
        core = toy.make_core(blocks=blocks, budget=512, max_len=150, model=llm.engine.loop.core.executor.runner.model)
        core.executor.runner.decode_graphs = graphs
        return answers(core, requests(1, 8, tokens), every), core.scheduler.stats

    expected, stats = run(eager)
    assert not replays
    found, _ = run(DecodeGraphs(torch.device("cpu")))
    assert len(replays) > 10
    assert len(set(replays)) > 1, "of several sizes"
    assert found == expected
    assert blocks > 40 or stats.preemptions > 0


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_caps_and_latent_rows_are_replayed(toy, replays, dtype):
    model = toy.Stack(dtype)

    def run(graphs: Any) -> Any:
        core = toy.make_core(blocks=200, budget=64, max_len=150, model=model)
        core.executor.runner.decode_graphs = graphs
        asked = [replace(r, prompt_token_ids=tuple(token % 101 for token in r.prompt_token_ids)) for r in requests(1, 6, 40)]
        return answers(core, asked, 5)

    expected = run(eager)
    assert run(DecodeGraphs(torch.device("cpu"))) == expected
    assert len(replays) > 10


def test_a_forward_that_reads_lengths_runs_eagerly(toy, replays):
    core = toy.make_core()
    for i in range(4):
        core.add(toy.make_request(str(i), random.Random(i), max_tokens=20))
    toy.drain(core)
    assert core.executor.runner.decode_graphs._graphs
    assert not any(core.executor.runner.decode_graphs._graphs.values())
    assert not replays


@needs_library
def test_the_number_of_graphs_is_limited(llm, toy):
    core = toy.make_core(blocks=400, budget=512, max_len=150, model=llm.engine.loop.core.executor.runner.model)
    answers(core, requests(2, 8, 60), 7)
    assert len(core.executor.runner.decode_graphs._graphs) == 4


@needs_library
def test_another_forward_or_number_of_threads_has_other_graphs(llm, toy, replays):
    core = toy.make_core(blocks=400, budget=512, max_len=150, model=llm.engine.loop.core.executor.runner.model)
    core.add(requests(3, 1, 1)[0])
    core.add(EngineRequest("long", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), ()))
    for _ in range(8):
        core.step()
    assert len(set(replays)) == 1
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        for _ in range(6):
            core.step()
    finally:
        torch.set_num_threads(threads)
    assert len(set(replays)) == 2
    calls, model = [], core.executor.runner.model
    forward = model.forward
    try:
        model.forward = lambda batch: (calls.append(len(batch.attn[0].seq_lens)), forward(batch))[1]
        for _ in range(4):
            core.step()
    finally:
        del model.forward
    assert len(calls) == 2, "the others are replayed"
    assert len(set(replays)) == 3
    core.abort("long")
    core.step()


CACHES: list[torch.Tensor] = []


def step(ids: list[int], numbers: dict[str, Any]) -> ForwardBatch:
    """Make a decode step with a row for each id, each in a block of its own."""
    rows = len(ids)
    token = torch.tensor(ids)
    attn = AttentionMetadata(tuple(range(rows + 1)), (1,) * rows, torch.arange(rows, dtype=torch.int32)[:, None], token, 1)
    return ForwardBatch(token, token[None], [attn], CACHES, **numbers)


def test_every_tensor_of_a_step_is_copied_before_a_replay(replays):
    graphs, table = DecodeGraphs(torch.device("cpu")), torch.randn(9, 4)

    def forward(batch: ForwardBatch) -> torch.Tensor:
        slots = batch.attn[0].slot_mapping
        return table[batch.input_ids].mul(batch.positions.T).add_(slots[:, None]).add_(batch.modality_ids[:, None])

    for turn in range(6):
        batch = step([turn, 8 - turn], {"modality_ids": torch.tensor([turn, 1])})
        assert torch.equal(graphs(forward, batch), forward(batch))
    assert len(replays) == 4


def plus_one(batch: ForwardBatch) -> torch.Tensor:
    return batch.input_ids + 1


def lookup(batch: ForwardBatch) -> torch.Tensor:
    return torch.zeros(99, 8)[batch.input_ids]


@pytest.mark.parametrize("name", ["embed_index", "cross_rows"])
def test_steps_with_encoder_rows_are_not_replayed(replays, name):
    graphs = DecodeGraphs(torch.device("cpu"))
    for _ in range(4):
        graphs(plus_one, step([1, 2], {name: torch.tensor([0])}))
    assert not graphs._graphs
    assert not replays


def test_a_step_that_fails_to_record_runs_eagerly():
    calls = []

    def record(forward: Any, groups: Any) -> Any:
        calls.append(len(groups))
        raise CaptureFailed(forward(), "CUDA out of memory")

    graphs = DecodeGraphs(torch.device("cpu"), CaptureConfig((1, 4), 4, 4, record))
    for turn in range(4):
        batch = step([turn, 2, 3], {})
        assert torch.equal(graphs(plus_one, batch), plus_one(batch))
    assert calls == [1]


class ReplayedGraph:
    """A graph like a GPU's: the same kernels on the same memory, with the launch arguments of the recording."""

    def __init__(self, forward: Any) -> None:
        self.replay = forward


def random_step(rows: int, more: str, rng: torch.Generator, caches: list[torch.Tensor]) -> ForwardBatch:
    """Make a decode step of random numbers. `more` adds a field by its name, or a second cache group."""

    def randint(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=rng)

    def group(blocks: int, slots: int, **other: Any) -> AttentionMetadata:
        lengths, tables = randint(1, 4 * blocks + 1, rows), randint(1, 99, rows, blocks).int()
        if other.get("key_range"):
            other["key_range"] = torch.stack((lengths // 2, lengths))
        return AttentionMetadata(tuple(range(rows + 1)), tuple(lengths.tolist()), tables, randint(1, 99, slots), 4, **other)

    first = group(3, rows, key_range=more == "key_range" or None)
    beside = {"window": lambda: group(3, rows, window=3), "cross": lambda: group(2, 0, causal=False)}
    groups = [first, beside[more](), first] if more in beside else [first, first]
    numbers = {more: randint(1, 9, rows)} if more in ("adapters", "modality_ids") else {}
    return ForwardBatch(randint(1, 99, rows), randint(1, 99, 3, rows), groups, caches, **numbers)


def attended_keys(attn: AttentionMetadata, padding: torch.Tensor) -> list[torch.Tensor]:
    """Return for each row the blocks of its visible keys, its key range, and its slot."""
    starts, lengths = attn.device_starts_and_lens
    assert starts.tolist() == list(range(len(padding) + 1))
    assert torch.equal(lengths == 0, padding)
    first = torch.zeros_like(lengths) if attn.window is None else (lengths - attn.window).clamp(min=0)
    first, stop = (first, lengths) if attn.key_range is None else attn.key_range
    key = torch.arange(attn.block_tables.shape[1] * 4)
    blocks = attn.block_tables.repeat_interleave(4, 1) * (key < stop[:, None]) * (key >= first[:, None])
    assert not stop[padding].any()
    if not attn.causal:
        assert not len(attn.slot_mapping), "cross-attention keys are not written again"
        return [blocks.sum(1), first, stop]
    assert torch.equal(attn.slot_mapping < 0, padding)
    return [blocks.sum(1), first, stop, attn.slot_mapping]


@pytest.mark.parametrize("more", ["nothing", "adapters", "modality_ids", "key_range", "window", "cross"])
def test_steps_are_padded_to_recorded_sizes(more: str) -> None:
    """Padding rows are token 0 at position 0, with length 0 and slot -1, and do not change the result."""
    recorded = []

    def record(forward: Any, groups: Any) -> Any:
        recorded.append({len(attn.seq_lens) for attn in groups})
        assert all(attn.seq_lens == (attn.block_tables.shape[1] * 4,) * len(attn.seq_lens) for attn in groups), "the longest"
        return forward(), ReplayedGraph(forward)

    def forward(batch: ForwardBatch) -> Any:
        groups = {id(part): part for part in batch.attn}.values()
        padding = torch.arange(len(batch.input_ids)) >= rows
        given = [part for part in (batch.input_ids, *batch.positions, batch.adapters, batch.modality_ids) if part is not None]
        assert not any(part[padding].any() for part in given)
        return torch.stack([*given, *(part for attn in groups for part in attended_keys(attn, padding))], 1).double()

    graphs = DecodeGraphs(torch.device("cpu"), CaptureConfig((1, 2, 4, 8), 8, 3, record))
    rng = torch.Generator().manual_seed(0)
    caches: list[Any] = []
    for rows in (3, 3, 4, 3, 3, 8, 7, 5, 8, 1, 1, 1, 2, 2, 4, 9, 9):
        batch = random_step(rows, more, rng, caches)
        assert torch.equal(graphs(forward, batch), forward(batch))
    assert {size for (size,) in recorded} == {1, 2, 4, 8}
    assert len(graphs._graphs) == 3


def test_graphs_of_a_gpu_hold_no_more_than_planned() -> None:
    graphs = DecodeGraphs(
        torch.device("cpu"), CaptureConfig(_BATCH_SIZES, 256, 64, lambda forward, _: (forward(), ReplayedGraph(forward)))
    )
    model: Any = SimpleNamespace(hidden_size=8, cache_specs=[CacheSpec("full", 1, 8, torch.float32)], forward_bytes=lambda _: 0)
    rng = torch.Generator().manual_seed(0)
    for blocks in (30, 15, 8, 4, 2, 1):
        for rows in (20, 24, 16, 7, 4, 2, 1):
            for _ in range(2):
                step = random_step(rows, "nothing", rng, CACHES)
                tables = torch.zeros(rows, blocks, dtype=torch.int32)
                graphs(lookup, replace(step, attn=[replace(part, block_tables=tables) for part in step.attn]))
    assert len(graphs._graphs) == 6 * 6
    held = sum(
        sum(part.nbytes for part in (known.inputs.input_ids, known.inputs.positions))
        + sum(part.nbytes for attn in known.groups for part in (attn.block_tables, attn.lengths, attn.slot_mapping))
        + known.graph.replay().nbytes
        for known in graphs._graphs.values()
        if known is not None
    )
    work = StepLimits(64, 1, 1, torch.device("cuda"))
    assert 0.6 * graph_bytes(model, 24, 2, 30, work) < held <= graph_bytes(model, 24, 2, 30, work)
    assert graph_bytes(model, 24, 2, 30, replace(work, device=torch.device("cpu"))) == 0
