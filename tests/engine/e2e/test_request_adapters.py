"""Adapters that requests choose: the oracle adds B(A(x)) to transformers' class."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import random
import re
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from family import ask
from lora import compare, dora_tensors, hook, hook_dora, logprobs, magnitudes, matrices, tokens, write
from parity import ROWS, LoadedModels, greedy, make_llm
from safetensors.torch import load_file, save_file
from sensorium import LLM, AsyncLLM, LoRARequest, SamplingParams
from sensorium.callers.errors import CheckpointError, ConfigError, InputError
from sensorium.engine.frontend import adapters
from sensorium.engine.worker import adapter_store
from sensorium.kernels.low_rank.native import StepTable
from sensorium.models.request_adapters import AdaptedLayers
from waiting import wait_until

pytestmark = pytest.mark.in_process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LoadedModels:
    return LoadedModels(tmp_path_factory.mktemp("adapters"))


TARGETS = {
    "qwen2_vl": (r"language_model.*(q_proj|v_proj|o_proj|gate_proj|down_proj)$", "i"),
    "gemma3": (r"language_model.*(q_proj|k_proj|up_proj)$", "i"),
    "llava": (r"language_model.*(k_proj|down_proj)$", "i"),
    "text-lfm2": (r"conv\.(in|out)_proj|feed_forward\.w2|self_attn\.out_proj", ""),
    "text-qwen3_next": (r"in_proj_(qkvz|ba)|linear_attn\.out_proj|self_attn\.q_proj", ""),
    "text-falcon_h1": (r"mamba\.(in|out)_proj|self_attn\.v_proj|down_proj", ""),
    "text-falcon": (r"query_key_value|self_attention\.dense|dense_4h_to_h", ""),
    "text-mamba": (r"mixer\.(in|x|out)_proj", ""),
    "text-kimi_linear": (r"layers\.0\.self_attn\.(q|o|g_b|b)_proj|kv_a_proj_with_mqa", ""),
    "text-minimax": (r"qkv_proj|output_gate|self_attn\.out_proj", ""),
}


@pytest.mark.parametrize("name", TARGETS)
def test_answers_are_those_of_transformers(world: LoadedModels, tmp_path: Path, name: str) -> None:
    """The adapter has ranks and scales by module; the base model's answer stays, with both in one batch."""
    (chosen, items), row, base = TARGETS[name], ROWS[name], world.folder(name)
    model, processor = row.load(base)
    pairs = matrices(model, chosen)
    first = next(iter(pairs))
    pairs[first] = matrices(model, f"^{re.escape(first)}$", rank=6, seed=1)[first]
    folder = write(
        tmp_path / "adapter", str(base), pairs, use_rslora=True, rank_pattern={first: 6}, alpha_pattern={re.escape(first): 3}
    )
    question = ask(row, items, 0)
    with make_llm(row, base, enable_lora=True) as llm:
        compare(llm, row, model, processor, question)
        llm.load_adapter("mine", folder)
        hooks = hook(model, pairs, {one: 3 / math.sqrt(6) if one == first else 8 / math.sqrt(4) for one in pairs})
        compare(llm, row, model, processor, question, adapter="mine")
        for handle in hooks:
            handle.remove()
        alone = [llm.generate(question.ours, greedy(8), use_tqdm=False, adapter=one)[0] for one in ("mine", None)]
        both = llm.generate([question.ours] * 2, greedy(8), use_tqdm=False, adapter=["mine", None])
        assert [one.outputs[0].token_ids for one in both] == [one.outputs[0].token_ids for one in alone]
        compare(llm, row, model, processor, question)


@pytest.mark.parametrize("name", ["qwen2_vl", "text-qwen3_next"])
def test_dora_is_that_of_peft(world: LoadedModels, tmp_path: Path, name: str) -> None:
    """Outputs of layers with a bias and of joined and reordered weights are scaled, merged or not; other rows stay."""
    (chosen, items), row, base = TARGETS[name], ROWS[name], world.folder(name)
    model, processor = row.load(base)
    pairs = matrices(model, chosen)
    lengths = magnitudes(model, pairs)
    folder = write(tmp_path / "adapter", str(base), pairs, more=dora_tensors(lengths), use_dora=True)
    question = ask(row, items, 0)
    with make_llm(row, base, enable_lora=True) as llm:
        info = llm.load_adapter("mine", folder)
        assert info.num_bytes <= store(llm).capacity
        with pytest.raises(AssertionError):
            compare(llm, row, model, processor, question, adapter="mine")
        hooks = hook_dora(model, pairs, 2.0, lengths)
        compare(llm, row, model, processor, question, adapter="mine")
        alone = [llm.generate(question.ours, greedy(8), use_tqdm=False, adapter=one)[0] for one in ("mine", None)]
        both = llm.generate([question.ours] * 2, greedy(8), use_tqdm=False, adapter=["mine", None])
        assert tokens(both) == tokens(alone)
    with make_llm(row, folder) as merged:
        compare(merged, row, model, processor, question)
    for handle in hooks:
        handle.remove()


