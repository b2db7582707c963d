"""Built-in logits processors against transformers', alone, in batches, and from generation_config.json."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from sensorium.callers.errors import InputError
from sensorium.engine.builtin_logits_processors import (
    NO_REPEAT_NGRAMS,
    AllowedTokens,
    NoRepeatNGrams,
    SuppressTokens,
    TimestampRules,
)
from sensorium.engine.core.codec import decode, encode
from sensorium.engine.logits_processors import apply_processors, make_processors
from sensorium.engine.sampling_params import SamplingParams, from_generation_config
from transformers import (
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

FIRST, NONE, END, VOCAB = 30, 29, 20, 60
RULE = {"first": FIRST, "none": NONE, "end": END, "latest": 10}
ANSWERS = ([], [31], [31, 4], [31, 4, 5, 40], [31, 4, 40, 40], [31, 4, 40, 40, 6], [4, 5], [31, 4, 40, 41, 7, 59])


def logits(rows: int = len(ANSWERS), seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("latest", [10, None])
def test_timestamps_follow_transformers_rule(seed: int, latest: int | None) -> None:
    config = SimpleNamespace(
        no_timestamps_token_id=NONE, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=latest
    )
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=3)
    given = logits(seed=seed)
    given[::2, FIRST:] += 2 * (seed % 2)  # with and without a timestamp that is likelier than all text tokens
    ours = given.clone()
    assert apply_processors([[TimestampRules(**RULE | {"latest": latest})] for _ in ANSWERS], ANSWERS, ours) == {}
    for answer, mine, row in zip(ANSWERS, ours, given, strict=True):
        expected = theirs(torch.tensor([[1, 2, 3, *answer]]), row[None].clone())[0]
        assert torch.equal(mine, expected), answer


def test_suppressed_tokens_follow_transformers_rule() -> None:
    given, ours = logits(), logits()
    apply_processors([[SuppressTokens([1, 2, 50, -1, 10**12], [7, 20, -2])] for _ in ANSWERS], ANSWERS, ours)
    for answer, mine, row in zip(ANSWERS, ours, given, strict=True):
        ids = torch.tensor([[1, 2, 3, *answer]])
        expected = SuppressTokensLogitsProcessor([1, 2, 50])(ids, row[None].clone())
        assert torch.equal(mine, SuppressTokensAtBeginLogitsProcessor([7, 20], 3)(ids, expected)[0])


def test_allowed_tokens() -> None:
    given, ours = logits(1), logits(1)
    AllowedTokens([3, 5, -1])([], ours[0])
    assert torch.equal(ours[0, [3, 5]], given[0, [3, 5]])
    assert ours[0].isfinite().sum() == 2


def test_a_long_list_of_allowed_tokens_is_packed_once() -> None:
    """A step makes a processor for each sequence; its cost does not depend on the length of the list."""
    tokens = [5, 3, 2**30, 1000] * 1000
    for params in (
        SamplingParams(logits_processors={"allowed_tokens": {"tokens": tokens}}),
        SamplingParams(allowed_token_ids=tokens),
    ):
        packed = params.processors["allowed_tokens"]["tokens"]
        assert isinstance(packed, bytes)
        assert len(packed) <= 4 * 8
        assert params.processors["allowed_tokens"]["tokens"] is packed
        (processor,) = make_processors(params.processors)
        row = torch.zeros(VOCAB)
        processor([], row)
        assert row.isfinite().nonzero().flatten().tolist() == [3, 5]
        assert decode(encode(params)).processors == params.processors
    with pytest.raises(InputError, match="it must be a whole number"):
        SamplingParams(logits_processors={"allowed_tokens": {"tokens": [2**70] * 2000}})


def forbidden(rule: NoRepeatNGrams, answer: list[int]) -> set[int]:
    given = torch.zeros(VOCAB)
    rule(answer, given)
    return set(given.isneginf().nonzero().flatten().tolist())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_ngrams_follow_transformers_rule_if_the_window_holds_the_whole_answer(size: int, seed: int) -> None:
    answer = torch.randint(4, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
    for count in range(len(answer) + 1):
        given = logits(1, seed)[0]
        theirs = NoRepeatNGramLogitsProcessor(size)(torch.tensor([answer[:count]], dtype=torch.int64), given[None].clone())[0]
        NoRepeatNGrams(size, 1000)(answer[:count], given)
        assert torch.equal(given, theirs), count


def test_ngrams_are_looked_for_in_a_window() -> None:
    answer = [1, 2, 3, 4, 1, 2, 5, 6, 1, 2]
    assert forbidden(NoRepeatNGrams(3, 100), answer) == {3, 5}
    assert forbidden(NoRepeatNGrams(3, 10), answer) == {3, 5}
    assert forbidden(NoRepeatNGrams(3, 9), answer) == {5}
    assert forbidden(NoRepeatNGrams(3, 5), answer) == set()
    assert forbidden(NoRepeatNGrams(3, 1), answer) == set()


def test_ngrams_may_end_in_a_token_of_the_list() -> None:
    answer = [1, 2, 3, 4, 1, 2, 5, 6, 1, 2]
    assert forbidden(NoRepeatNGrams(3, 100, {5, 7}), answer) == {3}
    assert forbidden(NoRepeatNGrams(3, 100, [3, 5]), answer) == set()
    assert NoRepeatNGrams(3, 100, [5, 3]) == NoRepeatNGrams(3, 100, {3, 5})


@pytest.mark.parametrize(
    "arguments",
    [
        {"ngram_size": 0},
        {"ngram_size": 2.0},
        {"ngram_size": 3, "window_size": True},
        {},
        {"ngram_size": 3, "window_size": 5000},
        {"ngram_size": 10**5000},
        {"ngram_size": 3, "whitelist_token_ids": range(1 << 21)},
    ],
)
def test_ngrams_of_no_size_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(InputError, match="no_repeat_ngrams"):
        make_processors({NO_REPEAT_NGRAMS: arguments})


def test_lists_of_tokens_are_limited():
    for arguments in ({"tokens": range(1 << 15)}, {"first": range(1 << 15)}, {"tokens": 5}):
        with pytest.raises(InputError, match="suppress_tokens"):
            make_processors({"suppress_tokens": arguments})
    with pytest.raises(InputError, match="allowed_tokens"):
        make_processors({"allowed_tokens": {"tokens": range(1 << 21)}})


@pytest.mark.parametrize("tokens", [5, "5", b"5", {5: 5}, [1.5], [True], ["5"], [2**70], torch.tensor(5)], ids=repr)
def test_lists_of_anything_but_tokens_are_refused(tokens):
    for name in ("suppress_tokens", "allowed_tokens"):
        with pytest.raises(InputError, match=rf"{name}' cannot be made from .*: tokens (is|holds)"):
            make_processors({name: {"tokens": tokens}})


@pytest.mark.parametrize("value", [None, -1, 1.0, True, 2**70, "5"])
def test_timestamps_are_whole_numbers(value):
    with pytest.raises(InputError, match=r"first is .*; it must be a whole number"):
        make_processors({"timestamps": RULE | {"first": value}})


def test_arguments_that_a_processor_does_not_take_are_named():
    with pytest.raises(InputError, match=r"cannot be made from \{'token': 5\}: got an unexpected keyword argument 'token'"):
        make_processors({"suppress_tokens": {"token": 5}})


def test_the_cost_of_a_step_is_bounded():
    """The worst answer for the widest window: every n-gram equals the last one."""
    answer, row = [7] * 100_000, torch.zeros(VOCAB)
    started = time.thread_time()
    for _ in range(5):
        NoRepeatNGrams(2048, 4096)(answer, row)
    assert time.thread_time() - started < 0.25
    assert row.isneginf().nonzero().tolist() == [[7]]


def test_rules_of_different_requests_do_not_mix() -> None:
    together, rules = logits(), [TimestampRules(**RULE | {"latest": i % 3}) for i in range(len(ANSWERS))]
    apply_processors([[SuppressTokens([i]), rule] for i, rule in enumerate(rules)], ANSWERS, together)
    for i, (answer, rule, row) in enumerate(zip(ANSWERS, rules, logits(), strict=True)):
        SuppressTokens([i])(answer, row)
        rule(answer, row)
        assert torch.equal(together[i], row)


def test_lists_in_generation_config() -> None:
    params = from_generation_config({"suppress_tokens": [1, 2], "begin_suppress_tokens": [3]})
    assert params.logits_processors == {"suppress_tokens": {"tokens": [1, 2], "first": [3]}}
    assert from_generation_config({"suppress_tokens": None, "begin_suppress_tokens": []}) == SamplingParams()
