"""Proposers of callers: what they guess is verified; nothing that they do wrong touches an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, ClassVar

import numpy as np
import pytest
from drafting import drafting, free_drafter
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.engine.drafts.custom import SequenceView, make_custom
from sensorium.engine.speculative_config import DraftLimits

PROMPTS = ["one two three one two three", "The sky is blue"]
PARAMS = SamplingParams(temperature=0.8, seed=2, max_tokens=24, ignore_eos=True, logprobs=1)


class Knows:
    """Guesses what an earlier answer to the prompt was."""

    name = "knows"
    answers: ClassVar[dict[tuple[int, ...], Sequence[int]]] = {}
    seen: ClassVar[list[SequenceView]] = []

    def propose(self, sequence: SequenceView, budget: int) -> Sequence[int]:
        self.seen.append(sequence)
        assert sequence.params == PARAMS
        done = len(sequence.token_ids) - sequence.turn_start
        answer = self.answers.get(tuple(sequence.token_ids[: sequence.turn_start]), ())
        return np.array(answer[done : done + 9])  # type: ignore[return-value]


class Wrong:
    """Does what `how` names."""

    how = ""

    def __init__(self) -> None:
        if self.how in ("no instance", "exits at once"):
            raise {"no instance": ValueError, "exits at once": SystemExit}[self.how]("broken")

    def propose(self, sequence: SequenceView, budget: int) -> Any:
        if self.how in ("raises", "exits"):
            raise {"raises": ZeroDivisionError, "exits": SystemExit}[self.how]("broken")
        sequence.token_ids[:] = [1] * 500
        wrong: dict[str, Any] = {
            "None": None,
            "texts": ["a"],
            "halves": [1.5],
            "huge": [2**70],
            "below 0": [-1],
            "nested": [[1]],
        }
        wrong |= {"endless": count(3), "a number": 7, "true": [True] * 9, "beyond": [10**6], "bytes": b"abc"}
        if self.how == "no matched":
            self.matched = "many"
            return [3]
        return wrong[self.how]


HOWS = ["no instance", "exits at once", "raises", "exits", "None", "texts", "halves", "huge", "below 0", "nested", "endless"]
HOWS += ["a number", "true", "beyond", "bytes", "no matched"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = {"method": "custom_class", "model": Knows}
    with LLM("tiny-vl", dtype="float32", max_model_len=256, max_num_seqs=4, speculative_config=config) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Any]:
    with drafting(llm, None):
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    Knows.answers = {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in outputs}
    return [output.outputs for output in outputs]


def custom_drafter(llm: LLM, kind: type) -> Any:
    make = make_custom(f"{kind.__module__}:{kind.__qualname__}")
    return free_drafter(llm.engine.info.vocab_size, DraftLimits(), [make])


def test_guesses_are_verified_and_counted(llm: LLM, expected: list[Any]) -> None:
    with drafting(llm, custom_drafter(llm, Knows)):
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [output.outputs for output in outputs] == expected
        (stats,) = llm.stats.drafts
    assert stats.proposer == "knows"
    assert stats.num_accepted > 20
    assert len({view.request_id for view in Knows.seen}) == len(PROMPTS)
    assert all(view.turn_start > 0 for view in Knows.seen)


def test_the_option_names_a_class(llm: LLM, expected: list[Any]) -> None:
    assert llm.engine.config.speculative_config == {"method": "custom_class", "model": f"{__name__}:Knows"}
    Knows.seen.clear()
    assert [output.outputs for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == expected
    assert Knows.seen


@pytest.mark.parametrize("how", HOWS)
def test_what_goes_wrong_touches_no_answer(llm: LLM, expected: list[Any], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "how", how)
    with drafting(llm, custom_drafter(llm, Wrong)):
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [output.error for output in outputs] == [None, None]
        assert [output.outputs for output in outputs] == expected
        failed = sum(stats.failed for stats in llm.stats.drafts)
    fails = ("raises", "exits", "None", "texts", "halves", "nested", "a number", "no matched")
    assert failed == (2 if how in fails else 0)


def test_a_path_works_in_the_engines_process(expected: list[Any]) -> None:
    config = {"method": "custom_class", "model": "sensorium.engine.drafts.suffix.SuffixProposer"}
    with LLM("tiny-vl", dtype="float32", max_model_len=256, engine_process=True, speculative_config=config) as llm:
        assert [output.outputs for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == expected
        assert llm.stats.no_drafts == ""


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no.such.module:Name", "cannot be imported: ModuleNotFoundError"),
        ("sensorium.engine.drafts.suffix:Missing", "cannot be imported: AttributeError"),
        ("sensorium.engine.drafts.suffix:_MAX_PLACES", "is not a class or a function"),
        ("not a path", "cannot be imported: ValueError"),
    ],
)
def test_a_path_that_names_nothing_is_refused(path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        LLM("tiny-vl", max_model_len=64, speculative_config={"method": "custom_class", "model": path})
    assert caught.value.info.param == "speculative_config"


def test_guesses_are_taken_up_to_the_budget() -> None:
    class Request:
        request_id, params = "r", PARAMS

    class Sequence_:
        message, token_ids, turn_start = Request, [1, 2], 1

    make = make_custom(f"{__name__}:Endless")
    proposer = make(Request)  # type: ignore[arg-type]
    assert proposer is not None
    assert proposer.propose(Sequence_, 5) == [0, 1, 2, 3, 4]  # type: ignore[arg-type]
    assert (proposer.name, proposer.matched) == ("Endless", 0)


class Endless:
    def propose(self, sequence: SequenceView, budget: int) -> Iterable[int]:
        return count()