def test_dora_on_quantised_weights(world: LoadedModels, tmp_path: Path) -> None:
    """The base weight's rows have the lengths of the weight that is multiplied: a length of its own changes nothing."""
    row, base = ROWS["qwen2_vl"], world.folder("qwen2_vl")
    model, _ = row.load(base)
    pairs = {name: (down, up * 0) for name, (down, up) in matrices(model, TARGETS["qwen2_vl"][0]).items()}
    lengths = {name: model.get_submodule(name).weight.norm(dim=1) for name in pairs}
    folder = write(tmp_path / "adapter", str(base), pairs, more=dora_tensors(lengths), use_dora=True)
    for options, near in (({}, 1e-5), ({"dtype": "bfloat16"}, 0.01), ({"quantization": "int4"}, 0.2)):
        with make_llm(row, base, enable_lora=True, **options) as llm:
            llm.load_adapter("mine", folder)
            (adapter,) = store(llm)._adapters.values()
            assert adapter.packed.table is not None
            weights = adapter.packed.table._products.values()
            gains = [(some.ups[shard], gain) for some in weights for shard, (gain, _) in some.gains.items()]
            assert len(gains) == len(pairs)
            for (_, outputs, _), gain in gains:
                own = gain[: outputs.stop - outputs.start].float()
                torch.testing.assert_close(own, torch.ones(len(own)), rtol=near, atol=near)


