"""Decode steps that are replayed give the bits of those that are not, and whatever is unusual is not replayed."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import build_checkpoint
from sensorium import LLM, SamplingParams
from sensorium.engine.decode_graphs import _SIZES, DecodeGraphs, _Kind, graph_bytes
from sensorium.engine.types import EngineRequest
from sensorium.kernels import native
from sensorium.kernels.graph import Graph, NotRecorded
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.models.interface import CacheSpec, ForwardBatch, Work

needs_library = pytest.mark.skipif(native.library() is None, reason="the C++ kernels are not built")


@pytest.fixture(scope="module", params=[("float32", None), ("bfloat16", None), ("bfloat16", "int8")], ids=str)
def llm(request, tmp_path_factory):
    path = build_checkpoint(tmp_path_factory.mktemp("graphs"), "qwen2_5_vl", 3)
    dtype, quantization = request.param
    return LLM(path, max_model_len=1024, dtype=dtype, quantization=quantization)


@pytest.fixture
def replays(monkeypatch) -> list[Graph]:
    """Each graph as often as it was replayed."""
    found: list[Graph] = []
    replay = Graph.replay
    monkeypatch.setattr(Graph, "replay", lambda graph: (found.append(graph), replay(graph))[1])
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
    """Log probabilities of all; a request comes every so many steps."""
    found: dict[str, list[Any]] = {request.request_id: [] for request in asked}
    waiting, step = list(asked), 0
    while waiting or core.scheduler.requests:
        if waiting and step % every == 0:
            core.add(waiting.pop(0))
        step += 1
        for output in core.step():
            assert output.error is None
            found[output.request_id] += output.logprobs or ()
    return found


@needs_library
@pytest.mark.parametrize(
    ("blocks", "every", "tokens"), [(400, 1, 40), (400, 9, 60), (40, 1, 60)], ids=["together", "changing", "preempted"]
)
def test_answers_are_the_same_bits(llm, toy, replays, blocks, every, tokens):
    def run(graphs: Any) -> Any:
        core = toy.make_core(blocks=blocks, budget=512, max_len=150, model=llm._driver.core.runner.model)
        core.runner.graphs = graphs
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
        core.runner.graphs = graphs
        asked = [replace(r, prompt_token_ids=tuple(token % 101 for token in r.prompt_token_ids)) for r in requests(1, 6, 40)]
        return answers(core, asked, 5)

    expected = run(eager)
    assert run(DecodeGraphs(torch.device("cpu"))) == expected
    assert len(replays) > 10


def test_a_forward_that_reads_its_numbers_stays_as_it_is(toy, replays):
    core = toy.make_core()
    for i in range(4):
        core.add(toy.make_request(str(i), random.Random(i), max_tokens=20))
    toy.drain(core)
    assert core.runner.graphs._graphs
    assert not any(core.runner.graphs._graphs.values())
    assert not replays


@needs_library
def test_only_a_few_graphs_are_kept(llm, toy):
    core = toy.make_core(blocks=400, budget=512, max_len=150, model=llm._driver.core.runner.model)
    answers(core, requests(2, 8, 60), 7)
    assert len(core.runner.graphs._graphs) == 4


@needs_library
def test_another_forward_or_number_of_threads_has_other_graphs(llm, toy, replays):
    core = toy.make_core(blocks=400, budget=512, max_len=150, model=llm._driver.core.runner.model)
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
    calls, model = [], core.runner.model
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
    """A decode row for each id, in a block of its own."""
    rows = len(ids)
    token = torch.tensor(ids)
    attn = AttentionMetadata(tuple(range(rows + 1)), (1,) * rows, torch.arange(rows, dtype=torch.int32)[:, None], token, 1)
    return ForwardBatch(token, token[None], [attn], CACHES, **numbers)


def test_every_tensor_of_a_step_is_read_anew(replays):
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
def test_rows_of_encoders_are_not_replayed(replays, name):
    graphs = DecodeGraphs(torch.device("cpu"))
    for _ in range(4):
        graphs(plus_one, step([1, 2], {name: torch.tensor([0])}))
    assert not graphs._graphs
    assert not replays


def test_a_step_that_cannot_be_recorded_is_answered_and_stays_as_it_is():
    calls = []

    def record(forward: Any, groups: Any) -> Any:
        calls.append(len(groups))
        raise NotRecorded(forward(), "CUDA out of memory")

    graphs = DecodeGraphs(torch.device("cpu"), _Kind((1, 4), 4, 4, record))
    for turn in range(4):
        batch = step([turn, 2, 3], {})
        assert torch.equal(graphs(plus_one, batch), plus_one(batch))
    assert calls == [1]


class Again:
    """A graph as a GPU's: the same kernels on the same memory, with what was launched once and for all."""

    def __init__(self, forward: Any) -> None:
        self.replay = forward


