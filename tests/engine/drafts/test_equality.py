"""Drafting on equals drafting off in the corners of an engine: callers' processors, grammars after reasoning, caches, turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from drafting import drafting, free_drafter, with_mistakes
from sensorium import LLM, SamplingParams
from sensorium.engine.logits_processors import register_logits_processor
from sensorium.engine.structured_outputs import StructuredOutputsParams
from sensorium.pipelines.beam_search import BeamSearchParams
from torch import Tensor

PROMPTS = ["one two three one two three", "The sky is blue, the sky is", "a b a b a b", "one two three, the sky"]
PARAMS = SamplingParams(temperature=0.9, seed=4, max_tokens=32, ignore_eos=True, logprobs=2)


class NoTokenTwice:
    """Forbids the last tokens of the answer; `last` of them."""

    def __init__(self, last: int = 3) -> None:
        self.last = last

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        logits[list(token_ids[-self.last :])] = -float("inf")


class PrefersParity:
    """Prefers tokens of the parity of the answer's length, all rows in one call."""

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        raise AssertionError("the batch form is there")

    @staticmethod
    def batch(processors: Sequence[Any], answers: Sequence[Sequence[int]], logits: Tensor) -> None:
        for answer, row in zip(answers, logits, strict=True):
            row[len(answer) % 2 :: 2] += 2.0


class CountsCalls:
    """Changes its mind with every call; it is called once per token of the answer, with drafts too."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        assert self.calls == len(token_ids)
        self.calls += 1
        logits[self.calls % len(logits)] += 4.0


class FailsLate:
    """Raises once the answer has `count` tokens."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        logits[: len(token_ids)] += 1.0
        if len(token_ids) >= self.count:
            raise RuntimeError(f"{len(token_ids)} tokens are too many")


for kind in (NoTokenTwice, PrefersParity, CountsCalls, FailsLate):
    register_logits_processor(f"drafts_{kind.__name__}", kind)
PROCESSORS: dict[str, dict[str, dict[str, Any]]] = {
    "one": {"drafts_NoTokenTwice": {"last": 5}},
    "batch and one": {"drafts_PrefersParity": {}, "drafts_NoTokenTwice": {}},
    "with a state": {"drafts_CountsCalls": {}},
    "fails": {"drafts_FailsLate": {"count": 9}},
    "with a shipped one": {"drafts_PrefersParity": {}, "no_repeat_ngrams": {"ngram_size": 3}},
}
REASONING = StructuredOutputsParams(grammar='start: /[a-z ,]{0,12}/ "</think>" /\\{"n": [0-9]{1,3}\\}/ "!"')


