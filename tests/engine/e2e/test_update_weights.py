"""Weights that change under a running engine: answers are those of an engine that was made with the new ones."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family import ask
from lora import matrices, write
from measured import held
from parity import ROWS, LoadedModels, greedy, make_llm
from safetensors.torch import load_file, save_file
from sensorium import LLM, AsyncLLM
from sensorium.callers.errors import CheckpointError, ConfigError, InputError
from sensorium.models import weights as model_weights

pytestmark = pytest.mark.in_process
ROW = ROWS["qwen2_vl"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LoadedModels(tmp_path_factory.mktemp("base")).folder("qwen2_vl")


@pytest.fixture(scope="module")
def changed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other values in a part of its weights, tower and decoder."""
    folder = shutil.copytree(base, tmp_path_factory.mktemp("changed") / "model")
    gen, stored = torch.Generator().manual_seed(1), load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        if "q_proj" in name or "fc1" in name or name.endswith(("norm.weight", "embed_tokens.weight")):
            stored[name] = tensor * (1 + torch.rand(tensor.shape, generator=gen) / 2).to(tensor.dtype)
    save_file(stored, folder / "model.safetensors")
    return Path(folder)


def update_of(base: Path, changed: Path) -> dict[str, torch.Tensor]:
    before, after = (load_file(folder / "model.safetensors") for folder in (base, changed))
    return {name: tensor for name, tensor in after.items() if not torch.equal(tensor, before[name])}


def answers(llm: LLM, **call: Any) -> list[tuple[int, ...]]:
    outputs = llm.generate([ask(ROW, "i", 0).ours, ask(ROW, "", 1).ours], greedy(12), use_tqdm=False, **call)
    assert [one.error for one in outputs] == [None, None]
    return [tuple(one.outputs[0].token_ids) for one in outputs]


@pytest.fixture(scope="module")
def expected(base: Path, changed: Path) -> list[Any]:
    both = []
    for folder in (base, changed):
        with make_llm(ROW, folder) as llm:
            both.append(answers(llm))
    assert both[0] != both[1]
    return both