@pytest.fixture(scope="module")
def base(world: LoadedModels) -> Path:
    return world.folder("qwen2_vl")


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of several ranks, which change different layers."""
    model, _ = ROWS["qwen2_vl"].load(base)
    root = tmp_path_factory.mktemp("several")
    chosen = (r"language_model.*(q_proj|v_proj)$", r"language_model.*(v_proj|down_proj)$", r"language_model.*(gate|o)_proj$")
    return [
        write(root / str(seed), str(base), matrices(model, chosen[seed % 3], rank=2 + 3 * seed, seed=seed)) for seed in range(4)
    ]


def test_bits_do_not_depend_on_the_batch(base: Path, folders: list[Path]) -> None:
    """Chunked prompts, decode rows, and rows of other adapters or none: the same bits as alone, also from the prefix cache."""
    row = ROWS["qwen2_vl"]
    params = greedy(12, logprobs=5)
    questions = [ask(row, "i" * (seed % 3), seed).ours for seed in range(8)]
    names = [None if seed % 5 == 4 else str(seed % 5) for seed in range(8)]
    with make_llm(row, base, enable_lora=True, max_num_batched_tokens=24, batch_invariant=True) as llm:
        for name, folder in enumerate(folders):
            llm.load_adapter(str(name), folder)
        together = llm.generate(questions, params, use_tqdm=False, adapter=names)
        alone = []
        for question, name in zip(questions, names, strict=True):
            llm.reset_prefix_cache()
            alone += llm.generate(question, params, use_tqdm=False, adapter=name)
        again = llm.generate(questions, params, use_tqdm=False, adapter=names)
        other = llm.generate(questions, params, use_tqdm=False, adapter=[*names[1:], names[0]])
    for one, two, three in zip(together, alone, again, strict=True):
        assert tokens([one]) == tokens([two]) == tokens([three])
        assert logprobs(one) == logprobs(two) == logprobs(three)
    changed = [logprobs(one) != logprobs(two) for one, two in zip(together, other, strict=True)]
    assert changed == [True] * len(changed)


def test_lora_requests_as_vllm_writes_them(base: Path, folders: list[Path]) -> None:
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True, max_loras=1, max_lora_rank=16) as llm:
        prompt = {"prompt_token_ids": [5, 6, 7, 8]}
        first = LoRARequest("first", 1, str(folders[0]))
        (by_request,) = llm.generate(prompt, greedy(8), use_tqdm=False, lora_request=first)
        (by_name,) = llm.generate(prompt, greedy(8), use_tqdm=False, adapter="first")
        (streamed,) = [one for one in llm.stream(prompt, greedy(8), lora_request=first) if one.finished]
        mixed = llm.generate([prompt] * 2, greedy(8), use_tqdm=False, lora_request=[None, first])
        plain = llm.generate(prompt, greedy(8), use_tqdm=False)
        assert tokens([by_request]) == tokens([by_name]) == tokens([streamed]) == tokens(mixed[1:]) != tokens(plain)
        assert tokens(mixed[:1]) == tokens(plain)
        (info,) = llm.list_adapters()
        assert (info.name, info.path, info.rank, info.pinned, info.loaded) == ("first", str(folders[0]), 2, False, True)
        with pytest.raises(InputError, match="two spellings"):
            llm.generate(prompt, lora_request=first, adapter="first")
        with pytest.raises(InputError, match="3 values of adapter for 2 prompts"):
            llm.generate([prompt] * 2, adapter=["first", None, None])
        with pytest.raises(InputError, match="no adapter 'other' is loaded") as caught:
            llm.generate(prompt, adapter="other")
        assert (caught.value.info.code, caught.value.info.param) == ("unknown_name", "adapter")
        with pytest.raises(InputError) as caught:
            llm.generate(prompt, adapter=5)
        assert (caught.value.info.code, caught.value.info.param) == ("invalid_value", "adapter")


def test_sessions_sleep_and_the_engines_process(base: Path, folders: list[Path]) -> None:
    """Turns of a live session keep its adapter; adapters come back after sleep and in a new process."""
    row, part, more = ROWS["qwen2_vl"], {"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": [9, 10]}
    expected = list[Any]()
    for options in ({}, {"engine_process": True}):
        with make_llm(row, base, enable_lora=True, **options) as llm:
            llm.load_adapter("a", folders[1])
            llm.load_adapter("b", folders[2])
            with llm.live(part, greedy(6), adapter="a") as session:
                answers = [session.answer()]
                session.append(more)
                answers.append(session.answer())
            whole = [*part["prompt_token_ids"], *answers[0].outputs[0].token_ids, *more["prompt_token_ids"]]
            asked = llm.generate([{"prompt_token_ids": whole}] * 2, greedy(6), use_tqdm=False, adapter=["a", "b"])
            assert tokens(answers[1:]) == tokens(asked[:1]) != tokens(asked[1:])
            llm.sleep()
            llm.wake_up()
            again = llm.generate([{"prompt_token_ids": whole}] * 2, greedy(6), use_tqdm=False, adapter=["a", "b"])
            assert tokens(again) == tokens(asked)
            if options:
                os.kill(llm.engine.loop.core.pid, signal.SIGKILL)
                wait_until(lambda: llm.engine.loop.num_restarts == 1)
                restarted = llm.generate([{"prompt_token_ids": whole}] * 2, greedy(6), use_tqdm=False, adapter=["a", "b"])
                assert tokens(restarted) == tokens(asked)
            expected.append(tokens(asked))
    assert expected[0] == expected[1]


def store(llm: LLM) -> Any:
    return llm.engine.loop.core.executor.runner.adapters


def loaded(llm: LLM) -> set[str]:
    """Return the identities of the adapters in the engine, after the messages so far."""
    gc.collect()
    llm.engine.loop.call(lambda _: None).result()
    return set(store(llm)._adapters)


def test_a_reloaded_name_in_random_histories(base: Path, folders: list[Path], tmp_path: Path) -> None:
    """Requests that run keep the content they began with; new ones get the new content; nothing is stale or kept."""
    rng, row = random.Random(0), ROWS["qwen2_vl"]
    prompt = {"prompt_token_ids": list(range(5, 45))}
    with make_llm(row, base, enable_lora=True) as llm:
        expected = {None: tokens(llm.generate(prompt, greedy(24), use_tqdm=False))[0]}
        for index, folder in enumerate(folders):
            llm.load_adapter("it", folder)
            (expected[index],) = tokens(llm.generate(prompt, greedy(24), use_tqdm=False, adapter="it"))
        assert len(set(expected.values())) == len(expected)
        content = dict[str, int]()
        running = list[tuple[Any, int | None, list[Any]]]()  # stream, its content, its outputs
        for _ in range(60):
            action = rng.choice(("load", "begin", "begin", "step", "step", "end", "unload", "abort"))
            if action == "load":
                name = rng.choice("xyz")
                content[name] = rng.randrange(len(folders))
                folder = tmp_path / name
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(folders[content[name]], folder)
                llm.load_adapter(name, folder)
            elif action == "unload" and content:
                name = rng.choice(sorted(content))
                llm.unload_adapter(name)
                del content[name]
            elif action == "begin" and len(running) < 6:
                name = rng.choice([None, *sorted(content)])
                answer = llm.stream(prompt, greedy(24), adapter=name)
                running.append((answer, None if name is None else content[name], [next(answer)]))
            elif running:
                index = rng.randrange(len(running))
                answer, made, outputs = running[index]
                if action == "step":
                    outputs += [one for one in [next(answer, None)] if one is not None]
                else:
                    running.pop(index)
                    if action == "end":
                        assert tokens([*outputs, *answer][-1:]) == [expected[made]]
                    answer.close()
        for answer, made, outputs in running:
            assert tokens([*outputs, *answer][-1:]) == [expected[made]]
        del answer, running
        assert loaded(llm) == {info.identity for info in llm.list_adapters()}
        for name in content:
            llm.unload_adapter(name)
        llm.unload_adapter("it")
        assert loaded(llm) == set()
        assert store(llm).num_bytes == 0


def test_adapters_make_room_for_others(base: Path, folders: list[Path]) -> None:
    """The one used least recently goes first, never one that is pinned or in use; it is read again when it is asked for."""
    row, prompt = ROWS["qwen2_vl"], {"prompt_token_ids": [5, 6, 7, 8]}
    with make_llm(row, base, enable_lora=True, max_loras=1) as llm:
        for name in "ab":
            llm.load_adapter(name, folders[1])
        llm.load_adapter("c", folders[2])
        asked = llm.generate([prompt] * 2, greedy(8), use_tqdm=False, adapter=["a", "c"])
        store(llm).capacity = store(llm).num_bytes  # room for these two only
        llm.pin_adapter("a")
        llm.generate(prompt, greedy(1), use_tqdm=False, adapter="b")
        llm.load_adapter("d", folders[0])  # in place of c, although b was not used since
        assert {info.name: info.loaded for info in llm.list_adapters()} == {"a": True, "b": True, "c": False, "d": True}
        with llm.live(prompt, greedy(4), adapter="d") as session:
            session.answer()
            (refused,) = llm.generate(prompt, greedy(8), use_tqdm=False, adapter="c")
            assert (refused.error.code, refused.error.param) == ("over_limit", "max_loras")
        llm.pin_adapter("a", False)
        (again,) = llm.generate(prompt, greedy(8), use_tqdm=False, adapter="c")
        assert tokens([again]) == tokens(asked[1:])


def test_a_joined_layer_and_a_part_of_it_are_refused(world: LoadedModels, tmp_path: Path) -> None:
    """Threads would change the part's outputs at the same time."""
    base = world.folder("text-qwen3_next")
    model, _ = ROWS["text-qwen3_next"].load(base)
    joined = matrices(model, "in_proj_qkvz$")
    name, (down, up) = next(iter(joined.items()))
    outputs = model.get_submodule(name.replace("in_proj_qkvz", "out_proj")).in_features
    part = {name.replace("in_proj_qkvz", "in_proj_z"): (down.clone(), up[:outputs].clone())}
    with make_llm(ROWS["text-qwen3_next"], base, enable_lora=True) as llm:
        for kind, pairs in {"joined": joined, "part": part}.items():
            llm.load_adapter(kind, write(tmp_path / kind, str(base), pairs))
        with pytest.raises(CheckpointError):
            llm.load_adapter("both", write(tmp_path / "both", str(base), joined | part))


