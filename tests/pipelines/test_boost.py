"""Phrases that are expected: in texts of models with a decoder and without one, in files, live, with beams; and wrong ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import torch
from family import RATE
from parakeet import make_model, make_transducer, save
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import InputError
from sensorium.engine.outputs import CompletionOutput, RequestOutput
from sensorium.engine.phrase_boost import BoostPhrases
from sensorium.models.audio.ctc import CtcState, decode_ctc
from sensorium.pipelines.speech import decode, frames
from sensorium.pipelines.speech.boost import MAX_PHRASES, boost_arguments, boosted_output

SHORT = SamplingParams(temperature=0.0, max_tokens=24)
SIZES = (12_000, 30_000, 48_000)
FAINT, STRONG = 1e-6, 20.0


@pytest.fixture(scope="module")
def llm(whisper: Path) -> Iterator[LLM]:
    with LLM(whisper, max_num_seqs=4, batch_invariant=True) as llm:
        yield llm


@pytest.fixture(scope="module", params=["ctc", "tdt", "rnnt"])
def rows_llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model without a decoder."""
    made = make_model(0) if request.param == "ctc" else make_transducer(0, request.param)
    with LLM(save(tmp_path_factory.mktemp(request.param), *made), max_num_seqs=4, device="cpu", block_size=4) as llm:
        yield llm


