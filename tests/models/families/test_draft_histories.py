"""Random histories of an engine that drafts with a model, its own layers or an EAGLE-3 head.

Every answer is that of an engine with enough room that drafts nothing: with log probabilities, at every temperature, beside
penalties, grammars, stop strings and several answers, after preemption, prefix hits, sleep and rollbacks of live sessions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drafting import drafting, free_drafter, with_mistakes
from eagle3 import write
from family import Family, ask
from mtp import STEMS, Drafter, add_mtp
from parity import ROWS, LoadedModels, make_llm
from sensorium import LLM, SamplingParams
from sensorium.engine.sampling_params import RepetitionDetectionParams
from sensorium.engine.speculative_config import DraftLimits
from sensorium.engine.structured_outputs import StructuredOutputsParams

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "logprobs": 2, "n": 2},
    {"temperature": 0.6, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logprobs": 0},
    {"temperature": 1.0, "min_p": 0.02, "top_k": 20, "logit_bias": {7: 2.0}, "min_tokens": 5},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="[a-f ]{4,20}x?"), "ignore_eos": False},
    {"temperature": 0.9, "stop": ["e", "th", " s"], "min_tokens": 3},
    {"temperature": 0.0, "repetition_detection": RepetitionDetectionParams(4, 3, 6, repair=True)},
]
TEXTS = ["def f(x): return x", "def f(x): return x + x * x", "one two three one two three", "a b a b a b", "x = [1, 2, 3]"]
DRAFTERS = [
    ("draft_model", "text-llama", "auto"),
    ("draft_model", "qwen2_vl", "int8"),
    ("mtp", "text-deepseek_v3", "auto"),
    ("mtp", "text-qwen3_next", "int8"),
    ("mtp", "glm_ocr", "fp8"),
    ("eagle3", "text-llama", "int8"),
    ("eagle3", "qwen3_vl", "auto"),
]
"""Method, row of the parity suite, and format of the cache."""


LENGTHS = {"text-llama": 96, "text-deepseek_v3": 96, "text-qwen3_next": 96}
"""`max_model_len` of rows without media; that of the others is 192."""
STATES = ("text-qwen3_next",)
"""Rows with states: most blocks hold those, so that all tokens have room, and prompts are too short for prefix hits."""


@pytest.fixture(scope="module", params=DRAFTERS, ids="-".join)
def engines(
    request: pytest.FixtureRequest, loaded: LoadedModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, LLM]]:
    """Return an engine that drafts, whose cache holds hardly more than one sequence, and one without drafts and with room."""
    method, name, kv_cache_dtype = request.param
    row, folder, target = ROWS[name], loaded.folder(name), tmp_path_factory.mktemp("drafter") / "files"
    if method == "mtp":
        folder = add_mtp(folder, target, Drafter(loaded.oracle(name)[0], STEMS[name]), STEMS[name])
    config, length = {"method": method, "num_speculative_tokens": 3}, LENGTHS.get(name, 192)
    options = {"kv_cache_dtype": kv_cache_dtype, "max_model_len": length}
    with make_llm(row, folder, enable_prefix_caching=False, **options) as plain:
        if method != "mtp":
            config["model"] = str(folder if method == "draft_model" else _head(target, plain))
        num_bytes = _bytes_of(plain, length + (32 if name in STATES else 16))  # blocks of states take more
        room = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "kv_cache_memory_bytes": num_bytes}
        with make_llm(row, folder, speculative_config=config, **options, **room) as drafts:
            yield drafts, plain


def _head(folder: Path, llm: LLM) -> Path:
    model = llm.engine.loop.core.executor.runner.model
    vocab, hidden = model.vocab_size, model.hidden_size
    return write(folder, vocab, hidden, hidden, eagle_aux_hidden_state_layer_ids=[1, 2, 3])


def _bytes_of(llm: LLM, tokens: int) -> int:
    """Return the bytes of a cache for so many tokens."""
    core = llm.engine.loop.core
    blocks = core.scheduler.block_pools.pools[0].num_blocks
    stored = sum(tensor.nbytes for tensor in core.executor.runner.caches.tensors if tensor.ndim > 2)  # without states
    return stored * -(-tokens // llm.engine.config.block_size) // blocks


def _batch(row: Family, rng: random.Random) -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Return prompts, of which some begin alike, and their parameters."""
    prompts: list[dict[str, Any]] = []
    for _ in range(rng.randint(3, 6)):
        if rng.random() < 0.4:
            prompts.append(ask(row, rng.choice(row.default_cases()), rng.randrange(3)).ours)
        else:
            prompts.append({"prompt": rng.choice(TEXTS) + rng.choice(["", " +", " and so on"]) * rng.randint(0, 3)})
    params = [
        SamplingParams(
            **{"ignore_eos": True, "seed": rng.randrange(9), "max_tokens": rng.randint(16, 80)} | rng.choice(OPTIONS)
        )
        for _ in prompts
    ]
    return prompts, params


