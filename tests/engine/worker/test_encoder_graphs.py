"""Replayed encoder calls give the same bits as eager ones, and a graph is replayed only for calls of the same shapes."""

from __future__ import annotations

import functools
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family import LETTERS, ask, load_rows, save
from hostile import MODEL, asked, make_image
from parity import make_llm
from sensorium import LLM, SamplingParams
from sensorium.engine.worker import encoder_graphs
from sensorium.engine.worker.encoder_graphs import MAX_GRAPHS, MAX_ROWS, EncoderGraphs, graph_bytes
from sensorium.engine.worker.encoder_runner import EncoderRunner
from sensorium.kernels import native
from sensorium.kernels.graph import CallGraph, CaptureFailed, capture
from sensorium.mm.fields import BatchedField, FieldElem, FlatField, merge
from sensorium.models.fallback.fallback import Fallback
from sensorium.models.interface import StepLimits
from torch import Tensor

CPU = torch.device("cpu")
FAMILIES = {
    "qwen2_5_vl": "i",
    "qwen3_vl": "v",
    "llava": "i",
    "internvl": "i",
    "idefics3": "i",
    "whisper": "a",
    "qwen2_audio": "a",
}
needs_library = pytest.mark.skipif(native.library() is None, reason="the C++ kernels are not built")


def on_cpu(encode: Any, fixed: Any) -> Any:
    return capture(encode, constants=fixed)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a family's name to a small engine."""
    root, rows = tmp_path_factory.mktemp("encoders"), load_rows()
    return functools.cache(lambda name: make_llm(rows[name], save(rows[name], root / name)))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[CallGraph[Any]]:
    """Return a list to which each replay appends its graph."""
    found: list[CallGraph[Any]] = []
    replay = CallGraph.replay
    monkeypatch.setattr(CallGraph, "replay", lambda graph: (found.append(graph), replay(graph))[1])
    return found


def tensors(llm: LLM, name: str, seeds: list[int], turn: int = 0) -> dict[str, Any]:
    """Return the tensors of one call: an item per seed, whose sizes are the family's, beginning with number `turn`."""
    row, letter = load_rows()[name], FAMILIES[name]
    sizes = row.sizes[LETTERS[letter]]
    items = []
    for i, seed in enumerate(seeds):
        prepared = llm.engine.inputs.process(ask(row, letter, seed, [sizes[(turn + i) % len(sizes)]]).ours)
        items += [*prepared.features, *prepared.cross]
    return merge([item.kwargs for item in items])


@needs_library
@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_other_values_in_the_same_shapes_are_replayed(name: str, engine: Any, replays: list[Any]) -> None:
    llm = engine(name)
    encode, modality = llm.engine.loop.core.executor.runner.model.embed_multimodal, LETTERS[FAMILIES[name]]
    graphs = EncoderGraphs(CPU, on_cpu)
    kept = []
    for seeds, turn in [([1], 0), ([2], 0), ([3], 0), ([4, 5], 1), ([6], 0), ([7, 8], 1), ([9, 10], 1), ([1], 0)]:
        given = tensors(llm, name, seeds, turn)
        expected = [rows.clone() for rows in encode(modality, given)]
        found = graphs(encode, modality, {key: value.clone() for key, value in given.items()})
        kept += zip(found, expected, strict=True)
    assert len(replays) == 4
    assert len(set(replays)) == 2
    assert all(torch.equal(found, expected) for found, expected in kept), "later replays do not overwrite rows"


def plus(modality: str, given: dict[str, Any]) -> list[Tensor]:
    """Encode items of `grid` rows, and record the call in `calls`."""
    calls.append(given["grid"].tolist())
    return [part + 1 for part in given["pixels"].split(given["grid"].tolist())]


calls: list[list[int]] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()


def ask_for(graphs: EncoderGraphs, *grid: int, encode: Any = plus, **more: Any) -> None:
    """Encode one item per number of rows in `grid`, and check the result."""
    given = {"pixels": torch.randn(sum(grid), 3), "grid": torch.tensor(grid), **more}
    for rows, pixels in zip(graphs(encode, "image", given), given["pixels"].split(grid), strict=True):
        assert torch.equal(rows, pixels + 1)