@pytest.fixture
def accepting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take answers with phrases, however unlikely they are: random models are sure of nothing."""

    async def accept(plain: RequestOutput, boost: Any, answer: Any) -> RequestOutput:
        return plain if boost is None else await answer(boost, plain.outputs[0].token_ids)

    for module in (decode, frames):
        monkeypatch.setattr(module, "boosted_output", accept)


def audio() -> list[tuple[np.ndarray, int]]:
    return [(family.make_media("audio", (size,), seed), RATE) for seed, size in enumerate(SIZES)]


def hear(llm: LLM, items: object, boost: object, **options: Any) -> list[Any]:
    defaults = {"vad": False, "sampling_params": SHORT, "use_tqdm": False}
    return llm.transcribe(items, boost=boost, **defaults | options)


def test_a_boosted_phrase_is_written(llm: LLM, accepting: None) -> None:
    plain = hear(llm, audio(), [])
    together = hear(llm, audio(), [("two five", STRONG)])
    for item, before, after in zip(audio(), plain, together, strict=True):
        assert "two five" not in before.text
        assert "two five" in after.text
        (alone,) = hear(llm, item, [("two five", STRONG)])
        assert alone.windows == after.windows
    assert [one.text for one in hear(llm, audio(), [("two five", FAINT)])] == [one.text for one in plain]


def test_beams_and_hotter_answers_are_boosted(llm: LLM, accepting: None) -> None:
    item = audio()[1]
    (beams,) = hear(llm, item, [("two five", STRONG)], beam_size=3)
    assert "two five" in beams.text
    assert "two five" not in hear(llm, item, [], beam_size=3)[0].text
    (hot,) = hear(llm, item, [("two five", STRONG)], temperature=0.2)
    assert "two five" in hot.text
    (several,) = hear(llm, item, [("two five", STRONG)], temperature=(0.0, 0.2), log_prob_threshold=-1e-9)
    assert len(several.windows[0].attempts) > 1
    assert "two five" in several.text


def test_the_start_of_a_phrase_may_precede_the_answer(llm: LLM) -> None:
    """A live pass goes on after words that are stable; a phrase may be cut there."""
    arguments = boost_arguments(llm.engine, (("two five", 2.0),))
    assert arguments is not None
    (first, *rest), *_ = (tokens for tokens, _, _ in arguments["phrases"])
    whole, cut = (torch.zeros(llm.engine.tokenizer.vocab_size) for _ in range(2))
    BoostPhrases(**arguments)([first], whole)
    BoostPhrases(**{**arguments, "before": [first]})([], cut)
    assert torch.equal(whole, cut)
    assert whole[rest[0]] == 2.0


def test_a_live_stream_is_boosted(llm: LLM, accepting: None) -> None:
    samples = np.concatenate([item for item, _ in audio()])
    with llm.live_audio(RATE, vad=False, boost=[("two five", STRONG)], sampling_params=SHORT) as session:
        for start in range(0, len(samples), 8000):
            session.push(samples[start : start + 8000])
        session.finish()
        events = list(session.events())
    assert any("two five" in event.text for event in events if event.kind == "final")
    assert all(event.error is None for event in events)


def test_rows_of_models_without_a_decoder(rows_llm: LLM, accepting: None) -> None:
    options = {"sampling_params": None, "compression_ratio_threshold": None, "timestamps": "word"}
    plain, faint = (hear(rows_llm, audio(), boost, **options) for boost in ([], [("two five", FAINT)]))
    for before, after in zip(plain, faint, strict=True):
        assert after.error is None
        assert after.text == before.text
        for one, other in zip(after.segments, before.segments, strict=True):
            assert [(word.start, word.end, word.word) for word in one.words] == [
                (word.start, word.end, word.word) for word in other.words
            ]
            assert one.avg_logprob == pytest.approx(other.avg_logprob, abs=1e-4)
    together = hear(rows_llm, audio(), [("two five", STRONG)], **options)
    assert all("two five" in one.text for one in together)
    for item, one in zip(audio(), together, strict=True):
        assert hear(rows_llm, item, [("two five", STRONG)], **options)[0].windows == one.windows
    mixed = rows_llm.encode([{"prompt": "", "multi_modal_data": {"audio": item}} for item in audio()], use_tqdm=False)
    assert all(one.error is None for one in mixed)


def test_rows_are_decoded_in_chunks(tmp_path: Path, accepting: None) -> None:
    folder, options = save(tmp_path, *make_model(0)), {"sampling_params": None, "compression_ratio_threshold": None}
    texts = []
    for more in ({}, {"max_num_seqs": 1, "max_num_batched_tokens": 16}):
        with LLM(folder, device="cpu", block_size=4, **more) as llm:
            texts.append([one.text for one in hear(llm, audio(), [("two five", 6.0)], **options)])
    assert texts[0] == texts[1]


def test_ctc_rows_are_boosted_where_a_token_begins() -> None:
    """Tokens: 0 is the blank; the phrase is 1 2."""
    rows = torch.full((5, 4), -9.0)
    for row, (token, value) in enumerate([(1, -0.1), (1, -0.1), (0, -0.1), (3, -1.0), (3, -0.5)]):
        rows[row, token] = value
    rows[3, 2] = rows[4, 2] = -2.0
    plain = decode_ctc(rows, CtcState(blank=0), None)
    assert [(one.token, one.first, one.count) for one in plain.tokens] == [(1, 0, 2), (3, 3, 2)]
    rule = BoostPhrases([([1, 2], 0.75, False)], ignored=[0])
    boosted = decode_ctc(rows, CtcState(blank=0), rule)
    assert [(one.token, one.first, one.count) for one in boosted.tokens] == [(1, 0, 2), (2, 3, 1), (3, 4, 1)]
    assert boosted.tokens[1].total == -2.0, "the log probability is the model's"
    middle = decode_ctc(rows[:3], CtcState(blank=0), rule)
    assert decode_ctc(rows[3:], middle, rule) == boosted


@pytest.mark.parametrize(
    ("boost", "code"),
    [
        ("Ann", "invalid_value"),
        (5, "invalid_value"),
        ([""], "invalid_value"),
        (["Ann", "  "], "invalid_value"),
        ([5], "invalid_value"),
        ([("Ann", 1.0, 2.0)], "invalid_value"),
        ([("Ann", float("nan"))], "invalid_value"),
        ([("Ann", float("inf"))], "invalid_value"),
        ([("Ann", 0)], "invalid_value"),
        ([("Ann", -1.0)], "invalid_value"),
        ([("Ann", 21)], "invalid_value"),
        ([("Ann", True)], "invalid_value"),
        ([("Ann", "2")], "invalid_value"),
        (["a" * 101], "invalid_value"),
        (["Ann"] * (MAX_PHRASES + 1), "over_limit"),
    ],
)
def test_wrong_phrases_are_refused(llm: LLM, boost: object, code: str) -> None:
    with pytest.raises(InputError) as caught:
        hear(llm, audio()[0], boost)
    assert (caught.value.info.code, caught.value.info.param) == (code, "boost")
    if code == "over_limit":
        assert (caught.value.info.limit, caught.value.info.value) == (MAX_PHRASES, MAX_PHRASES + 1)
    with pytest.raises(InputError) as caught:
        llm.live_audio(RATE, boost=boost)
    assert caught.value.info.param == "boost"


def test_none_and_pairs_as_lists(llm: LLM) -> None:
    (none,), (empty,) = (hear(llm, audio()[0], boost) for boost in (None, []))
    assert none.windows == empty.windows
    (pair,), (plain_list,) = (hear(llm, audio()[0], [kind(("two five", STRONG))]) for kind in (tuple, list))
    assert pair.windows == plain_list.windows


class _Answers:
    """Answers about a window, by the positions at which no phrase begins."""

    def __init__(self, answers: dict[tuple[int, ...], tuple[list[int], float]]) -> None:
        self.answers, self.asked = answers, list[tuple[list[int], list[int]]]()

    async def __call__(self, boost: Any, drafted: Any) -> RequestOutput:
        self.asked.append((list(boost["skipped"]), list(drafted)))
        return made(*self.answers[tuple(boost["skipped"])])


def made(tokens: list[int], logprob: float, reason: str = "stop") -> RequestOutput:
    return RequestOutput("", None, [], [CompletionOutput(0, "", tokens, cumulative_logprob=logprob, finish_reason=reason)])


def decided(plain: RequestOutput, answers: _Answers) -> list[int]:
    boost = {"phrases": [([1, 2, 3], 2.0, False)]}
    return asyncio.run(boosted_output(plain, boost, answers)).outputs[0].token_ids


def test_an_answer_with_an_unfinished_phrase_is_written_again() -> None:
    answers = _Answers({(): ([9, 1, 2, 8, 9], -1.0), (1,): ([9, 7, 1, 2, 3], -5.0)})
    assert decided(made([9, 7, 6], -2.0), answers) == [9, 7, 1, 2, 3]
    assert answers.asked == [([], [9, 7, 6]), ([1], [9, 1, 2, 8, 9])], "each answer is the draft of the next"


def test_the_beginning_of_a_phrase_that_is_heard_anyway_stays() -> None:
    answers = _Answers({(): ([9, 1, 2, 8], -1.0)})
    assert decided(made([9, 1, 2, 8], -1.0), answers) == [9, 1, 2, 8]
    assert len(answers.asked) == 1


@pytest.mark.parametrize(
    ("boosted", "chosen"),
    [
        (([9, 1, 2, 3], -7.9), True),  # 6 for the phrase, 5.9 less likely
        (([9, 1, 2, 3], -8.1), False),
        (([9, 1, 2, 3, 1, 2, 3], -8.1), False),  # a phrase counts once
        (([9, 8], -0.5), False),  # no phrase
    ],
)
def test_a_phrase_must_be_worth_its_loss(boosted: tuple[list[int], float], chosen: bool) -> None:
    plain = [9, 7, 6]
    assert decided(made(plain, -2.0), _Answers({(): boosted})) == (boosted[0] if chosen else plain)


def test_the_text_without_phrases_stands_if_none_is_finished(llm: LLM) -> None:
    """A weight that writes the beginning of a phrase, but not its end, changes nothing."""
    for item in audio():
        (plain,), (boosted,) = hear(llm, item, []), hear(llm, item, [("seven eight nine ten eleven twelve", 1.0)])
        assert boosted.windows == plain.windows


def test_log_probabilities_are_those_without_the_boost(llm: LLM, accepting: None) -> None:
    item = audio()[1]
    (plain,) = hear(llm, item, [])
    (boosted,) = hear(llm, item, [("two five", STRONG)])
    assert boosted.avg_logprob < plain.avg_logprob
    (beams,) = hear(llm, item, [("two five", STRONG)], beam_size=3)
    assert beams.avg_logprob < plain.avg_logprob
