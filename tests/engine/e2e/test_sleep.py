"""A sleeping engine holds almost no tensors and refuses requests; after `wake_up` it answers as before."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from family import ask, load_rows, save
from hostile import MODEL, asked, make_image
from measured import given_bytes, held
from parity import make_llm
from sensorium import LLM, AsyncLLM, SamplingParams
from sensorium.callers.errors import CheckpointError, InputError
from sensorium.models import weights
from waiting import heard, hold_steps

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [asked(make_image(1)), "The sky is", asked(make_image(2), make_image(1))]
OPTIONS = {"max_model_len": 512, "max_num_seqs": 4, "limit_mm_per_prompt": {"image": 2}, "warm_up": False}
"""Without the warm-up, whose thread may make tensors while those of the process are counted."""


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(MODEL, **OPTIONS) as made:
        yield made


def answers(llm: LLM, prompts: object = PROMPTS) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def held_by(llm: LLM) -> int:
    """Return the bytes of weights, caches and encoder rows."""
    runner = llm.engine.loop.core.executor.runner
    table = runner.model.language_model.embed_tokens
    empty = table.packed is None and table.weight.is_meta
    return (0 if empty else held(runner.model)) + given_bytes(runner.caches.tensors, runner.store.rows)


def live_bytes() -> int:
    """Return the bytes of all CPU tensors of this process."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.device.type == "cpu"]
    return sum(one.numel() * one.itemsize for one in tensors)


@pytest.mark.in_process
def test_sleep_frees_memory_and_does_not_change_answers(llm: LLM) -> None:
    before = answers(llm)
    core = llm.engine.loop.core
    whole, own, model = live_bytes(), held_by(llm), weakref.ref(core.executor.runner.model)
    assert llm.stats.blocks_cached > 0
    assert llm.stats.encoder_bytes > 0
    llm.sleep()
    assert llm.asleep
    assert model() is None
    assert held_by(llm) == 0
    assert whole - live_bytes() > 0.95 * own
    assert (llm.stats.blocks_cached, llm.stats.blocks_used, llm.stats.encoder_bytes) == (0, 0, 0)
    llm.sleep()
    counted = llm.stats
    llm.wake_up()
    llm.wake_up()
    assert not llm.asleep
    assert llm.stats == counted
    assert answers(llm) == before
    assert llm.stats.encoder_calls == 2 * counted.encoder_calls
    assert llm.stats.prefix_evictions == counted.prefix_evictions


