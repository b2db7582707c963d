"""kv_cache_dtype: answers do not depend on batching, are close to those of a float cache, and take half the memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fallbacks
import pytest
import torch
from family import Family, ask, load_rows, save
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.engine.setup.doctor import plan_of
from sensorium.engine.types import EngineRequest
from sensorium.kernels.kv_quant import CACHE_DTYPES

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
ROWS = load_rows()


@pytest.fixture(scope="module", params=["qwen2_5_vl", "gemma3", "whisper"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, Path]:
    """A model with M-RoPE, one with windows and bidirectional image spans, and one with cross-attention."""
    row = ROWS[request.param]
    return row, save(row, tmp_path_factory.mktemp("cache_dtype") / row.name)


def questions(row: Family) -> list[dict[str, Any]]:
    """Return questions, some of them repeated unchanged or with another end."""
    letter = "a" if "audio" in row.placeholders else "i"
    asked = [ask(row, letter, seed) for seed in (1, 2, 3)]
    return [replace(one, text=one.text + end).ours for end in ("", " + y", "") for one in asked]


def request_of(llm: LLM, name: str, prompt: dict[str, Any]) -> EngineRequest:
    prepared = llm.engine.inputs.process(prompt)
    return EngineRequest(name, prepared.token_ids, GREEDY, (), prepared.features, cross=prepared.cross)


@pytest.mark.parametrize("kernels", ["", "attention=torch"])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_answers_do_not_depend_on_batching_chunking_or_caches(
    served: tuple[Family, Path], cache_dtype: str, kernels: str, toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer alone equals the one in a batch, in chunks, with cache hits and after preemption."""
    monkeypatch.setenv("SENSORIUM_KERNELS", kernels)
    row, folder = served
    with LLM(folder, max_model_len=512, dtype="float32", device="cpu", kv_cache_dtype=cache_dtype, **row.options) as llm:
        requests = [request_of(llm, str(i), prompt) for i, prompt in enumerate(questions(row))]
        model = llm.engine.loop.core.executor.runner.model
    assert {spec.quant_dtype for spec in model.cache_specs} == {CACHE_DTYPES[cache_dtype]}
    options = {"block_size": 16, "max_len": 512, "encoder_rows": 9999, "model": model, "prompt_attention": row.prompt_attention}

    def answers(core: Any, requests: list[EngineRequest]) -> dict[str, list[int]]:
        for request in requests:
            core.add(request)
        outputs = toy.drain(core)
        assert not any(output.error for several in outputs.values() for output in several)
        return {name: toy.tokens_of(several) for name, several in outputs.items()}

    alone = [answers(toy.make_core(budget=4096, caching=False, **options), [request]) for request in requests]
    expected = {name: tokens for one in alone for name, tokens in one.items()}
    items = [*(feature for one in requests for feature in one.features), *(item for one in requests for item in one.cross)]
    longest = max(*(len(one.prompt_token_ids) + GREEDY.max_tokens for one in requests), *(f.range.num_embeds for f in items))
    budget = 23 if row.prompt_attention == "causal" else max(feature.range.length for feature in items) + 8
    across = row.name == "whisper"  # cross-attention keys fill the cache and are no part of a prefix
    core = toy.make_core(blocks=(1 + across) * (longest // 16) + 3, seqs=6, budget=budget, **options)
    assert answers(core, requests) == expected
    assert answers(core, requests[:2]) == {name: expected[name] for name in "01"}
    assert across or (core.stats.preemptions > 0 and core.stats.prefix_hits > 0)
    assert core.stats.steps > len(requests) * GREEDY.max_tokens // 6


@pytest.mark.in_process
def test_sleep_does_not_change_answers(checkpoint: Path) -> None:
    prompt = {"prompt_token_ids": list(range(5, 90))}
    with LLM(checkpoint, max_model_len=256, kv_cache_dtype="int8", device="cpu") as llm:
        (before,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        llm.sleep()
        llm.wake_up()
        (after,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert llm.engine.loop.core.executor.runner.caches.tensors[0].dtype == torch.int8
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.outputs[0].cumulative_logprob == before.outputs[0].cumulative_logprob


@pytest.fixture(scope="module", params=[("int8", "bfloat16"), ("fp8", "float32")])
def invariant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save(ROWS["qwen2_5_vl"], tmp_path_factory.mktemp("invariant") / "model", 3)
    cache_dtype, dtype = request.param
    with LLM(folder, max_model_len=1024, dtype=dtype, batch_invariant=True, kv_cache_dtype=cache_dtype, device="cpu") as llm:
        yield llm


def test_bits_do_not_depend_on_batching_chunking_or_caches(invariant: LLM, toy: Any) -> None:
    row, model = ROWS["qwen2_5_vl"], invariant.engine.loop.core.executor.runner.model
    requests = []
    for seed in range(5):
        prepared = invariant.engine.inputs.process(ask(row, "i", seed).ours)
        requests.append(EngineRequest(str(seed), prepared.token_ids, GREEDY, (), prepared.features))

    def run(names: list[int], block_size: int = 16, budget: int = 4096, again: bool = False) -> list[Any]:
        """Return the log probabilities of the first request."""
        sizes = {"blocks": 3200 // block_size, "block_size": block_size, "budget": budget, "max_len": 1024}
        core = toy.make_core(**sizes, encoder_rows=999, model=model, invariant=True)
        if again:
            core.add(replace(requests[0], request_id="before", prompt_token_ids=(*requests[0].prompt_token_ids[:-3], 5)))
            toy.drain(core)
        for name in names:
            core.add(requests[name])
        return [entry for output in toy.drain(core)["0"] for entry in output.logprobs or ()]

    expected = run([0])
    assert len(expected) == GREEDY.max_tokens
    for names, rest in (([0], {"budget": 5}), ([3, 1, 0], {"budget": 33, "block_size": 4}), ([0, 2, 4], {"again": True})):
        assert run(names, **rest) == expected


@pytest.mark.parametrize(("cache_dtype", "limit"), [("int8", 0.02), ("fp8", 0.1)])
def test_logits_are_close_to_those_of_floats(checkpoint: Path, cache_dtype: str, limit: float) -> None:
    """The error is averaged over the likely tokens of a prompt, relative to the spread of their log probabilities."""
    rng = random.Random(0)
    prompt = {"prompt_token_ids": [rng.randrange(5, 600) for _ in range(200)]}
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=20)
    found = []
    for dtype in ("auto", cache_dtype):
        with LLM(checkpoint, max_model_len=256, dtype="float32", kv_cache_dtype=dtype, device="cpu") as llm:
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            found.append(output.prompt_logprobs[1:])
    both = [(one[t].logprob, two[t].logprob) for one, two in zip(*found, strict=True) for t in one.keys() & two.keys()]
    exact, rounded = torch.tensor(both).T
    off = float((exact - rounded).std() / exact.std())
    assert 0 < off < limit, off


@pytest.mark.in_process
def test_the_plan_is_what_is_allocated(checkpoint: Path) -> None:
    sizes, shapes = {}, {}
    for cache_dtype in ("auto", *CACHE_DTYPES):
        options = {"max_model_len": 512, "dtype": "bfloat16", "kv_cache_dtype": cache_dtype, "device": "cpu"}
        with LLM(checkpoint, **options) as llm:
            caches = llm.engine.loop.core.executor.runner.caches.tensors
            sizes[cache_dtype], shapes[cache_dtype] = sum(cache.nbytes for cache in caches), caches[0].shape
            assert llm.explain().kv_cache == sizes[cache_dtype]
        plan = dict(plan_of(checkpoint, options).rows())
        assert plan["key/value cache"].split() == [f"{sizes[cache_dtype] / 2**20:,.1f}", "MiB"]
    *_, dim = shapes["auto"]
    assert shapes["int8"] == shapes["fp8"] == (*shapes["auto"][:-1], dim + 8), "4 bytes of a scale, 4 to fill up"
    assert sizes["int8"] == sizes["fp8"] == sizes["auto"] * (dim + 8) // (2 * dim)


def test_the_same_memory_holds_more_tokens(checkpoint: Path) -> None:
    lengths = {}
    for cache_dtype in ("auto", "int8"):
        with LLM(checkpoint, kv_cache_memory_bytes=1 << 18, dtype="float32", kv_cache_dtype=cache_dtype, device="cpu") as llm:
            lengths[cache_dtype] = llm.max_model_len
    assert lengths["int8"] > 2 * lengths["auto"]


@pytest.mark.in_process  # the stand-in for torchvision is in this process only
def test_unsupported_models_are_refused(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int4' must be one of auto, int8, fp8"):
        LLM(checkpoint, kv_cache_dtype="int4")
    latent = save(ROWS["kimi_k25"], tmp_path / "latent")
    for ask_for in (lambda: LLM(latent, kv_cache_dtype="int8"), lambda: plan_of(latent, {"kv_cache_dtype": "int8"}).rows()):
        with pytest.raises(
            ConfigError, match="kv_cache_dtype='int8' is for keys and values, but this model caches latent rows"
        ):
            ask_for()
    fallbacks.hide_native(monkeypatch)
    borrowed = fallbacks.build(tmp_path / "borrowed", "ovis2")
    for ask_for in (lambda: LLM(borrowed, kv_cache_dtype="fp8"), lambda: plan_of(borrowed, {"kv_cache_dtype": "fp8"}).rows()):
        with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' is not supported for this model"):
            ask_for()
