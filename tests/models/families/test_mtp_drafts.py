"""Layers for multi-token prediction as proposers: answers are those without, and what they predict is verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mtp
import pytest
import torch
from drafting import drafting, free_drafter
from family import ask
from mtp import STEMS, Drafter, add_mtp
from parity import ROWS, LoadedModels, greedy, make_llm
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.engine.drafts import drafter
from sensorium.engine.speculative_config import DraftLimits

CONFIG = {"method": "mtp", "num_speculative_tokens": 3}
LIMITS = DraftLimits(depth=3, predicted=3, method="mtp")
NAMES = ["glm_ocr", "glm4v_moe", "text-deepseek_v3", "text-qwen3_next", "qwen3_5"]
World = Callable[[str], Path]


def place(name: str) -> tuple[str, int, str]:
    row, _, variant = name.partition("/")
    return row, 0, variant


@pytest.fixture(scope="module")
def world(loaded: LoadedModels, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return a function from a row's name to a checkpoint with a layer for multi-token prediction."""
    root = tmp_path_factory.mktemp("mtp")

    def build(name: str) -> Path:
        drafter = Drafter(loaded.oracle(*place(name))[0], STEMS[name])
        return add_mtp(loaded.folder(*place(name)), root / name.replace("/", "-"), drafter, STEMS[name])

    return cache(build)


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_without(name: str, world: World) -> None:
    """In short chunks, with several sequences, prefix hits and preemption of long ones."""
    row = ROWS[place(name)[0]]
    prompts = [ask(row, case, number).ours for number, case in enumerate(row.default_cases())]
    params = SamplingParams(temperature=0.6, seed=5, max_tokens=24, ignore_eos=True, logprobs=2, n=2)
    with make_llm(row, world(name), speculative_config=CONFIG) as llm:
        assert llm.engine.config.load_mtp
        with drafting(llm, None):
            expected = [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]
        size = llm.engine.info.vocab_size
        for limits in (LIMITS, replace(LIMITS, suffix=True, shortest=2)):
            with drafting(llm, free_drafter(size, limits)):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert [output.outputs for output in outputs] == expected
                counts = {stats.proposer: stats for stats in llm.stats.drafts}
                assert counts["mtp"].num_drafted > 0
                assert not any(stats.failed for stats in counts.values())


def predictions(llm: LLM, prompt: Any, tokens: int) -> tuple[Any, list[tuple[int, ...]], list[torch.Tensor]]:
    """Return an answer, what was predicted after each of its tokens, and the hidden states of each step."""
    runner = llm.engine.loop.core.executor.runner
    seen, hidden, real = list[tuple[int, ...]](), list[torch.Tensor](), runner.predictor.predict

    def spy(model: Any, parts: Any) -> list[tuple[int, ...]]:
        (part,) = parts
        hidden.append(part.states.clone())
        seen.extend(real(model, parts))
        return seen[-1:]

    runner.predictor.predict = spy
    with drafting(llm, None):
        (output,) = llm.generate(prompt, greedy(tokens), use_tqdm=False)
    return output, seen, hidden


@pytest.mark.parametrize("name", ["glm_ocr", "text-deepseek_v3", "qwen3_5"])
def test_predictions_are_those_of_the_layer(name: str, world: World) -> None:
    """The first one after each token is that of the layer over the whole sequence at once."""
    row = ROWS[place(name)[0]]
    with make_llm(row, world(name), speculative_config=CONFIG, enable_prefix_caching=False) as llm:
        model = llm.engine.loop.core.executor.runner.model
        output, seen, hidden = predictions(llm, ask(row, "", 3).ours, 12)
        states = torch.cat(hidden)
        ids = torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])
        places = torch.arange(len(states)).expand(model.rope_axes, -1)
        logits = mtp.draft(model, ids[1:], places, states)
        expected = logits[len(output.prompt_token_ids) - 1 :].argmax(-1).tolist()
        assert [tokens[0] for tokens in seen if tokens] == expected
        assert {len(tokens) for tokens in seen if tokens} == {3}


