"""Encoder calls that are replayed give the bits of those that are not; which ones are is as the module says."""

from __future__ import annotations

import functools
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family import LETTERS, ask, load_rows, save
from hostile import MODEL, asked, picture
from parity import make_llm
from sensorium import LLM, SamplingParams
from sensorium.engine import encoder_graphs
from sensorium.engine.encoder_graphs import MOST_GRAPHS, MOST_ROWS, EncoderGraphs, graph_bytes
from sensorium.engine.encoding import Encoding
from sensorium.kernels import native
from sensorium.kernels.graph import Graph, NotRecorded, capture
from sensorium.mm.fields import BatchedField, FieldElem, FlatField, merge
from sensorium.models.fallback import Fallback
from sensorium.models.interface import Work
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
    return capture(encode, fixed=fixed)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name of a family -> its small engine."""
    root, rows = tmp_path_factory.mktemp("encoders"), load_rows()
    return functools.cache(lambda name: make_llm(rows[name], save(rows[name], root / name)))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Graph[Any]]:
    """Each graph as often as it was replayed."""
    found: list[Graph[Any]] = []
    replay = Graph.replay
    monkeypatch.setattr(Graph, "replay", lambda graph: (found.append(graph), replay(graph))[1])
    return found


def tensors(llm: LLM, name: str, seeds: list[int], turn: int = 0) -> dict[str, Any]:
    """Of one call, an item for each seed, of the sizes from `turn` on that the family's row names."""
    row, letter = load_rows()[name], FAMILIES[name]
    sizes = row.sizes[LETTERS[letter]]
    items = []
    for i, seed in enumerate(seeds):
        prepared = llm._inputs.prepare(ask(row, letter, seed, [sizes[(turn + i) % len(sizes)]]).ours)
        items += [*prepared.features, *([prepared.cross] if prepared.cross else [])]
    return merge([item.kwargs for item in items])


@needs_library
@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_other_numbers_of_the_same_shape_are_replayed(name: str, engine: Any, replays: list[Any]) -> None:
    llm = engine(name)
    encode, modality = llm._driver.core.runner.model.embed_multimodal, LETTERS[FAMILIES[name]]
    graphs = EncoderGraphs(CPU, on_cpu)
    kept = []
    for seeds, turn in [([1], 0), ([2], 0), ([3], 0), ([4, 5], 1), ([6], 0), ([7, 8], 1), ([9, 10], 1), ([1], 0)]:
        given = tensors(llm, name, seeds, turn)
        expected = [rows.clone() for rows in encode(modality, given)]
        found = graphs(encode, modality, {key: value.clone() for key, value in given.items()})
        kept += zip(found, expected, strict=True)
    assert len(replays) == 4
    assert len(set(replays)) == 2
    assert all(torch.equal(found, expected) for found, expected in kept), "rows outlive what is replayed after them"


def plus(modality: str, given: dict[str, Any]) -> list[Tensor]:
    """An item of `grid` rows each; the last that `plus` was called for is noted."""
    calls.append(given["grid"].tolist())
    return [part + 1 for part in given["pixels"].split(given["grid"].tolist())]


calls: list[list[int]] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()


def ask_for(graphs: EncoderGraphs, *grid: int, encode: Any = plus, **more: Any) -> None:
    """A call for items of so many rows, whose result is looked at."""
    given = {"pixels": torch.randn(sum(grid), 3), "grid": torch.tensor(grid), **more}
    for rows, pixels in zip(graphs(encode, "image", given), given["pixels"].split(grid), strict=True):
        assert torch.equal(rows, pixels + 1)


def test_grids_shapes_and_whatever_else_is_given_are_told_apart() -> None:
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
    assert len(calls) == 2 * len(ways) + 4, "what has no hash is not known again"


def test_another_number_of_threads_or_encoder_is_another_call() -> None:
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
        ask_for(graphs, MOST_ROWS)
        ask_for(graphs, MOST_ROWS, 1)
    assert calls == [[MOST_ROWS], [MOST_ROWS, 1]] * 2 + [[MOST_ROWS, 1]]


def test_only_a_few_graphs_are_kept_and_those_in_use_are() -> None:
    graphs = EncoderGraphs(CPU, on_cpu)
    shapes = range(1, MOST_GRAPHS + 4)
    for _ in range(4):
        for rows in shapes:
            ask_for(graphs, rows)
    assert len(graphs._graphs) == MOST_GRAPHS
    assert len(calls) == 2 * MOST_GRAPHS + 4 * 3, "the last three found no room, and drove nobody out"
    calls.clear()
    for _ in range(encoder_graphs._REMEMBERED):
        ask_for(graphs, 1)
    assert not calls
    for rows in (20, 20, 20, 2, 1, 3):
        ask_for(graphs, rows)
    assert calls == [[20], [20], [2]], "the one that was asked for longest ago had to go"


