"""Proposers: what they guess, that memory is bounded, and that no state of a sequence breaks them."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
from sensorium.engine.drafts.corpus import Corpus, CorpusProposer
from sensorium.engine.drafts.draft_text import DraftTextProposer
from sensorium.engine.drafts.suffix import SuffixProposer


def sequence(token_ids, turn_start=0):
    return SimpleNamespace(token_ids=list(token_ids), turn_start=turn_start)


def longest_suffix(token_ids, shortest, longest):
    """The oracle of SuffixProposer without its limit on places: (length, place after it), the latest place of the longest."""
    end, best = len(token_ids), (0, 0)
    for place in range(1, end):
        length = 0
        while length < min(place, longest) and token_ids[place - 1 - length] == token_ids[end - 1 - length]:
            length += 1
        best = max(best, (length, place))
    return best if best[0] >= shortest else (0, 0)


@pytest.mark.parametrize("shortest", [1, 2, 3])
def test_suffix_finds_the_longest_match(shortest):
    rng = random.Random(shortest)
    for _ in range(40):
        tokens = [rng.randrange(2 + shortest) for _ in range(rng.randint(1, 15 * shortest))]
        proposer, growing = SuffixProposer(shortest, 8), sequence(tokens[:1])
        for token in tokens[1:]:
            growing.token_ids.append(token)
            guesses = proposer.propose(growing, 5)
            length, place = longest_suffix(growing.token_ids, shortest, 8)
            if length and proposer.matched == length:  # beyond 16 places, a shorter match may be found
                period = growing.token_ids[place:]
                assert list(guesses) == [period[i % len(period)] for i in range(5)]
            assert proposer.matched <= (length or shortest - 1)  # a source that goes on may agree in less than an n-gram


@pytest.mark.parametrize(
    ("replaced", "expected"),
    [
        ([7], [30, 31, 32]),  # one token for one
        ([7, 8], [31, 32, 2]),  # two for one: two tokens of the source are passed
        ([7, 8, 30], [31, 32, 2]),  # the nearest token that is equal
        ([], [9, 30, 31]),
    ],
)
def test_a_source_goes_on_behind_other_values(replaced, expected):
    """The second row of a table has other values between the same keys."""
    row, tokens = [20, 21, 22, 9, 30, 31, 32], [2]
    growing, proposer = sequence([*tokens, *row, 2, 20, 21, 22]), SuffixProposer()
    assert list(proposer.propose(growing, 3)) == [9, 30, 31]
    for token in replaced:
        growing.token_ids.append(token)
        guesses = list(proposer.propose(growing, 3))
    assert (guesses if replaced else list(proposer.propose(growing, 3))) == expected


def test_a_source_that_differs_for_long_is_dropped():
    growing, proposer = sequence([2, 20, 21, 22, *range(30, 60), 20, 21, 22]), SuffixProposer()
    lengths = []
    for token in range(100, 110):
        lengths.append(len(proposer.propose(growing, 4)))
        growing.token_ids.append(token)
    assert lengths == [4] * 9 + [0]
    growing.token_ids += [20, 21, 22]
    assert list(proposer.propose(growing, 2)) == [100, 101]


def test_suffix_reads_each_token_once_and_survives_rollbacks():
    proposer, growing, rng = SuffixProposer(), sequence([]), random.Random(0)
    for _ in range(300):
        growing.token_ids += [rng.randrange(3) for _ in range(rng.randrange(4))]
        if rng.random() < 0.1:
            del growing.token_ids[rng.randrange(len(growing.token_ids) + 1) :]
        guesses = proposer.propose(growing, 4)
        assert len(guesses) in (0, 4)
        assert len(proposer._before) <= len(growing.token_ids) + 2
    repeated = [1, 2, 3, 4, 5, 9, 1, 2, 3]
    assert list(SuffixProposer().propose(sequence(repeated), 3)) == [4, 5, 9]


@pytest.mark.parametrize("make", [lambda tokens: SuffixProposer(), lambda tokens: DraftTextProposer("text", tokens)])
def test_long_texts_are_indexed_over_several_steps(make):
    """No step reads more than a part of them, and the last part is found in the end."""
    tokens = list(range(10, 5010))
    proposer = make(tokens)
    growing = sequence([*tokens, 4, 4], turn_start=len(tokens))
    sizes = []
    for _ in range(8):
        proposer.propose(growing, 3)
        sizes.append(len(proposer._before) if isinstance(proposer, SuffixProposer) else proposer._indexed)
        growing.token_ids.append(4 + len(sizes))
    assert max(after - before for before, after in pairwise([0, *sizes])) <= 1100
    growing.token_ids += tokens[4000:4003]
    assert list(proposer.propose(growing, 3)) == tokens[4003:4006]


TEXT = list(range(100, 140))


def follow(proposer, answer):
    """Return how many tokens of an answer were the first guess before them."""
    growing, right = sequence([7, 8], 2), 0
    for token in answer:
        guesses = proposer.propose(growing, 1)
        right += list(guesses) == [token]
        growing.token_ids.append(token)
    return right


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (TEXT, 0),
        (TEXT[:9] + [1] + TEXT[10:], 1),  # replaced
        (TEXT[:9] + TEXT[10:], 1),  # left out
        (TEXT[:9] + [1] + TEXT[9:], 3),  # added: the place is found by two tokens
        (TEXT[:9] + [1, 2, 3] + TEXT[12:], 3),
        (TEXT[20:] + TEXT[:20], 4 + 3),  # lines in another order: three tokens find each
        ([1] * 30 + TEXT, 30 + 3),
    ],
)
def test_given_text_is_followed_again_after_a_difference(answer, wrong):
    assert follow(DraftTextProposer("text", TEXT), answer) >= len(answer) - wrong


def test_given_text_ends_and_rolls_back():
    proposer, growing = DraftTextProposer("text", TEXT[:5]), sequence([7], 1)
    assert proposer.propose(growing, 9) == TEXT[:5]
    growing.token_ids += TEXT[:5]
    assert list(proposer.propose(growing, 9)) == []
    del growing.token_ids[1:]
    assert proposer.propose(growing, 2) == TEXT[:2]
    assert list(DraftTextProposer("text", ()).propose(growing, 3)) == []


def test_corpus_follows_answers_of_the_same_key_only():
    corpus = Corpus()
    corpus.add("a", [1, 2, 3, *TEXT], 3)
    mine, other = CorpusProposer(corpus, "a"), CorpusProposer(corpus, "b")
    prompt = sequence([9, 9, 1, 2, 3], 5)
    assert list(mine.propose(prompt, 4)) == TEXT[:4], "the end of a prompt finds the beginning of an answer"
    assert mine.matched == 3
    assert list(other.propose(prompt, 4)) == []
    prompt.token_ids += TEXT[:6]
    assert list(mine.propose(prompt, 2)) == TEXT[6:8]
    assert mine.matched == 9
    prompt.token_ids += [0, 0, *TEXT[30:33]]
    assert list(mine.propose(prompt, 2)) == TEXT[33:35]
    del prompt.token_ids[2:]
    assert list(mine.propose(prompt, 2)) == []


def test_corpus_is_bounded():
    corpus, rng = Corpus(max_bytes=256 * 100, max_answers=12), random.Random(0)
    for number in range(200):
        tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 40))]
        corpus.add(number % 5, tokens, len(tokens) // 2)
        corpus.add(number % 5, tokens, len(tokens) // 2)  # known already
        assert corpus.num_bytes <= 256 * 100
        kept = [answer for shelf in corpus._shelves.values() for answer in shelf.answers.values()]
        assert sum(map(len, kept)) * 256 == corpus.num_bytes
        assert len(kept) == len(corpus._order) <= 12
    for shelf in corpus._shelves.values():
        assert {entry >> 24 for entry in shelf.index.values()} <= set(shelf.answers)
        assert sorted(shelf.known.values()) == sorted(shelf.answers)
    corpus.add("long", range(1000), 0)
    assert "long" not in corpus._shelves
