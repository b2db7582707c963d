"""Phrases get their scores when they are finished, and give them back otherwise, alone and beside other rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import InputError
from sensorium.engine.builtin_logits_processors import BOOST_PHRASES
from sensorium.engine.logits_processors import apply_processors, make_processors
from sensorium.engine.phrase_boost import BoostPhrases

ASSETS = Path(__file__).parents[2] / "assets"
VOCAB = 30
PHRASES = (([1, 2, 3], 2.0, False), ([1, 2, 4, 5], 1.0, False), ([7], 0.5, False), ([8, 9], 3.0, True))


def added(answer: list[int], **more: object) -> dict[int, float]:
    """Return what a rule adds to logits of zero."""
    logits = torch.zeros(VOCAB)
    BoostPhrases(PHRASES, **more)(answer, logits)
    return {token: value for token, value in enumerate(logits.tolist()) if value}


def test_a_token_that_continues_a_phrase_gets_its_weight() -> None:
    assert added([]) == {1: 2.0, 7: 0.5, 8: 3.0}
    assert added([20]) == {1: 2.0, 7: 0.5}
    following = added([20, 1, 2])
    assert (following[3], following[4]) == (2.0, 1.0), "a shared prefix has the largest weight, and a token that of its phrase"


def test_an_unfinished_phrase_gives_its_score_back() -> None:
    left = added([1, 2])
    assert left.pop(3) == 2.0
    assert left.pop(4) == 1.0
    assert left.pop(1) == -4.0 + 2.0, "another phrase begins"
    assert left.pop(7) == -4.0 + 0.5
    assert set(left.values()) == {-4.0}
    assert added([1, 2, 3]) == {1: 2.0, 7: 0.5}, "a finished one does not"


@pytest.mark.parametrize("seed", range(5))
def test_the_scores_of_an_answer_are_those_of_its_finished_phrases(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    phrases = [([1, 2, 3], 1.5, False), ([4, 5], 2.0, False), ([6], 1.0, False)]
    rule, answer, total = BoostPhrases(phrases), list[int](), 0.0
    for token in [*torch.randint(1, 8, (200,), generator=draw).tolist(), 1, 2, 3, 1, 2, 4, 5, 1, 2, 29]:
        logits = torch.zeros(VOCAB)
        rule(answer, logits)
        total += float(logits[token])
        answer.append(token)
    text = "".join(map(chr, answer))
    expected = sum(weight * len(tokens) * text.count("".join(map(chr, tokens))) for tokens, weight, _ in phrases)
    assert total == pytest.approx(expected)
    assert expected > 4.5


def test_words_without_a_space_begin_at_boundaries() -> None:
    assert 8 not in added([20])
    assert added([20, 25], boundaries=[25])[8] == 3.0
    assert added([20, 25, 8], boundaries=[25])[9] == 3.0
    assert added([20, 8], boundaries=[25]).get(9) is None
    assert added([8])[9] == 3.0, "the answer begins with it"
    assert 8 not in added([], before=[20])


def test_ignored_tokens_neither_continue_nor_leave_a_phrase() -> None:
    ignoring = added([1, 0, 0, 2, 0], ignored=[0])
    assert 0 not in ignoring
    assert ignoring == {token: value for token, value in added([1, 2]).items() if token}
    assert added([2], before=[20, 1])[3] == 2.0


def test_a_row_depends_on_its_answer_alone() -> None:
    answers, draw = [[], [1], [1, 2], [20, 8], [1, 2, 3], [9] * 50], torch.Generator().manual_seed(0)
    logits = torch.randn(len(answers), VOCAB, generator=draw)
    together, reverse = logits.clone(), logits.flip(0).clone()
    rules = [[BoostPhrases(PHRASES)] for _ in answers]
    assert apply_processors(rules, answers, together) == {}
    apply_processors(rules, answers[::-1], reverse)
    assert torch.equal(together, reverse.flip(0))
    for answer, row, expected in zip(answers, logits, together, strict=True):
        BoostPhrases(PHRASES)(answer, row)
        assert torch.equal(row, expected)


def test_tokens_outside_the_vocabulary_are_left_out() -> None:
    logits = torch.zeros(5)
    BoostPhrases(PHRASES, ignored=[100])([1, 2], logits)
    assert logits.tolist() == [-4.0, -2.0, -4.0, 2.0, 1.0]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"phrases": 5},
        {"phrases": [[1, 2]]},
        {"phrases": [([], 1.0, False)]},
        {"phrases": [([1, "a"], 1.0, False)]},
        {"phrases": [([-1], 1.0, False)]},
        {"phrases": [([1], 0.0, False)]},
        {"phrases": [([1], float("nan"), False)]},
        {"phrases": [([1], 21, False)]},
        {"phrases": [([1], 1.0, False)] * 20_000},
        {"phrases": [], "boundaries": 5},
        {"phrases": [], "ignored": [True]},
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(InputError):
        make_processors({BOOST_PHRASES: arguments})


def test_answers_with_drafts_are_those_without() -> None:
    with LLM(ASSETS / "tiny-vl", max_num_seqs=4) as llm:
        prompts = ["Read the", "The total is", "a b c"]
        name = llm.get_tokenizer().encode_ordinary(" Kowalski Ltd")
        rules = {BOOST_PHRASES: {"phrases": [(name, 4.0, False)]}}
        free_params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        params = replace(free_params, logits_processors=rules)
        plain, free = (
            [one.outputs[0].token_ids for one in llm.generate(prompts, one_params, use_tqdm=False)]
            for one_params in (params, free_params)
        )
        assert plain != free
        for drafts in (plain, [tokens[::-1] for tokens in plain], [tokens[:7] + name[:2] + tokens[7:] for tokens in free]):
            drafted = llm.generate(prompts, [replace(params, draft_text=draft) for draft in drafts], use_tqdm=False)
            assert [one.outputs[0].token_ids for one in drafted] == plain