def test_an_adapter_that_never_fits_unloads_no_other(base: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by its header."""
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True) as llm:
        sizes = {folder: llm.load_adapter(folder.name, folder).num_bytes for folder in folders[:3]}
        small, large = min(folders[:3], key=sizes.__getitem__), max(folders[:3], key=sizes.__getitem__)
        for name in {info.name for info in llm.list_adapters()} - {small.name}:
            llm.unload_adapter(name)
        store(llm).capacity = sizes[large] - 1
        monkeypatch.setattr(adapter_store, "read_file", None)
        with pytest.raises(InputError) as caught:
            llm.load_adapter("large", large)
        info = caught.value.info
        assert (info.code, info.param, info.limit, info.value) == ("over_limit", "max_loras", sizes[large] - 1, sizes[large])
        assert {info.name: info.loaded for info in llm.list_adapters()} == {small.name: True}


@pytest.mark.parametrize("options", [{}, {"engine_process": True}], ids=["sleep", "restart"])
def test_an_adapter_that_is_missing_for_a_time(base: Path, folders: list[Path], tmp_path: Path, options: Any) -> None:
    """Its requests are refused until it is loaded again; earlier loads of the same content then free nothing."""
    prompt, folder, hidden = {"prompt_token_ids": [5, 6, 7, 8]}, tmp_path / "a", tmp_path / "hidden"
    shutil.copytree(folders[1], folder)
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True, **options) as llm:
        for name in "ab":
            llm.load_adapter(name, folder)
        expected = tokens(llm.generate(prompt, greedy(6), use_tqdm=False, adapter="a"))
        folder.rename(hidden)
        if options:
            os.kill(llm.engine.loop.core.pid, signal.SIGKILL)
            wait_until(lambda: llm.engine.loop.num_restarts == 1)
        else:
            llm.sleep()
            llm.wake_up()
        for name in "ab":
            (refused,) = llm.generate(prompt, greedy(6), use_tqdm=False, adapter=name)
            assert refused.error.code == "unknown_name"
        hidden.rename(folder)
        llm.load_adapter("a", folder)  # ends what the name stood for before
        gc.collect()
        assert tokens(llm.generate(prompt, greedy(6), use_tqdm=False, adapter="a")) == expected
        llm.unload_adapter("a")
        gc.collect()
        assert tokens(llm.generate(prompt, greedy(6), use_tqdm=False, adapter="b")) == expected


def test_any_error_of_a_reload_refuses_its_requests_only(
    base: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7, 8]}
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True) as llm:
        executor = llm.engine.loop.core.executor
        real, broken = executor.load_adapter, str(folders[1])
        for name, folder in zip("ab", folders[1:3], strict=True):
            llm.load_adapter(name, folder)

        def load(folder: str, *rest: Any) -> Any:
            return real(folder, *rest) if folder != broken else [].pop()

        monkeypatch.setattr(executor, "load_adapter", load)
        llm.sleep()
        llm.wake_up()
        one, two = llm.generate([prompt] * 2, greedy(2), use_tqdm=False, adapter=["a", "b"])
        assert (one.error.code, two.error) == ("unknown_name", None)


def test_a_process_that_cannot_reload_is_ended(base: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True, engine_process=True) as llm:
        llm.load_adapter("a", folders[1])
        loop, core = llm.engine.loop, llm.engine.loop.core
        ask, first = core._ask, core.pid
        monkeypatch.setattr(core, "_ask", lambda verb, *rest: [].pop() if "reload" in verb else ask(verb, *rest))
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: loop.is_dead)
        assert core.pid != first
        assert core._child.process.poll() is not None


def test_a_death_that_an_unload_notices_first_restarts_the_process(base: Path, folders: list[Path]) -> None:
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True, engine_process=True) as llm:
        info, core = llm.load_adapter("a", folders[1]), llm.engine.loop.core

        def unload(_: Any) -> None:
            os.kill(core.pid, signal.SIGKILL)
            os.waitid(os.P_PID, core.pid, os.WEXITED | os.WNOWAIT)
            core.unload_adapter(info.identity)

        llm.engine.loop.send(unload)
        wait_until(lambda: llm.engine.loop.num_restarts == 1)
        assert llm.engine.loop.num_deaths == 1


def test_an_interrupted_load_keeps_nothing(base: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True) as llm:
        real = llm.engine.loop.call

        def interrupted() -> None:
            raise KeyboardInterrupt  # not by a signal, which a process in the background may ignore

        def call(message: Any) -> Any:
            future = real(message)
            wait([future])
            monkeypatch.setattr(future, "result", interrupted)
            return future

        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.loop, "call", call)
            with pytest.raises(KeyboardInterrupt):
                llm.load_adapter("a", folders[1])
        monkeypatch.undo()
        wait_until(lambda: loaded(llm) == set())
        assert not llm.engine.loop.core._adapters
        llm.load_adapter("a", folders[1])  # no lock is held


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_between_two_parts_leaves_nothing_that_was_read(
    base: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch, process: bool, error: type[BaseException]
) -> None:
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True, engine_process=process) as llm:
        real, asked = llm.engine.loop.call, list[object]()

        def call(message: Any) -> Any:
            future = real(message)
            wait([future])
            asked.append(future.result())
            if len(asked) == 5:
                raise error
            return future

        monkeypatch.setattr(adapters, "_SLICE_SECONDS", 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.loop, "call", call)
            with pytest.raises(error):
                llm.load_adapter("a", folders[1])
        assert asked == [None] * 5
        monkeypatch.undo()
        core = llm.engine.loop.core
        if process:
            future = real(lambda loop: loop.core.load_adapter(str(folders[1]), 0.0, True))
            assert future.result() is None  # reading begins: one part is not enough
        else:
            assert loaded(llm) == set()
            assert store(llm)._loading is None
        assert not core._adapters
        assert llm.list_adapters() == ()
        llm.load_adapter("a", folders[1])


def test_an_error_while_an_adapter_is_read_leaves_nothing(
    base: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True) as llm:
        before = llm.load_adapter("a", folders[2])
        identities = loaded(llm)
        for place in ("change_digest", "file_headers", "read_file"):
            with monkeypatch.context() as patch:
                patch.setattr(adapter_store, place, lambda *_: [].pop())
                with pytest.raises(IndexError):
                    llm.load_adapter("a", folders[1])
            assert loaded(llm) == identities
            assert store(llm)._loading is None
            assert llm.list_adapters() == (before,)
        llm.load_adapter("a", folders[1])


def test_a_closed_engine_loads_nothing(base: Path, folders: list[Path]) -> None:
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True) as llm:
        llm.load_adapter("a", folders[1])
    lora = LoRARequest("b", 1, str(folders[2]))
    for call in (
        lambda: llm.load_adapter("b", folders[2]),
        lambda: llm.generate("a", adapter="a", use_tqdm=False),
        lambda: llm.request("a", lora_request=lora),
        llm.reset_prefix_cache,
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.info.code == "engine_closed"


def test_a_bad_adapter_fails_its_prompts_only(base: Path, folders: list[Path], tmp_path: Path, llm: LLM) -> None:
    prompt, missing = {"prompt_token_ids": [5, 6, 7, 8]}, LoRARequest("missing", 1, str(tmp_path / "missing"))
    choices = [None, missing, LoRARequest("there", 2, str(folders[1]))]
    one, two, three = llm.generate([prompt] * 3, greedy(2), use_tqdm=False, lora_request=choices)
    assert (one.error, two.error.code, three.error) == (None, "invalid_config", None)
    chats = [[{"role": "user", "content": "a"}]] * 2
    one, two = llm.chat(chats, greedy(2), use_tqdm=False, chat_template="{{ 'a' }}", lora_request=choices[:2])
    assert (one.error, two.error.code) == (None, "invalid_config")
    assert "missing" not in {info.name for info in llm.list_adapters()}
    llm.unload_adapter("there")


def test_coroutines_do_not_wait_for_an_adapter_to_be_read(folders: list[Path], llm: LLM) -> None:
    go_on = threading.Event()
    held = llm.engine.loop.call(lambda _: go_on.wait(20))

    async def run() -> list[Any]:
        answer = AsyncLLM(llm).generate(
            {"prompt_token_ids": [5, 6, 7, 8]}, greedy(2), lora_request=LoRARequest("read", 1, str(folders[1]))
        )
        first = asyncio.ensure_future(anext(answer))
        await asyncio.sleep(0.1)
        go_on.set()
        return [await first, *[output async for output in answer]]

    outputs = asyncio.run(run())
    assert held.result()
    assert outputs[-1].error is None
    llm.unload_adapter("read")


def test_requests_of_one_adapter_read_it_once(folders: list[Path], llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, reads = llm.engine.loop.core.executor, []
    real = executor.load_adapter

    def load(folder: str, seconds: float, resume: bool) -> Any:
        reads.extend([] if resume else [folder])
        return real(folder, seconds, resume)

    monkeypatch.setattr(executor, "load_adapter", load)
    lora = LoRARequest("once", 1, str(folders[1]))
    tokens(llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}] * 6, greedy(2), use_tqdm=False, lora_request=lora))
    assert reads == [str(folders[1])]
    llm.unload_adapter("once")


def test_steps_are_computed_while_an_adapter_is_read(folders: list[Path], llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, events = llm.engine.loop.core.executor, list[str]()
    load, execute = executor.load_adapter, executor.execute

    def noted_load(*arguments: Any) -> Any:
        loaded = load(*arguments)
        events.append("read" if loaded is None else "loaded")
        return loaded

    def noted_execute(output: Any) -> Any:
        events.append("step")
        return execute(output)

    prompt, outputs = {"prompt_token_ids": [5, 6, 7, 8]}, []
    (expected,) = tokens(llm.generate(prompt, greedy(40), use_tqdm=False))
    monkeypatch.setattr(adapters, "_SLICE_SECONDS", 0.0)
    monkeypatch.setattr(executor, "load_adapter", noted_load)
    monkeypatch.setattr(executor, "execute", noted_execute)
    with ThreadPoolExecutor() as threads:
        for output in llm.stream(prompt, greedy(40)):
            outputs.append(output)
            if len(outputs) == 1:
                loading = threads.submit(llm.load_adapter, "slow", folders[1])
        loading.result()
    assert tuple(outputs[-1].outputs[0].token_ids) == expected
    assert "step" in events[events.index("read") : events.index("loaded")]
    llm.unload_adapter("slow")


def test_reading_that_was_left_is_not_resumed(base: Path, folders: list[Path], tmp_path: Path) -> None:
    """The files may have changed since."""
    folder = tmp_path / "adapter"
    shutil.copytree(folders[1], folder)
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True) as llm:
        core = llm.engine.loop.core
        assert core.load_adapter(str(folder), 0.0) is None
        assert (core.load_adapter(str(folder), 0.0, True), store(llm).num_bytes) == (None, 0)
        shutil.copy(folders[2] / "adapter_model.safetensors", folder)
        identities = [llm.load_adapter("mine", path).identity for path in (folder, folders[2], folders[1])]
        assert identities[0] == identities[1] != identities[2]
        assert core.load_adapter(str(folder), 0.0) is None
        llm.sleep()
        llm.wake_up()
        assert core.load_adapter(str(folders[1]), resume=True).identity == identities[2]


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [("~nobody_x/dir", InputError, "names no folder"), ("/tmp/" + "x" * 300, CheckpointError, "cannot be read")],
)
def test_paths_that_are_refused(llm: LLM, path: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        llm.load_adapter("a", path)


def test_too_little_memory_for_an_adapter(folders: list[Path], llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(AdaptedLayers, "pack", pack)
    with pytest.raises(InputError, match="too little memory") as caught:
        llm.load_adapter("a", folders[3])
    assert caught.value.info.code == "out_of_memory"


def test_drafts_and_preemption(base: Path, folders: list[Path]) -> None:
    """Drafted tokens are verified by the adapter of their sequence; sequences that are computed again get it again."""
    row, names = ROWS["qwen2_vl"], [None, "0", "1", "2"]
    prompts = [{"prompt_token_ids": [5 + seed, *[6, 7, 8] * 6]} for seed in range(4)]
    answers = []
    for options in ({}, {"speculative_config": {"method": "ngram"}}, {"kv_cache_memory_bytes": 60_000}):
        with make_llm(row, base, enable_lora=True, **({"max_model_len": 64} | options)) as llm:
            for name, folder in enumerate(folders):
                llm.load_adapter(str(name), folder)
            answers.append(tokens(llm.generate(prompts, greedy(30), use_tqdm=False, adapter=names)))
            if "kv_cache_memory_bytes" in options:
                assert llm.stats.preemptions > 0
            elif options:
                assert sum(sum(one.accepted) for one in llm.stats.drafts) > 0
    assert answers[0] == answers[1] == answers[2]


def test_the_memory_of_adapters_is_planned(base: Path, folders: list[Path]) -> None:
    row = ROWS["qwen2_vl"]
    with make_llm(row, base, enable_lora=True, max_loras=3, max_lora_rank=16) as llm:
        plan = llm.explain()
        infos = [llm.load_adapter(str(name), folder) for name, folder in enumerate(folders[:3])]
        assert 0 < sum(info.num_bytes for info in infos) == store(llm).num_bytes <= plan.adapters == store(llm).capacity
    with make_llm(row, base, enable_lora=True, max_loras=6, max_lora_rank=16) as llm:
        assert llm.explain().adapters == 2 * plan.adapters
    with make_llm(row, base) as llm:
        assert llm.explain().adapters == 0
        assert llm.explain().total < plan.total
        with pytest.raises(InputError) as caught:
            llm.load_adapter("a", folders[0])
        assert (caught.value.info.code, caught.value.info.param) == ("unsupported", "enable_lora")


def test_only_rows_with_an_adapter_pay(base: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of an adapter see the rows of its sequences and no others."""
    counts, real = list[tuple[int, int]](), StepTable.add_  # rows of the step, and of the adapters

    def add_(self: Any, out: torch.Tensor, x: torch.Tensor, number: int) -> None:
        counts.append((len(x), sum(len(x) if rows is None else len(rows) for rows, _ in self._keep)))
        real(self, out, x, number)

    monkeypatch.setattr(StepTable, "add_", add_)
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True) as llm:
        for name, folder in enumerate(folders[:2]):
            llm.load_adapter(str(name), folder)
        prompts = [{"prompt_token_ids": list(range(5, 5 + count))} for count in (3, 5, 7)]
        llm.generate(prompts, greedy(32), use_tqdm=False, adapter=["0", None, None])
        assert {adapted for _, adapted in counts} == {3, 1}  # a prompt, and one row per step
        assert max(rows for rows, _ in counts) >= 3
        counts.clear()
        llm.generate(prompts, greedy(1), use_tqdm=False)
        assert counts == []