def _with_hints(params: Sequence[SamplingParams], expected: Sequence[Any], vocab_size: int) -> list[SamplingParams]:
    return [
        one if number % 2 else replace(one, draft_text=with_mistakes(answers[0].token_ids, vocab_size, number))
        for number, (one, (answers, _)) in enumerate(zip(params, expected, strict=True))
    ]


def _turns(llm: LLM, rng: random.Random) -> list[Any]:
    """Return the answers of a live session that is rolled back."""
    answers = []
    params = SamplingParams(temperature=0.7, seed=rng.randrange(9), max_tokens=rng.randint(4, 14), ignore_eos=True)
    with llm.live(rng.choice(TEXTS), params) as session:
        for _ in range(rng.randint(1, 3)):
            answers.append(session.answer().outputs)
            if rng.random() < 0.6:
                session.truncate(len(session.token_ids) - rng.randint(0, 8))
            session.append(" " + rng.choice(TEXTS))
        answers.append(session.answer().outputs)
    return answers


def _history(row: Family, llm: LLM, seed: int, expected: Sequence[Any] = ()) -> list[Any]:
    """Return all answers of a history. What happens does not depend on the engine.

    Args:
        expected: all answers; half of the requests get theirs, with mistakes, as a text to draft from.
    """
    rng, found = random.Random(seed), list[Any]()
    for _ in range(rng.randint(3, 6)):
        event = rng.choice(["batch", "batch", "batch", "turns", "sleep", "forget"])
        if event == "batch":
            prompts, params = _batch(row, rng)
            if expected:
                params = _with_hints(params, expected[len(found)], llm.engine.info.vocab_size)
            found.append([(output.outputs, output.error) for output in llm.generate(prompts, params, use_tqdm=False)])
        elif event == "turns":
            found.append(_turns(llm, rng))
        elif event == "sleep":
            llm.sleep()
            llm.wake_up()
        else:
            llm.reset_prefix_cache()
    return found


@pytest.mark.parametrize("histories", [4, pytest.param(20, marks=pytest.mark.full)])
def test_random_histories_equal_those_without_drafts(
    request: pytest.FixtureRequest, engines: tuple[LLM, LLM], histories: int
) -> None:
    method, name, _ = request.node.callspec.params["engines"]
    drafts, plain = engines
    drafted = accepted = predicted = 0
    for seed in range(histories):
        expected = _history(ROWS[name], plain, seed)
        limits = DraftLimits(3, suffix=seed % 2 == 1, shortest=2, predicted=3, method=method, model="x")
        with drafting(drafts, free_drafter(drafts.engine.info.vocab_size, limits)) as scheduler:
            scheduler.drafts.drafter.rates.rate = lambda name, matched: 0.9  # right or wrong, it is verified
            assert _history(ROWS[name], drafts, seed, expected) == expected, f"history {seed}"
            counts = {stats.proposer: stats for stats in drafts.stats.drafts}
        assert not any(stats.failed for stats in counts.values())
        drafted += counts[method].num_drafted if method in counts else 0
        accepted += counts["hypothesis"].num_accepted if "hypothesis" in counts else 0
        predicted += counts[method].num_accepted if method in counts else 0
    print(f"{drafted} drafted, {predicted} accepted; {accepted} of texts; {drafts.stats.preemptions} preemptions")
    assert drafted > 20 * histories
    assert accepted > 20 * histories
    assert predicted > 0 or method != "draft_model"  # random layers and heads are hardly ever right
    assert (drafts.stats.preemptions > 0 and drafts.stats.prefix_hits > 0) or name in STATES
