"""Tasks on rows: each row has its result or error, and a checkpoint keeps results by content. Ray runs them if it is there."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sensorium
from hostile import MODEL, make_image
from sensorium import AsyncLLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.pipelines import row_tasks
from sensorium.pipelines.ray_data import RowEngine, _plain
from sensorium.pipelines.row_tasks import Checkpoint, RowResult, run_rows

PARAMS = {"sampling_params": SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)}
ENGINE = {"max_model_len": 512, "max_num_seqs": 4, "engine_process": False}


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(MODEL, **ENGINE)
    yield llm
    llm.llm.close()


def rows(
    llm: AsyncLLM, task: str, values: list[object], checkpoint: Checkpoint | None = None, **options: object
) -> list[RowResult]:
    return asyncio.run(run_rows(llm, task, values, options, checkpoint))


def test_a_row_that_fails_has_an_error_and_the_others_their_answers(llm: AsyncLLM) -> None:
    parts = [{"type": "image", "image": make_image(1)}, {"type": "text", "text": "read"}]
    found = rows(llm, "chat", ["a", [{"role": "user", "content": parts}], 7, "b" * 4000], **PARAMS)
    assert [result.error_code for result in found[2:]] == ["invalid_value", "too_long"]
    assert [result.output for result in found[2:]] == [None, None]
    expected = llm.llm.chat(
        [[{"role": "user", "content": "a"}], [{"role": "user", "content": parts}]], PARAMS["sampling_params"], use_tqdm=False
    )
    assert [result.output for result in found[:2]] == [output.outputs[0].text for output in expected]
    assert all(result.error is None for result in found[:2])


def test_pictures_are_read_and_missing_files_are_errors(llm: AsyncLLM, tmp_path: Path) -> None:
    make_image(1).save(tmp_path / "a.png")
    (page,) = llm.llm.ocr(tmp_path / "a.png", max_tokens=8, use_tqdm=False)
    good, missing, raw = rows(
        llm, "ocr", [str(tmp_path / "a.png"), str(tmp_path / "b.png"), (tmp_path / "a.png").read_bytes()], max_tokens=8
    )
    assert good.output == raw.output == page.text
    assert missing.output is None
    assert missing.error_code
    assert "b.png" in str(missing.error)


def test_a_checkpoint_keeps_results_by_content_and_not_errors(
    llm: AsyncLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, run_row = [], row_tasks.run_row

    async def counted(llm: AsyncLLM, task: str, value: object, options: dict) -> RowResult:
        made.append(value)
        return await run_row(llm, task, value, options)

    monkeypatch.setattr(row_tasks, "run_row", counted)
    folder, job = tmp_path / "kept", ("model", "chat", repr(PARAMS))
    first = rows(llm, "chat", ["a", "b", 7], Checkpoint(folder, *job), **PARAMS)
    assert made == ["a", "b", 7]
    (file,) = folder.glob("rows-*.jsonl")
    file.write_text(file.read_text() + '["broken')  # as a process that was killed leaves it
    assert rows(llm, "chat", ["b", 7, "a", "c"], Checkpoint(folder, *job), **PARAMS)[:3] == [first[1], first[2], first[0]]
    assert made[3:] == [7, "c"]
    rows(llm, "chat", ["a"], Checkpoint(folder, "another", *job[1:]), **PARAMS)
    assert made[-1] == "a"


def test_equal_rows_of_a_batch_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[object]()

    async def counted(llm: AsyncLLM, task: str, value: object, options: dict) -> RowResult:
        made.append(value)
        await asyncio.sleep(0)
        return RowResult(str(value))

    monkeypatch.setattr(row_tasks, "run_row", counted)
    found = rows(None, "chat", ["a", "b", "a", "a"], Checkpoint(tmp_path, "job"))
    assert made == ["a", "b"]
    assert [row.output for row in found] == ["a", "b", "a", "a"]
    images = [make_image(1), make_image(1)]  # objects whose content is not known
    rows(None, "chat", images, Checkpoint(tmp_path, "job"))
    assert made[2:] == images


def test_rows_that_name_files_are_known_by_the_content(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "kept", "job")
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).write_bytes(content)
    keys = [checkpoint.key(str(tmp_path / name), True) for name in "abc"]
    assert keys[0] == keys[1] != keys[2]
    (tmp_path / "a").write_bytes(b"2")
    assert checkpoint.key(str(tmp_path / "a"), True) == keys[2]
    assert checkpoint.key(str(tmp_path / "missing"), True) != checkpoint.key(str(tmp_path / "also missing"), True)
    assert checkpoint.key(str(tmp_path / "a"), False) != checkpoint.key(str(tmp_path / "c"), False)  # texts, not paths


def test_a_row_has_one_input(llm: AsyncLLM, tmp_path: Path) -> None:
    for task, value in (("embed", []), ("embed", ["a", "b"]), ("ocr", []), ("read", [])):
        (result,) = rows(llm, task, [value])
        assert (result.output, result.error_code) == (None, "invalid_value"), task


def test_a_batch_keeps_its_columns_and_messages_may_be_json() -> None:
    engine = RowEngine(str(MODEL), "question", "chat", PARAMS, ENGINE)
    messages = [{"role": "user", "content": "a"}]
    table = np.array([{"role": "user", "content": "a", "name": None}], dtype=object)
    column = np.empty(3, dtype=object)
    column[:] = ["a", json.dumps(messages), table]
    batch = engine({"id": np.arange(3), "question": column})
    assert list(batch["id"]) == [0, 1, 2]
    assert batch["error"] == [None, None, None]
    assert len(set(batch["output"])) == 1
    with pytest.raises(ConfigError, match="is not a column"):
        engine({"other": column})
    engine._llm.llm.close()


@pytest.mark.parametrize("text", ['[{"a": 1}]', '[{"role": "user", "content": "a"}, 1]', '[{"a":' + "[" * 200_000, "[{a}]"])
def test_texts_that_look_like_messages_are_texts(text: str) -> None:
    assert _plain(text, "chat") == text
    messages = '[{"role": "user", "content": "a"}]'
    assert _plain(messages, "chat") == [{"role": "user", "content": "a"}]
    assert _plain(messages, "embed") == messages


def test_bad_arguments_are_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as raised:
        sensorium.ray.map_batches(None, MODEL, column="a", task="transcrbe")
    assert raised.value.info.param == "task"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    for options in ({"max_num_sequences": 1}, {"max_num_seqs": "many"}):
        with pytest.raises(ConfigError) as raised:
            sensorium.ray.map_batches(None, MODEL, column="a", engine_options=options)
        assert raised.value.info.param == next(iter(options))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as raised:
        Checkpoint(tmp_path / "file")
    assert raised.value.info.param == "checkpoint"


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
def test_ray_runs_the_rows_and_goes_on_with_a_checkpoint(tmp_path: Path, llm: AsyncLLM) -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    try:
        texts = [f"text {number}" for number in range(6)]
        dataset = ray.data.from_items([{"id": number, "text": text} for number, text in enumerate([*texts, ""])])
        arguments = {"column": "text", "options": PARAMS, "engine_options": ENGINE, "batch_size": 4, "checkpoint": tmp_path}
        found = sorted(sensorium.ray.map_batches(dataset, MODEL, **arguments).take_all(), key=lambda row: row["id"])
        expected = rows(llm, "chat", [*texts, ""], **PARAMS)
        assert [(row["output"], row["error_code"]) for row in found] == [(row.output, row.error_code) for row in expected]
        again = sorted(sensorium.ray.map_batches(dataset, MODEL, **arguments).take_all(), key=lambda row: row["id"])
        assert again == found
    finally:
        ray.shutdown()