@pytest.mark.parametrize("kernels", ["low_rank=torch", "low_rank=native"])
def test_recorded_steps_with_any_adapters_have_the_bits_of_others(base: Path, folders: list[Path], kernels: str) -> None:
    """Decode steps are recorded once, and repeated with other adapters and none."""
    choices: list[list[Any]] = [["0", "1", None], ["1", "1", "0"], [None, "0", None], ["0", "0", "0"], [None] * 3]
    prompts = [{"prompt_token_ids": list(range(5, 5 + count))} for count in (3, 5, 7)]
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True, kernels=kernels) as llm:
        for name, folder in enumerate(folders[:2]):
            llm.load_adapter(str(name), folder)
        graphs = llm.engine.loop.core.executor.runner.decode_graphs
        found = [tokens_and_logprobs(llm, prompts, chosen) for chosen in choices]
        recorded = [graph for key, graph in graphs._graphs.items() if key[1]]
        assert bool(recorded) == (kernels == "low_rank=native")
        assert None not in recorded
        for answers, chosen in zip(found, choices, strict=True):
            for prompt, adapter, answer in zip(prompts, chosen, answers, strict=True):
                assert tokens_and_logprobs(llm, [prompt], [adapter]) == [answer]


def tokens_and_logprobs(llm: LLM, prompts: list[Any], adapters: list[Any]) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    outputs = llm.generate(prompts, params, use_tqdm=False, adapter=adapters)
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]