@pytest.mark.parametrize("name", ["glm_ocr", "text-qwen3_next"])
def test_a_layer_that_is_right_is_always_accepted(name: str, world: World, tmp_path: Path) -> None:
    """The head has only zeros, so every answer, and every prediction, is token 0."""
    row, folder = ROWS[place(name)[0]], world(name)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    zeroed = {key: tensor.zero_() if key.endswith("lm_head.weight") else tensor for key, tensor in tensors.items()}
    assert any(key.endswith("lm_head.weight") for key in tensors)
    save_file(zeroed, tmp_path / "model.safetensors", {"format": "pt"})
    with make_llm(row, tmp_path, speculative_config=CONFIG) as llm, drafting(llm, free_drafter(700, LIMITS)) as scheduler:
        scheduler.drafts.drafter.rates.rate = lambda name, matched: 0.9
        before = scheduler.stats.steps
        (output,) = llm.generate(ask(row, "", 1).ours, greedy(41), use_tqdm=False)
        assert set(output.outputs[0].token_ids) == {0}
        (stats,) = output.drafts
        assert stats.num_accepted == stats.num_drafted >= 30
        assert scheduler.stats.steps - before <= 13


def test_a_failure_touches_no_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["glm_ocr"]
    prompts = [ask(row, case, number).ours for number, case in enumerate(row.default_cases())]
    with make_llm(row, world("glm_ocr"), speculative_config=CONFIG) as llm:
        with drafting(llm, None):
            expected = [output.outputs for output in llm.generate(prompts, greedy(20), use_tqdm=False)]
        real, calls = type(llm.engine.loop.core.executor.runner.model).draft, []

        def broken(*inputs: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) > 6:
                raise RuntimeError("broken")
            return real(*inputs, **more)

        monkeypatch.setattr(type(llm.engine.loop.core.executor.runner.model), "draft", broken)
        with drafting(llm, free_drafter(llm.engine.info.vocab_size, LIMITS)):
            outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
        assert [output.outputs for output in outputs] == expected
        assert 6 < len(calls) <= 6 + len(prompts), "a sequence that fails is not tried again"
        assert not llm.engine.loop.core.executor.runner.predictor.cache._rows, "its blocks are free"


def test_a_layer_whose_predictions_do_not_pay_is_not_run_any_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["text-qwen3_next"]
    with make_llm(row, world("text-qwen3_next"), speculative_config=CONFIG) as llm:
        runner, calls = llm.engine.loop.core.executor.runner, []
        real = runner.predictor.predict
        monkeypatch.setattr(runner.predictor, "predict", lambda *inputs: calls.append(1) or real(*inputs))
        with drafting(llm, free_drafter(700, LIMITS)) as scheduler:
            monkeypatch.setattr(scheduler.drafts.drafter.costs, "seconds", lambda rows: 0.5 + 0.5 * rows)
            monkeypatch.setattr(drafter, "_TRIALS", 4)
            scheduler.drafts.drafter.rates.rate = lambda name, matched: 0.99
            (output,) = llm.generate(ask(row, "", 1).ours, greedy(40), use_tqdm=False)
        (stats,) = output.drafts
        assert stats.switched_off == 1
        assert len(calls) < 30


def test_a_checkpoint_without_them_is_refused(loaded: LoadedModels) -> None:
    with pytest.raises(ConfigError, match="load_mtp"):
        make_llm(ROWS["glm_ocr"], loaded.folder("glm_ocr"), speculative_config=CONFIG)


def test_the_cache_is_planned_and_bounded(world: World) -> None:
    """It holds one sequence at least, and those that find no room are answered without predictions."""
    row = ROWS["glm_ocr"]
    prompts = [ask(row, case, number).ours for number, case in enumerate(row.default_cases())]
    for count in (1, 4):
        with make_llm(row, world("glm_ocr"), speculative_config=CONFIG, max_num_seqs=count) as llm:
            cache, plan = llm.engine.loop.core.executor.runner.predictor.cache, llm.explain()
            assert plan.draft_cache == sum(tensor.nbytes for tensor in cache.tensors) > 0
            assert replace(plan, draft_cache=0).total == plan.total - plan.draft_cache
            assert "cache of drafts" in str(plan)
            assert len(cache._free) == count * -(-(llm.engine.max_model_len + 3) // llm.engine.config.block_size)
            with drafting(llm, None):
                expected = [output.outputs for output in llm.generate(prompts, greedy(20), use_tqdm=False)]
            free = cache._free
            cache._free = free[: len(free) // count]
            outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
            assert [output.outputs for output in outputs] == expected
            llm.sleep()
            assert not cache.tensors
            llm.wake_up()
            outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
            assert [output.outputs for output in outputs] == expected
            llm.reset_prefix_cache()
    with make_llm(row, world("glm_ocr"), load_mtp=True) as llm:
        assert llm.explain().draft_cache == 0