def test_calls_with_other_grids_shapes_or_arguments_have_other_graphs() -> None:
    graphs = EncoderGraphs(CPU, on_cpu)
    ways: list[Any] = [
        {"grid": (2, 4)}, {"grid": (3, 3)}, {"grid": (6,)}, {"grid": (2, 4), "rate": 1}, {"grid": (2, 4), "rate": 1.0},
        {"grid": (2, 4), "more": torch.ones(2)}, {"grid": (2, 4), "more": torch.ones(3)},
        {"grid": (2, 4), "more": [torch.ones(2), "a"]}, {"grid": (2, 4), "more": [torch.ones(2), "b"]},
    ]  # fmt: skip
    for _ in range(2):
        for way in ways:
            ask_for(graphs, *way["grid"], **{name: value for name, value in way.items() if name != "grid"})
    assert len(calls) == 2 * len(ways), "called, or recorded"
    for way in ways:
        ask_for(graphs, *way["grid"], **{name: value for name, value in way.items() if name != "grid"})
    assert len(calls) == 2 * len(ways), "replayed"
    ask_for(graphs, 2, 4, more={1: []})
    for _ in range(3):
        ask_for(graphs, 2, 4, more={1, 2})
    assert len(calls) == 2 * len(ways) + 4, "arguments without a hash are never alike"


def test_another_encoder_or_number_of_threads_has_another_graph() -> None:
    graphs, threads = EncoderGraphs(CPU, on_cpu), torch.get_num_threads()
    for _ in range(3):
        ask_for(graphs, 5)
    torch.set_num_threads(threads + 1)
    try:
        ask_for(graphs, 5)
    finally:
        torch.set_num_threads(threads)
    ask_for(graphs, 5, encode=lambda modality, given: plus(modality, given))
    assert len(calls) == 4


def test_large_calls_are_not_recorded() -> None:
    graphs = EncoderGraphs(CPU, on_cpu)
    for _ in range(3):
        ask_for(graphs, MAX_ROWS)
        ask_for(graphs, MAX_ROWS, 1)
    assert calls == [[MAX_ROWS], [MAX_ROWS, 1]] * 2 + [[MAX_ROWS, 1]]


def test_the_number_of_graphs_is_limited_and_graphs_in_use_stay() -> None:
    graphs = EncoderGraphs(CPU, on_cpu)
    shapes = range(1, MAX_GRAPHS + 4)
    for _ in range(4):
        for rows in shapes:
            ask_for(graphs, rows)
    assert len(graphs._graphs) == MAX_GRAPHS
    assert len(calls) == 2 * MAX_GRAPHS + 4 * 3, "the last three found no room, and evicted no graph"
    calls.clear()
    for _ in range(encoder_graphs._NUM_RECENT):
        ask_for(graphs, 1)
    assert not calls
    for rows in (20, 20, 20, 2, 1, 3):
        ask_for(graphs, rows)
    assert calls == [[20], [20], [2]], "the least recently used one was evicted"


def test_calls_that_read_values_on_the_host_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    def reads(modality: str, given: dict[str, Any]) -> list[Tensor]:
        return [part + float(given["pixels"].isfinite().all()) for part in plus(modality, given)]

    def ask_reader(modality: str, rows: int) -> None:
        graphs(reads, modality, {"pixels": torch.randn(rows, 3), "grid": torch.tensor([rows])})

    graphs = EncoderGraphs(CPU, on_cpu)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            ask_reader("image", 2)
            ask_reader("image", 3)
    assert len(calls) == 8
    assert not graphs._graphs
    assert [record.getMessage() for record in caplog.records if "image" in record.getMessage()] == [
        "encoder calls for image are not recorded: they read tensors on the host, or wait for the device"
    ]
    ask_for(graphs, 2)
    graphs._eager.clear()
    for _ in range(3):
        ask_for(graphs, 2)
    assert graphs._graphs


def test_an_error_of_the_encoder_is_raised() -> None:
    def fails(modality: str, given: dict[str, Any]) -> list[Tensor]:
        if given["pixels"].shape[0] == 3:
            raise RuntimeError("three")
        return plus(modality, given)

    graphs = EncoderGraphs(CPU, on_cpu)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="three"):
            ask_for(graphs, 3, encode=fails)
        ask_for(graphs, 2, encode=fails)
    assert len(graphs._graphs) == 1
    assert not graphs._eager


def test_a_call_that_fails_only_while_recorded_is_no_error() -> None:
    def record(encode: Any, fixed: Any) -> Any:
        encode()
        raise NotImplementedError("an operator that nobody may look into")

    graphs = EncoderGraphs(CPU, record)
    for _ in range(4):
        ask_for(graphs, 2)
    assert len(calls) == 5
    assert graphs._eager == {"image"}