@pytest.fixture(scope="module", params=["auto", "int8"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("tiny-vl", dtype="float32", max_model_len=256, max_num_seqs=4, kv_cache_dtype=request.param) as llm:
        yield llm


def seen(outputs: Sequence[Any]) -> list[Any]:
    return [(output.outputs, output.error) for output in outputs]


def accepted(llm: LLM) -> int:
    return sum(one.num_accepted for one in llm.stats.drafts)


def check(llm: LLM, params: SamplingParams, prompts: Sequence[str] = PROMPTS) -> list[Any]:
    """Assert that answers with drafts are those without, and that some were accepted. Return what was answered."""
    with drafting(llm, None):
        expected = seen(llm.generate(prompts, params, use_tqdm=False))
    size = llm.engine.info.vocab_size
    with drafting(llm, free_drafter(size)):
        assert seen(llm.generate(prompts, params, use_tqdm=False)) == expected
        hints = [replace(params, draft_text=with_mistakes(answers[0].token_ids, size)) for answers, _ in expected]
        assert seen(llm.generate(prompts, hints, use_tqdm=False)) == expected
        assert accepted(llm) > 0
    return expected


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_of_callers(llm: LLM, name: str) -> None:
    answers = check(llm, replace(PARAMS, logits_processors=PROCESSORS[name]))
    assert [error is not None for _, error in answers] == [name == "fails"] * len(PROMPTS)


def test_processors_beside_penalties_words_and_several_answers(llm: LLM) -> None:
    more = {"n": 3, "repetition_penalty": 1.2, "presence_penalty": 0.3, "bad_words": ["the"], "min_p": 0.01, "top_k": 30}
    check(llm, replace(PARAMS, logits_processors=PROCESSORS["batch and one"], **more))


@pytest.mark.parametrize("more", [{}, {"logits_processors": {"drafts_PrefersParity": {}}}, {"n": 2}, {"stop": ["9"]}], ids=str)
def test_reasoning_that_ends_inside_a_draft_and_a_grammar_after_it(llm: LLM, more: dict[str, Any]) -> None:
    params = replace(PARAMS, structured_outputs=REASONING, max_tokens=60, ignore_eos=False, **more)
    with drafting(llm, None):
        expected = seen(llm.generate(PROMPTS, params, use_tqdm=False))
    wrong = ['</think>{"n": x', 'a, b</think>{"n": 12}! and more', "</think></think>", '{"n": 1}!']
    with drafting(llm, free_drafter(llm.engine.info.vocab_size)):
        for hints in (wrong, [answers[0].text for answers, _ in expected]):
            params_of = [replace(params, draft_text=hint) for hint in hints]
            assert seen(llm.generate(PROMPTS, params_of, use_tqdm=False)) == expected
        assert accepted(llm) > 0
    if "stop" not in more:
        assert all('</think>{"n": ' in answer.text for answers, _ in expected for answer in answers)


def test_sleep_between_requests(llm: LLM) -> None:
    with drafting(llm, None):
        expected = seen(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    with drafting(llm, free_drafter(llm.engine.info.vocab_size)):
        for _ in range(3):
            assert seen(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
            llm.sleep()
            llm.wake_up()
        assert accepted(llm) > 3 * 31, "the second and third time, the corpus has the answers"


def turns(llm: LLM, params: SamplingParams) -> list[Any]:
    answers = []
    with llm.live(PROMPTS[0], params) as session:
        for part in (" and two", " three", PROMPTS[0]):
            answers.append(session.answer().outputs)
            if part == " three":
                session.truncate(len(session.token_ids) - 5)
            session.append(part)
        answers.append(session.answer().outputs)
    return answers


@pytest.mark.parametrize(
    "more",
    [{}, {"logits_processors": PROCESSORS["one"], "frequency_penalty": 0.4}, {"stop": ["e"], "min_tokens": 4}],
    ids=["plain", "rules", "stop"],
)
def test_turns_of_a_session(llm: LLM, more: dict[str, Any]) -> None:
    params = replace(PARAMS, max_tokens=14, **more)
    with drafting(llm, None):
        expected = turns(llm, params)
    with drafting(llm, free_drafter(llm.engine.info.vocab_size)):
        first = replace(params, draft_text=expected[0][0].token_ids)
        assert turns(llm, first) == expected
        assert turns(llm, params) == expected
        assert accepted(llm) > 0


def test_prefix_hits_and_preemption() -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 6, "block_size": 4}
    with LLM("tiny-vl", kv_cache_memory_bytes=400_000, **options) as llm:
        prompts = [PROMPTS[0] + f" {i}" for i in range(8)]
        check(llm, replace(PARAMS, max_tokens=60), prompts)
        assert llm.stats.preemptions > 0
        assert llm.stats.prefix_hits > 0


@pytest.mark.parametrize(("options", "steps"), [({}, 1), ({"max_num_batched_tokens": 16}, 3), ({"block_size": 4}, 1)], ids=str)
@pytest.mark.parametrize("cached", [False, True])
def test_guesses_are_verified_with_the_last_rows_of_a_prompt(options: dict[str, Any], steps: int, cached: bool) -> None:
    """One step for all of a short answer. A prefix hit of all but the last token is such a step, too."""
    params = SamplingParams(temperature=0.7, seed=2, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=None)
    prompt = {"prompt_token_ids": [5 + i % 50 for i in range(33)]}
    more = options | {"enable_prefix_caching": cached}
    with LLM("tiny-vl", dtype="float32", max_model_len=128, max_num_seqs=4, **more) as llm:
        with drafting(llm, None):
            expected = seen(llm.generate([prompt], params, use_tqdm=False))
        with drafting(llm, free_drafter(llm.engine.info.vocab_size)):
            before = llm.stats.steps
            guesses = expected[0][0][0].token_ids
            found = seen(llm.generate([prompt], replace(params, draft_text=guesses), use_tqdm=False))
            assert llm.stats.steps - before == (1 if cached else steps)
            assert accepted(llm) >= 7
            wrong = replace(params, draft_text=[(guesses[0] + 1) % 50, *guesses[1:]])
            assert found == seen(llm.generate([prompt], wrong, use_tqdm=False)) == expected


def test_beams_have_no_drafts(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    with drafting(llm, None):
        expected = llm.beam_search(PROMPTS[:2], params)
    with drafting(llm, free_drafter(llm.engine.info.vocab_size)):
        assert llm.beam_search(PROMPTS[:2], params) == expected
        assert not llm.stats.drafts
    with pytest.raises(TypeError, match="draft_text"):
        BeamSearchParams(beam_width=3, max_tokens=6, draft_text="a")  # type: ignore[call-arg]