def test_caches_are_empty_after_waking_up(llm: LLM) -> None:
    long = "a long prompt " * 20
    assert llm.generate([long], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate([long], GREEDY, use_tqdm=False)[0].num_cached_tokens > 0
    llm.sleep()
    llm.wake_up()
    assert llm.generate([long], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate([long], GREEDY, use_tqdm=False)[0].num_cached_tokens > 0


def test_a_sleeping_engine_refuses_requests(llm: LLM) -> None:
    llm.sleep()
    for call in (
        lambda: llm.generate("a", GREEDY, use_tqdm=False),
        lambda: list(llm.stream("a", GREEDY)),
        lambda: llm.live("a", GREEDY),
        lambda: llm.embed(["a"], use_tqdm=False),
    ):
        with pytest.raises(InputError, match=r"asleep; call wake_up\(\)"):
            call()
    assert llm.plan(PROMPTS[0])
    assert llm.explain().rows()
    assert llm.hidden_size > 0
    llm.wake_up()
    assert answers(llm)


@pytest.mark.parametrize("level", [0, 3, None, "1", torch.zeros(3).to_sparse()], ids=["0", "3", "None", "text", "tensor"])
def test_wrong_levels_are_refused(llm: LLM, level: object) -> None:
    with pytest.raises(InputError) as caught:
        llm.sleep(level)  # type: ignore[arg-type]
    assert caught.value.info.param == "level"
    assert not llm.asleep


def test_sleep_is_refused_while_requests_run(llm: LLM) -> None:
    session, loop = llm.live("The sky", GREEDY), llm.engine.loop
    first = session.answer()
    hold_steps(loop.core, lambda: heard(loop) or not loop._messages.empty())
    stream = llm.stream("a", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    with pytest.raises(InputError, match="being served: 1, live sessions open: 1"):
        llm.sleep()
    stream.close()
    with pytest.raises(InputError, match="being served: 0, live sessions open: 1"):
        llm.sleep()
    session.append(" and")
    assert session.answer().error is None
    session.close()
    llm.sleep()
    llm.wake_up()
    assert answers(llm, "The sky")[0] == first.outputs[0].token_ids


def test_it_can_be_closed_asleep() -> None:
    llm = LLM(MODEL, **OPTIONS)
    llm.sleep()
    llm.close()
    for call in (llm.wake_up, llm.sleep, lambda: llm.generate("a", GREEDY, use_tqdm=False)):
        with pytest.raises(InputError, match="was closed"):
            call()


@pytest.mark.in_process
def test_rows_on_disk_outlive_sleep(tmp_path: Path) -> None:
    with LLM(MODEL, encoder_cache_dir=tmp_path, **OPTIONS) as llm:
        before = answers(llm)
        llm.sleep()
        assert not llm.engine.loop.core.executor.runner.store.rows
        llm.wake_up()
        calls = llm.stats.encoder_calls
        assert answers(llm) == before
        assert (llm.stats.encoder_calls, llm.stats.encoder_disk_hits) == (calls, 2)


def test_a_checkpoint_that_was_changed_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    with LLM(folder, **OPTIONS) as llm:
        before, file = answers(llm), next(folder.glob("*.safetensors"))
        then = file.stat()
        llm.sleep()
        os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns + 10**9))
        with pytest.raises(CheckpointError, match="was changed since it was loaded"):
            llm.wake_up()
        assert llm.asleep
        os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))
        llm.wake_up()
        assert answers(llm) == before


@pytest.mark.in_process
def test_a_failed_wake_up_keeps_no_memory(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before, models = answers(llm), []
    llm.sleep()
    asleep = live_bytes()

    def read(root: torch.nn.Module, *_: object, **__: object) -> None:
        models.append(weakref.ref(root))
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "named_layers", read)
        with pytest.raises(InputError, match="too little memory") as caught:
            llm.wake_up()
    assert caught.value is not None  # while the error is still referenced
    assert llm.asleep
    assert models[0]() is None
    assert live_bytes() <= asleep + 4096
    llm.wake_up()
    assert answers(llm) == before


def test_coroutines_sleep_and_wake_up(llm: LLM) -> None:
    async def ask(engine: AsyncLLM) -> list[tuple[int, ...]]:
        return [output.outputs[0].token_ids async for output in engine.generate("The sky is", GREEDY, output_kind="final")]

    async def run() -> None:
        engine = AsyncLLM(llm)
        before = await ask(engine)
        await engine.sleep()
        with pytest.raises(InputError, match=r"wake_up\(\)"):
            await ask(engine)
        await asyncio.gather(engine.wake_up(), engine.wake_up())
        assert await ask(engine) == before

    asyncio.run(run())


@pytest.mark.parametrize("name", ["granite_speech_adapter", "whisper", "gemma3"])
def test_adapters_encoder_sides_and_windows_come_back(name: str, tmp_path: Path) -> None:
    row = load_rows()[name]
    question = ask(row, row.default_cases()[-1]).ours
    with make_llm(row, save(row, tmp_path)) as llm:
        before = answers(llm, question)
        llm.sleep()
        llm.wake_up()
        assert answers(llm, question) == before


@pytest.mark.parametrize("options", [{"async_scheduling": True}, {"dtype": "bfloat16", "quantization": "fp8"}])
def test_it_sleeps_with_other_options(options: dict[str, object]) -> None:
    with LLM(MODEL, **OPTIONS, **options) as llm:
        before = answers(llm)
        llm.sleep()
        llm.wake_up()
        assert answers(llm) == before


def test_an_engine_without_a_checkpoint_cannot_sleep(toy) -> None:
    with pytest.raises(InputError, match="made without a checkpoint"):
        toy.make_core().sleep()