HOSTILE_NAMES = ("", "../a", "/etc/passwd", "a/../b", ".", "a b", "a\n", "a\\b", "x" * 201, "a//b", 5, None)


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=repr)
def test_names_that_are_refused(base: Path, folders: list[Path], llm: LLM, name: Any) -> None:
    with pytest.raises(InputError) as caught:
        llm.load_adapter(name, folders[0])
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_value", "name")


@pytest.fixture(scope="module")
def llm(base: Path) -> Any:
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True, max_lora_rank=16) as made:
        yield made


def with_tensors(folder: Path, target: Path, change: Any, **settings: Any) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, target / "adapter_model.safetensors")
    config = json.loads((target / "adapter_config.json").read_text()) | settings
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


def set_nan(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values()))[0, 0] = math.nan


def set_large(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if name.endswith("lora_B.weight"):
            tensors[name][0, 0] = 3e38


def set_integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: tensor.to(torch.int8) for name, tensor in tensors.items()})


def set_rank(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        letter = name.split("lora_")[1][0]
        tensors[name] = torch.zeros(17, tensor.shape[1]) if letter == "A" else torch.zeros(tensor.shape[0], 17)


def set_shape(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("lora_A.weight"):
            tensors[name] = torch.zeros(len(tensor), tensor.shape[1] + 2)


def set_outputs(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("lora_B.weight"):
            tensors[name] = torch.zeros(len(tensor) + 1, tensor.shape[1])


def drop_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(iter(tensors))]


def add(name: str, *shape: int) -> Any:
    return lambda tensors: tensors.update({f"base_model.model.{name}": torch.ones(shape)})


def add_pair(name: str, outputs: int, inputs: int) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        add(f"{name}.lora_A.weight", 2, inputs)(tensors)
        add(f"{name}.lora_B.weight", outputs, 2)(tensors)

    return change


TEXT, TRAINED = "model.language_model", "token_adapter.trainable_tokens_delta"
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "nan": (set_nan, {}, CheckpointError, r"q_proj hold NaN"),
    "overflow": (set_large, {"lora_alpha": 1e6}, CheckpointError, "numbers beyond float32"),
    "integers": (set_integers, {}, CheckpointError, "holds int8"),
    "rank": (set_rank, {}, ConfigError, r"has rank 17, above max_lora_rank=16; raise it"),
    "inputs": (set_shape, {}, CheckpointError, "do not fit the base model"),
    "outputs": (set_outputs, {}, CheckpointError, "do not fit the base model"),
    "half a pair": (drop_one, {}, CheckpointError, "are not two matrices of one rank"),
    "unknown layer": (
        add_pair(f"{TEXT}.layers.99.mlp.up_proj", 4, 4), {}, CheckpointError, r"changes model\.language_model\.layers\.99",
    ),
    "tower": (add_pair("model.visual.blocks.0.attn.qkv", 4, 4), {}, CheckpointError, "of model.visual.blocks.0.attn.qkv are"),
    "head": (add("lm_head.weight", 4, 4), {}, CheckpointError, "lm_head.weight has 4 rows"),
    "embeddings": (
        add_pair(f"{TEXT}.embed_tokens", 4, 4), {}, CheckpointError, "do not fit the base model",
    ),
    "dora without tensors": (lambda _: None, {"use_dora": True}, CheckpointError, "no lora_magnitude_vector of"),
    "dora tensors": (
        add(f"{TEXT}.layers.0.self_attn.q_proj.lora_magnitude_vector.weight", 4), {}, CheckpointError, "needs use_dora",
    ),
    "other method": (lambda _: None, {"peft_type": "LOHA"}, ConfigError, "peft_type='LOHA'"),
    "alpha": (lambda _: None, {"lora_alpha": "many"}, ConfigError, "lora_alpha='many'"),
    "infinite alpha": (lambda _: None, {"lora_alpha": math.inf}, ConfigError, "lora_alpha"),
    "pattern": (lambda _: None, {"alpha_pattern": {"((a+)+)+b": 3}}, ConfigError, "matched in linear time"),
    "bias": (lambda _: None, {"bias": "all"}, ConfigError, "bias='all'"),
    "tokens without ids": (add(f"{TEXT}.embed_tokens.{TRAINED}", 2, 64), {}, CheckpointError, "of model.language_model.embed"),
    "ids without tokens": (lambda _: None, {"trainable_token_indices": [1, 2]}, CheckpointError, "no trainable_tokens_delta"),
    "fewer ids": (add(f"{TEXT}.embed_tokens.{TRAINED}", 2, 64), {"trainable_token_indices": [1]}, CheckpointError, "as many"),
    "one id twice": (
        add(f"{TEXT}.embed_tokens.{TRAINED}", 2, 64), {"trainable_token_indices": [1, 1]}, CheckpointError, "as many",
    ),
    "ids of another kind": (
        add(f"{TEXT}.embed_tokens.{TRAINED}", 2, 64), {"trainable_token_indices": [10**4000, -1]}, CheckpointError, "as many",
    ),
    "ids of another module": (
        add(f"{TEXT}.embed_tokens.{TRAINED}", 2, 64), {"trainable_token_indices": {"lm_head": [1, 2]}},
        CheckpointError, "as many",
    ),
    "a token that the model lacks": (
        add(f"{TEXT}.embed_tokens.{TRAINED}", 2, 64), {"trainable_token_indices": [1, 640]}, CheckpointError, "up to 640",
    ),
    "narrow tokens": (
        add(f"{TEXT}.embed_tokens.{TRAINED}", 2, 3), {"trainable_token_indices": [1, 2]}, CheckpointError, "rows of 3 numbers",
    ),
    "rows of a layer": (
        add(f"{TEXT}.layers.0.self_attn.o_proj.{TRAINED}", 2, 64), {"trainable_token_indices": {"o_proj": [1, 2]}},
        CheckpointError, r"for model\.language_model\.layers\.0\.self_attn\.o_proj",
    ),
    "norm of heads": (
        add(f"{TEXT}.layers.0.self_attn.q_norm.weight", 16), {}, CheckpointError, r"layers\.0\.self_attn\.q_norm\.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_are_refused(folders: list[Path], llm: LLM, tmp_path: Path, case: str) -> None:
    """Nothing of a refused adapter stays, and the name keeps what it stood for."""
    change, settings, kind, text = REFUSED[case]
    folder = with_tensors(folders[0], tmp_path / "changed", change, **settings)
    before = llm.load_adapter("kept", folders[1])
    with pytest.raises(kind, match=text):
        llm.load_adapter("kept", folder)
    assert llm.list_adapters() == (before,)
    assert loaded(llm) == {before.identity}


def test_files_that_are_refused(folders: list[Path], llm: LLM, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (empty, tmp_path / "absent", Path("\ud800")):
        with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
            llm.load_adapter("a", folder)
    for path in ("", "a\0b"):
        with pytest.raises(InputError) as caught:
            llm.load_adapter("a", path)
        assert (caught.value.info.code, caught.value.info.param) == ("invalid_value", "path")
    pickled = tmp_path / "pickled"
    shutil.copytree(folders[0], pickled)
    torch.save({}, pickled / "adapter_model.bin")
    (pickled / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin"):
        llm.load_adapter("a", pickled)
    (pickled / "adapter_model.safetensors").write_bytes((pickled / "adapter_model.bin").read_bytes())
    with pytest.raises(CheckpointError):
        llm.load_adapter("a", pickled)
    (pickled / "adapter_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="is not a JSON object"):
        llm.load_adapter("a", pickled)


def test_a_model_with_adapters_of_its_own(world: LoadedModels) -> None:
    name = "granite_speech_adapter"
    with pytest.raises(ConfigError, match="enable_lora=True"):
        make_llm(ROWS[name], world.folder(name), enable_lora=True)


def test_more_adapters_than_the_memory_holds(base: Path) -> None:
    row = ROWS["qwen2_vl"]
    for options in ({"max_loras": 10**5000}, {"max_lora_rank": 10**12}, {"max_loras": 10**12}):
        with pytest.raises(ConfigError) as caught:
            make_llm(row, base, enable_lora=True, **options)
        assert caught.value.info.param == "max_loras"
    info = caught.value.info
    assert isinstance(info.limit, int)
    assert 8 < info.limit < info.value == 10**12
    with pytest.raises(ConfigError):
        make_llm(row, base, enable_lora=True, max_loras=info.limit + 1)


def test_an_engine_without_a_decoder(base: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(ROWS["qwen2_vl"], base, enable_lora=True, parts="encoder")
    assert caught.value.info.param == "enable_lora"