def test_a_recording_that_ran_out_of_memory_is_tried_again() -> None:
    short = True

    def record(encode: Any, fixed: Any) -> Any:
        result = encode()
        if short:
            raise CaptureFailed(result, "CUDA out of memory. Tried to allocate 2.00 MiB")
        return on_cpu(encode, fixed)

    graphs = EncoderGraphs(CPU, record)
    for _ in range(3):
        ask_for(graphs, 2)
    assert len(calls) == 3
    assert not graphs._graphs
    assert not graphs._eager
    short = False
    for _ in range(3):
        ask_for(graphs, 2)
    assert graphs._graphs


def test_a_recording_that_failed_otherwise_is_not_tried_again() -> None:
    def record(encode: Any, fixed: Any) -> Any:
        raise CaptureFailed(encode(), "operation not permitted when stream is capturing")

    graphs = EncoderGraphs(CPU, record)
    for _ in range(3):
        ask_for(graphs, 2)
    assert len(calls) == 3
    assert graphs._eager == {"image"}


def test_an_encoder_that_ran_out_of_memory_is_not_called_again() -> None:
    def encode(modality: str, given: dict[str, Any]) -> list[Tensor]:
        rows = plus(modality, given)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rows

    graphs = EncoderGraphs(CPU, on_cpu)
    ask_for(graphs, 2, encode=encode)
    with pytest.raises(torch.OutOfMemoryError):
        ask_for(graphs, 2, encode=encode)
    assert len(calls) == 2
    assert not graphs._eager


def test_a_class_of_transformers_is_not_recorded() -> None:
    class Keeps(Fallback):
        def __init__(self) -> None:
            """Make a model without a checkpoint."""

        def embed_multimodal(self, modality: str, given: Any) -> list[Tensor]:
            return plus(modality, given)

    encoder_runner: Any = EncoderRunner(SimpleNamespace(dtype=torch.float32), CPU)
    encoder_runner.graphs, model = EncoderGraphs(CPU, on_cpu), Keeps()
    given = {"pixels": FieldElem(torch.randn(2, 3), FlatField()), "grid": FieldElem(torch.tensor(2), BatchedField())}
    items = [SimpleNamespace(kwargs=given, modality="image", range=SimpleNamespace(num_embeds=2))]
    for _ in range(4):
        encoder_runner._embed(model, None, items)
    assert len(calls) == 4
    assert not encoder_runner.graphs._graphs
    assert graph_bytes(model, {"image": 5}, StepLimits(1, 1, 1, torch.device("cuda"))) == 0


def test_on_a_cpu_nothing_is_recorded() -> None:
    graphs = EncoderGraphs(CPU)
    for _ in range(4):
        ask_for(graphs, 2)
    assert len(calls) == 4
    assert graph_bytes(None, {"image": 5}, StepLimits(1, 1, 1, CPU)) == 0  # type: ignore[arg-type]


@needs_library
def test_an_engine_gives_the_same_answers_and_drops_graphs_when_asleep(replays: list[Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    images = [make_image(seed) for seed in range(5)]
    with LLM(MODEL, max_model_len=512, max_num_seqs=1) as llm:
        runner = llm.engine.loop.core.executor.runner
        expected = [llm.generate([asked(one)], params, use_tqdm=False)[0].outputs[0].token_ids for one in images]
        llm.sleep()
        llm.wake_up()
        assert not replays or len(set(replays)) < 4, "of decode steps"
        replays.clear()
        runner.encoder_runner.graphs = EncoderGraphs(CPU, on_cpu)
        found = [llm.generate([asked(one)], params, use_tqdm=False)[0].outputs[0].token_ids for one in images]
        assert found == expected
        (call,) = runner.encoder_runner.graphs._graphs.values()
        assert replays.count(call.graph) == 3
        held = sum(part.nbytes for part in call.inputs) + sum(rows.nbytes for rows in call.graph._result)
        rows = sum(len(part) for part in call.graph._result)
        one, call = weakref.ref(call.inputs[0]), None
        replays.clear()
        assert held <= graph_bytes(runner.model, {"image": rows}, StepLimits(1, 1, 1, torch.device("cuda"))) / MAX_GRAPHS
        llm.sleep()
        assert one() is None
        assert not runner.encoder_runner.graphs._graphs
