"""Weights that change while requests run: the requests pause, or begin again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from family import ask
from lora import matrices, write
from parity import ROWS, LoadedModels, greedy, make_llm
from safetensors.torch import load_file
from sensorium import LLM, AsyncLLM, SamplingParams
from sensorium.callers.errors import InputError
from sensorium.models import weights as model_weights

pytestmark = pytest.mark.in_process
LENGTH = 60  # tokens of an answer


class Weights:
    """A checkpoint of a family, and tensors that change its tower and decoder."""

    def __init__(self, family: str, folder: Path) -> None:
        self.row, self.base = ROWS[family], LoadedModels(folder).folder(family)
        gen, self.update = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
        for name, tensor in load_file(self.base / "model.safetensors").items():
            if "q_proj" in name or "in_proj" in name or "fc1" in name or name.endswith("norm.weight"):
                self.update[name] = tensor * (1 + torch.rand(tensor.shape, generator=gen) / 2).to(tensor.dtype)

    def engine(self, **options: Any) -> LLM:
        return make_llm(self.row, self.base, **options)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"))


def update_within(
    llm: LLM, weights: Weights, prompts: Sequence[Any], mode: Any, kinds: Sequence[str], params: Any = None, **call: Any
) -> list[list[list[int]]]:
    """Update the weights when the first answer has begun. Return the tokens of each output of each request."""

    async def run() -> list[list[list[int]]]:
        engine, begun = AsyncLLM(llm), asyncio.Event()

        async def answer(prompt: Any, kind: Any) -> list[list[int]]:
            outputs = list[list[int]]()
            async for output in engine.generate(prompt, params or greedy(LENGTH), output_kind=kind, **call):
                outputs.append(list(output.outputs[0].token_ids))
                begun.set()
                assert output.error is None
            assert output.outputs[0].finish_reason == "length"
            return outputs

        tasks = [asyncio.ensure_future(answer(prompt, kind)) for prompt, kind in zip(prompts, kinds, strict=True)]
        await begun.wait()
        version = llm.weights_version
        assert await engine.update_weights(weights.update, mode) == version + 1
        return [await task for task in tasks]

    return asyncio.run(run())


def tokens_of(llm: LLM, prompt: Any, params: Any = None, **call: Any) -> list[int]:
    (output,) = llm.generate(prompt, params or greedy(LENGTH), use_tqdm=False, **call)
    assert output.error is None
    return list(output.outputs[0].token_ids)


def continues(llm: LLM, prompt: Sequence[int], answer: list[int], before: list[int], **call: Any) -> bool:
    """Return whether an answer is a part of `before`, and then what the model answers to the prompt with this part."""
    count = next(i for i, (ours, old) in enumerate(zip(answer, before, strict=True)) if ours != old)
    for start in range(1, count + 1):  # the first tokens of both models may agree
        prompt_ids = [*prompt, *answer[:start]]
        if tokens_of(llm, {"prompt_token_ids": prompt_ids}, greedy(LENGTH - start), **call) == answer[start:]:
            return True
    return False


OPTIONS: list[dict[str, Any]] = [
    {},
    {"engine_process": True},
    {"async_scheduling": True},
    {"max_num_batched_tokens": 64, "enable_prefix_caching": True},
    {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
    {"tensor_parallel_size": 2},
    {"kv_offloading_size": 0.01, "block_size": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_paused_requests_go_on_with_the_new_weights(weights: Weights, options: Any) -> None:
    """Tokens so far stay, and those after them are the new model's: no key or value of the old weights is read."""
    prompt = [5, 6, 7, *range(20, 60)]
    with weights.engine(**options) as llm:
        before = tokens_of(llm, {"prompt_token_ids": prompt})
        llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": prompt}, ask(weights.row, "i", 0).ours]
        (deltas, (image,)) = update_within(llm, weights, prompts, "pause", ("delta", "final"))
        answer = [token for part in deltas for token in part]
        assert len(image) == len(answer) == LENGTH
        assert answer != before
        assert continues(llm, prompt, answer, before)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_answers_begin_again_with_the_new_weights(weights: Weights, options: Any) -> None:
    """Whole answers are those of the new model. An answer of which the caller has a part goes on."""
    prompts = [ask(weights.row, "i", 0).ours, ask(weights.row, "", 1).ours, ask(weights.row, "ii", 2).ours]
    text = {"prompt_token_ids": [5, 6, 7]}
    params = SamplingParams(max_tokens=LENGTH, seed=3, temperature=1.0, ignore_eos=True, prompt_logprobs=1, logprobs=1)
    with weights.engine(**options) as llm:
        before = tokens_of(llm, text)
        kinds = ("delta", "final", "cumulative", "final")
        parts, *whole = update_within(llm, weights, [text, *prompts], "restart", kinds)
        assert [outputs[-1] for outputs in whole] == [tokens_of(llm, prompt) for prompt in prompts]
        answer = [token for part in parts for token in part]
        assert answer[0] == before[0]
        assert answer != before
        ((_, *_), *sampled) = update_within(llm, weights, [text, text, text], "restart", ("delta", "final", "final"), params)
        assert [outputs[-1] for outputs in sampled] == [tokens_of(llm, text, params)] * 2