def drawn(rows: int, more: str, rng: torch.Generator, caches: list[torch.Tensor]) -> ForwardBatch:
    """A decode step of random numbers, with what else a step may have: a field by its name, or a group beside the first."""

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=rng)

    def group(blocks: int, slots: int, **other: Any) -> AttentionMetadata:
        lengths, tables = draw(1, 4 * blocks + 1, rows), draw(1, 99, rows, blocks).int()
        if other.get("seen"):
            other["seen"] = torch.stack((lengths // 2, lengths))
        return AttentionMetadata(tuple(range(rows + 1)), tuple(lengths.tolist()), tables, draw(1, 99, slots), 4, **other)

    first = group(3, rows, seen=more == "seen" or None)
    beside = {"window": lambda: group(3, rows, window=3), "cross": lambda: group(2, 0, causal=False)}
    groups = [first, beside[more](), first] if more in beside else [first, first]
    numbers = {more: draw(1, 9, rows)} if more in ("adapters", "modality_ids") else {}
    return ForwardBatch(draw(1, 99, rows), draw(1, 99, 3, rows), groups, caches, **numbers)


def keys_seen(attn: AttentionMetadata, nobody: torch.Tensor) -> list[torch.Tensor]:
    """Of each row what stands in the tables where it sees keys, from which key to which, and where it is written."""
    starts, lengths = attn.device_bounds
    assert starts.tolist() == list(range(len(nobody) + 1))
    assert torch.equal(lengths == 0, nobody)
    first = torch.zeros_like(lengths) if attn.window is None else (lengths - attn.window).clamp(min=0)
    first, stop = (first, lengths) if attn.seen is None else attn.seen
    key = torch.arange(attn.block_tables.shape[1] * 4)
    blocks = attn.block_tables.repeat_interleave(4, 1) * (key < stop[:, None]) * (key >= first[:, None])
    assert not stop[nobody].any()
    if not attn.causal:
        assert not len(attn.slot_mapping), "keys of the other side are not written again"
        return [blocks.sum(1), first, stop]
    assert torch.equal(attn.slot_mapping < 0, nobody)
    return [blocks.sum(1), first, stop, attn.slot_mapping]


@pytest.mark.parametrize("more", ["nothing", "adapters", "modality_ids", "seen", "window", "cross"])
def test_steps_are_filled_up_to_sizes_that_are_recorded(more: str) -> None:
    """Rows that nobody wants are the first token at the first place, of no length, written nowhere; nobody sees them."""
    recorded = []

    def record(forward: Any, groups: Any) -> Any:
        recorded.append({len(attn.seq_lens) for attn in groups})
        assert all(attn.seq_lens == (attn.block_tables.shape[1] * 4,) * len(attn.seq_lens) for attn in groups), "the longest"
        return forward(), Again(forward)

    def forward(batch: ForwardBatch) -> Any:
        groups = {id(part): part for part in batch.attn}.values()
        nobody = torch.arange(len(batch.input_ids)) >= rows
        given = [part for part in (batch.input_ids, *batch.positions, batch.adapters, batch.modality_ids) if part is not None]
        assert not any(part[nobody].any() for part in given)
        return torch.stack([*given, *(part for attn in groups for part in keys_seen(attn, nobody))], 1).double()

    graphs = DecodeGraphs(torch.device("cpu"), _Kind((1, 2, 4, 8), 8, 3, record))
    rng = torch.Generator().manual_seed(0)
    caches: list[Any] = []
    for rows in (3, 3, 4, 3, 3, 8, 7, 5, 8, 1, 1, 1, 2, 2, 4, 9, 9):
        batch = drawn(rows, more, rng, caches)
        assert torch.equal(graphs(forward, batch), forward(batch))
    assert {size for (size,) in recorded} == {1, 2, 4, 8}
    assert len(graphs._graphs) == 3


def test_graphs_of_a_gpu_hold_no_more_than_is_planned() -> None:
    graphs = DecodeGraphs(torch.device("cpu"), _Kind(_SIZES, 256, 64, lambda forward, _: (forward(), Again(forward))))
    model: Any = SimpleNamespace(hidden_size=8, cache_specs=[CacheSpec("full", 1, 8, torch.float32)], forward_bytes=lambda _: 0)
    rng = torch.Generator().manual_seed(0)
    for blocks in (30, 15, 8, 4, 2, 1):
        for rows in (20, 24, 16, 7, 4, 2, 1):
            for _ in range(2):
                step = drawn(rows, "nothing", rng, CACHES)
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
    work = Work(64, 1, 1, torch.device("cuda"))
    assert 0.6 * graph_bytes(model, 24, 2, 30, work) < held <= graph_bytes(model, 24, 2, 30, work)
    assert graph_bytes(model, 24, 2, 30, replace(work, device=torch.device("cpu"))) == 0