@pytest.mark.parametrize(
    "options",
    [{}, {"engine_process": True}, {"quantization": "int8"}, {"async_scheduling": True}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_answers_are_those_of_an_engine_with_the_new_weights(base: Path, changed: Path, options: Any) -> None:
    """A part of the weights is given; no block, encoder row or packed weight of before is used again."""
    update = update_of(base, changed)
    with make_llm(ROW, changed, **options) as llm:
        new = answers(llm)
    with make_llm(ROW, base, **options) as llm:
        old = answers(llm)
        assert llm.weights_version == 0
        assert llm.update_weights(iter(update.items())) == llm.weights_version == 1
        assert answers(llm) == new != old
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        assert answers(llm) == new
        assert llm.update_weights(load_file(base / "model.safetensors")) == 2
        assert answers(llm) == old


def test_files_names_of_transformers_and_copies(base: Path, changed: Path, tmp_path: Path, expected: list[Any]) -> None:
    """Both spellings of names are taken, and tensors that their owner changes later have no effect."""
    update = update_of(base, changed)
    save_file(update, tmp_path / "update.safetensors")
    model, _ = ROW.load(changed)
    in_memory = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with make_llm(ROW, base) as llm:
        for source in (tmp_path / "update.safetensors", str(tmp_path), in_memory):
            llm.update_weights(load_file(base / "model.safetensors"))
            llm.update_weights(source)
            assert answers(llm) == expected[1]
        for tensor in in_memory.values():
            tensor.zero_()
        llm.sleep()
        llm.wake_up()
        assert answers(llm) == expected[1]


def test_updates_that_do_not_fit_change_nothing(base: Path, changed: Path, tmp_path: Path, expected: list[Any]) -> None:
    update = update_of(base, changed)
    name = next(iter(update))
    (tmp_path / "pickle.bin").write_bytes(b"x")
    wrong: list[tuple[Any, type[Exception], str]] = [
        (update | {"model.nothing.weight": torch.ones(2)}, CheckpointError, "model.nothing.weight"),
        (update | {name: update[name][:-1]}, CheckpointError, name),
        (update | {name: update[name] * torch.nan}, CheckpointError, name),
        (update | {name: update[name].to(torch.int8)}, CheckpointError, name),
        ([*update.items(), (name, update[name])], InputError, name),
        ({}, InputError, "weights"),
        ([5], InputError, "weights"),
        (5, InputError, "weights"),
        (tmp_path / "pickle.bin", CheckpointError, "pickle"),
        (tmp_path / "absent", CheckpointError, "absent"),
        ("a\0b", InputError, "weights"),
    ]
    with make_llm(ROW, base) as llm:
        for weights, kind, text in wrong:
            with pytest.raises(kind, match=text):
                llm.update_weights(weights)
        with pytest.raises(InputError) as caught:
            llm.update_weights(update, mode="later")  # type: ignore[arg-type]
        assert caught.value.info.param == "mode"
        assert llm.weights_version == 0
        assert answers(llm) == expected[0]


def test_requests_in_progress_end_or_are_aborted(base: Path, changed: Path, expected: list[Any]) -> None:
    update, prompt = update_of(base, changed), {"prompt_token_ids": [5, 6, 7]}
    with make_llm(ROW, base) as llm:
        whole = list(llm.generate(prompt, greedy(60), use_tqdm=False)[0].outputs[0].token_ids)

        async def run(mode: Any) -> tuple[str | None, Any]:
            engine = AsyncLLM(llm)
            stream = engine.generate(prompt, greedy(60))
            parts = [await anext(stream)]
            updating = asyncio.ensure_future(engine.update_weights(update, mode))
            parts += [output async for output in stream]
            await updating
            return parts[-1].outputs[0].finish_reason, [token for one in parts for token in one.outputs[0].token_ids]

        assert asyncio.run(run("wait")) == ("length", whole)
        assert answers(llm) == expected[1]
        assert asyncio.run(run("abort"))[0] == "abort"
        with llm.live(prompt, greedy(2)) as session:
            session.answer()
            with pytest.raises(InputError) as caught:
                llm.update_weights(update)
            assert caught.value.info.param == "mode"
        assert answers(llm) == expected[1]


def test_a_failure_leaves_the_engine_asleep(
    base: Path, changed: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: Any) -> None:
        raise MemoryError

    with make_llm(ROW, base) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(model_weights.Linear, "pack", fill)
            with pytest.raises(InputError) as caught:
                llm.update_weights(update_of(base, changed))
        assert caught.value.info.code == "out_of_memory"
        assert llm.asleep
        llm.wake_up()
        assert answers(llm) == expected[1]


def test_adapters_are_kept(base: Path, changed: Path, tmp_path: Path) -> None:
    model, _ = ROW.load(base)
    folder = write(tmp_path / "a", str(base), matrices(model, r"language_model.*q_proj$|visual.*fc2$"))
    with make_llm(ROW, changed, enable_lora=True) as llm:
        llm.load_adapter("mine", folder)
        new = answers(llm, adapter="mine")
    with make_llm(ROW, base, enable_lora=True) as llm:
        llm.load_adapter("mine", folder)
        assert answers(llm, adapter="mine") != new
        llm.update_weights(update_of(base, changed))
        assert answers(llm, adapter="mine") == new


def test_a_loop_of_updates_keeps_no_memory(base: Path, changed: Path) -> None:
    update = update_of(base, changed)
    with make_llm(ROW, base) as llm:
        runner, sizes = llm.engine.loop.core.executor.runner, []
        for _ in range(12):
            llm.update_weights(update)
            answers(llm)
            sizes.append((held(runner.model), len(runner.store.rows), len(runner.sequences)))
        assert len(set(sizes[1:])) == 1


def test_models_whose_weights_cannot_be_updated(base: Path, tmp_path: Path) -> None:
    model, _ = ROW.load(base)
    folder = write(tmp_path / "a", str(base), matrices(model, r"language_model.*q_proj$"))
    update = load_file(base / "model.safetensors")
    for path, options in ((folder, {}), (base, {"parts": "encoder"})):
        with make_llm(ROW, path, **options) as llm, pytest.raises((InputError, ConfigError)) as caught:
            llm.update_weights(update)
        assert caught.value.info.code == "unsupported"