def test_the_log_probabilities_of_a_prompt_are_those_of_the_new_weights(weights: Weights) -> None:
    text = {"prompt_token_ids": list(range(5, 50))}
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True, prompt_logprobs=0)

    def numbers(output: Any) -> list[float]:
        return [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]

    with weights.engine() as llm:
        (before,) = llm.generate(text, params, use_tqdm=False)

        async def run(mode: Any) -> Any:
            engine = AsyncLLM(llm)
            stream = engine.generate(text, params, output_kind="cumulative")
            await anext(stream)
            await engine.update_weights(weights.update, mode)
            return [output async for output in stream][-1]

        after = asyncio.run(run("pause"))
        (expected,) = llm.generate(text, params, use_tqdm=False)
        assert numbers(after) == numbers(expected) != numbers(before)


@pytest.mark.parametrize(("family", "mix"), [("qwen3_5", "i"), ("gemma3", "i"), ("whisper", "a")])
def test_other_kinds_of_caches(family: str, mix: str, tmp_path: Path) -> None:
    """States, windows with bidirectional images, and the keys of encoder rows are computed again."""
    weights = Weights(family, tmp_path)
    prompts = [ask(weights.row, mix, number).ours for number in range(2)]
    with weights.engine() as llm:
        old = [tokens_of(llm, prompt, greedy(20)) for prompt in prompts]
        outputs = update_within(llm, weights, prompts, "restart", ("final", "cumulative"), greedy(20))
        assert [parts[-1] for parts in outputs] == [tokens_of(llm, prompt, greedy(20)) for prompt in prompts] != old


def test_sessions_go_on(weights: Weights) -> None:
    """A session's next answer sees the tokens of its first one, through the new weights."""
    prompt, more = [5, 6, 7], [8, 9]
    with weights.engine() as llm, llm.live({"prompt_token_ids": prompt}, greedy(4)) as session:
        first = list(session.answer().outputs[0].token_ids)
        for mode in ("pause", "restart"):
            assert llm.update_weights(weights.update, mode=mode) == llm.weights_version
        session.append({"prompt_token_ids": more})
        second = list(session.answer().outputs[0].token_ids)
        assert second == tokens_of(llm, {"prompt_token_ids": [*prompt, *first, *more]}, greedy(4))


def test_requests_with_an_adapter_keep_it_or_end(weights: Weights, tmp_path: Path) -> None:
    """If its files cannot be read any more, the request ends with an error, and others go on."""
    model, _ = weights.row.load(weights.base)
    folder = write(tmp_path / "a", str(weights.base), matrices(model, r"language_model.*q_proj$|visual.*fc2$"))
    prompt = ask(weights.row, "i", 0).ours
    with weights.engine(enable_lora=True) as llm:
        llm.load_adapter("mine", folder)
        ((*_, whole),) = update_within(llm, weights, [prompt], "restart", ["cumulative"], adapter="mine")
        assert whole == tokens_of(llm, prompt, adapter="mine") != tokens_of(llm, prompt)

        async def run() -> tuple[Any, Any]:
            engine = AsyncLLM(llm)
            streams = [
                engine.generate(prompt, greedy(LENGTH), output_kind="cumulative", adapter=name) for name in ("mine", None)
            ]
            for stream in streams:
                await anext(stream)
            (folder / "adapter_config.json").unlink()
            await engine.update_weights(weights.update, "pause")
            mine, other = [[output async for output in stream][-1] for stream in streams]
            return mine, other

        mine, other = asyncio.run(run())
        assert (mine.error.code, mine.error.param) == ("unknown_name", "adapter")
        assert (other.error, len(other.outputs[0].token_ids)) == (None, LENGTH)


def test_an_update_that_fails_leaves_requests_or_ends_them(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not fit changes nothing. If memory runs out, the requests end with that error and the engine sleeps."""
    prompt = {"prompt_token_ids": [5, 6, 7]}

    def fill(*_: Any) -> None:
        raise MemoryError

    with weights.engine() as llm:
        before = tokens_of(llm, prompt)

        async def run() -> Any:
            engine = AsyncLLM(llm)
            stream = engine.generate(prompt, greedy(LENGTH), output_kind="cumulative")
            await anext(stream)
            name = next(iter(weights.update))
            with pytest.raises(InputError):
                await engine.update_weights([(name, weights.update[name])] * 2, "restart")
            whole = [output async for output in stream][-1]
            assert list(whole.outputs[0].token_ids) == before
            stream = engine.generate(prompt, greedy(LENGTH), output_kind="cumulative")
            await anext(stream)
            with monkeypatch.context() as patch:
                patch.setattr(model_weights.Linear, "pack", fill)
                with pytest.raises(InputError):
                    await engine.update_weights(weights.update, "pause")
            return [output async for output in stream][-1]

        ended = asyncio.run(run())
        assert (ended.error.code, ended.outputs[0].finish_reason) == ("out_of_memory", "error")
        assert (llm.asleep, llm.weights_version) == (True, 1)
        llm.wake_up()
        assert tokens_of(llm, prompt) != before