def test_calls_that_read_their_numbers_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
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
        "encoder calls for image are not recorded: they read numbers, or wait for the device"
    ]
    ask_for(graphs, 2)
    graphs._plain.clear()
    for _ in range(3):
        ask_for(graphs, 2)
    assert graphs._graphs


def test_an_encoder_that_fails_fails_as_it_does() -> None:
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
    assert not graphs._plain


def test_what_fails_only_while_it_is_recorded_is_no_error() -> None:
    def record(encode: Any, fixed: Any) -> Any:
        encode()
        raise NotImplementedError("an operator that nobody may look into")

    graphs = EncoderGraphs(CPU, record)
    for _ in range(4):
        ask_for(graphs, 2)
    assert len(calls) == 5
    assert graphs._plain == {"image"}


def test_short_of_memory_it_is_tried_again() -> None:
    short = True

    def record(encode: Any, fixed: Any) -> Any:
        result = encode()
        if short:
            raise NotRecorded(result, "CUDA out of memory. Tried to allocate 2.00 MiB")
        return on_cpu(encode, fixed)

    graphs = EncoderGraphs(CPU, record)
    for _ in range(3):
        ask_for(graphs, 2)
    assert len(calls) == 3
    assert not graphs._graphs
    assert not graphs._plain
    short = False
    for _ in range(3):
        ask_for(graphs, 2)
    assert graphs._graphs


def test_what_is_not_recorded_for_another_reason_is_not_tried_again() -> None:
    def record(encode: Any, fixed: Any) -> Any:
        raise NotRecorded(encode(), "operation not permitted when stream is capturing")

    graphs = EncoderGraphs(CPU, record)
    for _ in range(3):
        ask_for(graphs, 2)
    assert len(calls) == 3
    assert graphs._plain == {"image"}


def test_an_encoder_that_finds_no_memory_is_not_called_again() -> None:
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
    assert not graphs._plain


def test_a_class_of_transformers_is_not_recorded() -> None:
    class Keeps(Fallback):
        def __init__(self) -> None:
            """Without a checkpoint."""

        def embed_multimodal(self, modality: str, given: Any) -> list[Tensor]:
            return plus(modality, given)

    encoding: Any = Encoding(SimpleNamespace(dtype=torch.float32), CPU)
    encoding.graphs, model = EncoderGraphs(CPU, on_cpu), Keeps()
    given = {"pixels": FieldElem(torch.randn(2, 3), FlatField()), "grid": FieldElem(torch.tensor(2), BatchedField())}
    items = [SimpleNamespace(kwargs=given, modality="image", range=SimpleNamespace(num_embeds=2))]
    for _ in range(4):
        encoding._unchecked(model, items)
    assert len(calls) == 4
    assert not encoding.graphs._graphs
    assert graph_bytes(model, {"image": 5}, Work(1, 1, 1, torch.device("cuda"))) == 0


def test_on_a_cpu_nothing_is_recorded() -> None:
    graphs = EncoderGraphs(CPU)
    for _ in range(4):
        ask_for(graphs, 2)
    assert len(calls) == 4
    assert graph_bytes(None, {"image": 5}, Work(1, 1, 1, CPU)) == 0  # type: ignore[arg-type]


@needs_library
def test_an_engine_answers_the_same_and_forgets_them_asleep(replays: list[Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    pictures = [picture(seed) for seed in range(5)]
    with LLM(MODEL, max_model_len=512, max_num_seqs=1) as llm:
        runner = llm._driver.core.runner
        expected = [llm.generate([asked(one)], params, use_tqdm=False)[0].outputs[0].token_ids for one in pictures]
        llm.sleep()
        llm.wake()
        assert not replays or len(set(replays)) < 4, "of decode steps"
        replays.clear()
        runner.encoding.graphs = EncoderGraphs(CPU, on_cpu)
        found = [llm.generate([asked(one)], params, use_tqdm=False)[0].outputs[0].token_ids for one in pictures]
        assert found == expected
        (call,) = runner.encoding.graphs._graphs.values()
        assert replays.count(call.graph) == 3
        held = sum(part.nbytes for part in call.inputs) + sum(rows.nbytes for rows in call.graph._result)
        rows = sum(len(part) for part in call.graph._result)
        one, call = weakref.ref(call.inputs[0]), None
        replays.clear()
        assert held <= graph_bytes(runner.model, {"image": rows}, Work(1, 1, 1, torch.device("cuda"))) / MOST_GRAPHS
        llm.sleep()
        assert one() is None
        assert not runner.encoding.graphs._graphs
