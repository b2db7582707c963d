"""Weights that change under a running engine: answers are those of an engine that was made with the new ones."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import ask
from lora import matrices, write
from measured import held
from parity import ROWS, LoadedModels, greedy, make_llm
from safetensors.torch import load_file, save_file
from sensorium import LLM, AsyncLLM
from sensorium.callers.errors import CheckpointError, ConfigError, EngineDeadError, InputError
from sensorium.engine.core.channel import discard
from sensorium.models import weights as model_weights
from torch.multiprocessing.reductions import rebuild_tensor, reduce_tensor
from waiting import wait_until

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
    handles = {name: reduce_tensor(tensor.clone().share_memory_()) for name, tensor in update.items()}
    with make_llm(ROW, base) as llm:
        for source in (tmp_path / "update.safetensors", str(tmp_path), handles, in_memory):
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
        ({name: (rebuild_tensor, (torch.Tensor, None, None))}, InputError, "weights"),
        ({name: (rebuild_tensor, (torch.Tensor, object(), (0, (2,), (1,), False)))}, InputError, "weights"),
        ({name: (np.ones(3), ())}, InputError, "weights"),
        ({name: (torch.ones, (2,))}, InputError, "weights"),
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


def test_a_handle_of_too_little_memory_is_refused(base: Path) -> None:
    """Torch would make ordinary memory larger, with whatever lies there."""
    name, tensor = next(iter(load_file(base / "model.safetensors").items()))
    kind, (cls, storage, (offset, shape, strides, grad)) = reduce_tensor(tensor.clone())
    has = storage._untyped_storage.nbytes()
    with make_llm(ROW, base) as llm:
        for metadata in (1, shape, strides, grad), (offset, (2 * shape[0], *shape[1:]), strides, grad):
            with pytest.raises(InputError) as caught:
                llm.update_weights({name: (kind, (cls, storage, metadata))})
            assert (caught.value.info.param, caught.value.info.limit) == ("weights", has)
            assert caught.value.info.value > has
            assert name in str(caught.value)
        assert storage._untyped_storage.nbytes() == has
        assert llm.update_weights({name: (kind, (cls, storage, (offset, shape, strides, grad)))}) == 1


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
        assert (llm.asleep, llm.weights_version) == (True, 1)
        llm.wake_up()
        assert answers(llm) == expected[1]


def test_a_new_process_of_the_engine_has_the_weights_of_all_updates(
    base: Path, changed: Path, expected: list[Any], tmp_path: Path
) -> None:
    """The parent keeps no more than the newest tensors of each name, and lets go of them at the end."""
    update = [*update_of(base, changed).items()]
    parts = dict(update[:3]), dict(update[3:])
    model, _ = ROW.load(base)
    folder = write(tmp_path / "a", str(base), matrices(model, r"language_model.*q_proj$"))
    with make_llm(ROW, base, engine_process=True, enable_lora=True) as llm:
        core, loop = llm.engine.loop.core, llm.engine.loop
        llm.load_adapter("mine", folder)
        for part in (*parts, parts[0]):
            llm.update_weights(part)
        assert len(list(map(discard, core._updates.messages()))) == 2
        with pytest.raises(CheckpointError):
            llm.update_weights({"model.nothing.weight": torch.ones(2)})
        new = answers(llm, adapter="mine")
        kill(llm, 1)
        assert answers(llm) == expected[1] != new == answers(llm, adapter="mine")
        llm.update_weights(load_file(base / "model.safetensors"))
        assert len(list(map(discard, core._updates.messages()))) == 1
        llm.sleep()
        kill(llm, 2)
        assert llm.asleep
        llm.wake_up()
        assert answers(llm) == expected[0]
        assert llm.weights_version == 4
        assert loop.num_deaths == 2
    assert not core._updates


def kill(llm: LLM, restarts: int) -> None:
    """Kill the engine's process and wait until it was restarted."""
    os.kill(llm.engine.loop.core.pid, signal.SIGKILL)
    wait_until(lambda: llm.engine.loop.num_restarts == restarts and not llm.engine.loop.is_restarting)


@pytest.mark.parametrize("verb", ["stage_weights", "sleep", "wake_up"])
def test_a_death_during_an_update_leaves_weights_of_one_version(
    base: Path, changed: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    with make_llm(ROW, base, engine_process=True) as llm:
        core = llm.engine.loop.core
        exchange = core._exchange

        def exchange_with_the_dead(message: Any) -> Any:
            if verb.encode() in message[0]:
                monkeypatch.undo()
                os.kill(core.pid, signal.SIGKILL)
            return exchange(message)

        monkeypatch.setattr(core, "_exchange", exchange_with_the_dead)
        with pytest.raises(EngineDeadError):
            llm.update_weights(update_of(base, changed))
        wait_until(lambda: llm.engine.loop.num_restarts == 1 and not llm.engine.loop.is_restarting)
        assert not llm.asleep
        assert answers(llm) == expected[llm.weights_version]
        assert llm.weights_version == (verb != "stage_weights")


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


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.full)])
def test_a_loop_of_updates_keeps_no_memory(base: Path, changed: Path, tmp_path: Path, count: int) -> None:
    """Nor do adapters that are loaded again under one name: tensors, objects and, in a long loop, the process's memory."""
    model, _ = ROW.load(base)
    folders = [write(tmp_path / str(seed), str(base), matrices(model, r"q_proj$", seed=seed)) for seed in range(2)]
    update, sizes, resident = update_of(base, changed), list[Any](), list[int]()
    with make_llm(ROW, base, enable_lora=True) as llm:
        runner, core = llm.engine.loop.core.executor.runner, llm.engine.loop.core
        for step in range(count):
            llm.load_adapter("mine", folders[step % 2])
            llm.update_weights(update)
            answers(llm, adapter="mine")
            adapters = runner.adapters.num_bytes, len(core._adapters), len(llm.engine.adapters._leases)
            sizes.append((held(runner.model), len(runner.store.rows), len(runner.sequences), *adapters))
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert len(set(sizes[2:])) == 1
    if count > 100:
        assert max(resident[count // 2 :]) < max(resident[: count // 2]) + (16 << 20)


def test_models_whose_weights_cannot_be_updated(base: Path, tmp_path: Path) -> None:
    model, _ = ROW.load(base)
    folder = write(tmp_path / "a", str(base), matrices(model, r"language_model.*q_proj$"))
    update = load_file(base / "model.safetensors")
    for path, options in ((folder, {}), (base, {"parts": "encoder"})):
        with make_llm(ROW, path, **options) as llm, pytest.raises((InputError, ConfigError)) as caught:
            llm.update_weights(update)
        assert caught.value.info.code == "unsupported"
