"""`explain(output)`: what was drafted and accepted for an answer, by proposer and position."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drafting import FREE, drafting, free_drafter
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import InputError
from sensorium.engine.answer_report import report_answer
from sensorium.engine.outputs import RequestOutput
from sensorium.engine.speculative_config import DraftLimits
from sensorium.engine.stats import DraftStats

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def test_an_answer_shows_its_drafts() -> None:
    with LLM("tiny-vl", dtype="float32", max_model_len=128) as llm:
        with drafting(llm, None):
            (plain,) = llm.generate(["one two three"], PARAMS, use_tqdm=False)
            assert "without a step" in str(llm.explain(plain))
            assert dict(llm.explain(plain).rows())["drafts"].startswith("none")
        answer = plain.outputs[0].token_ids
        with drafting(llm, free_drafter(llm.engine.info.vocab_size, DraftLimits(), costs=FREE)) as scheduler:
            before = scheduler.stats.steps
            params = replace(PARAMS, draft_text=answer)
            (output,) = llm.generate(["one two three"], params, use_tqdm=False)
            report = llm.explain(output)
            steps = scheduler.stats.steps - before
        (stats,) = report.drafts
        assert report.saved_steps == sum(stats.accepted) == len(answer) - steps > 0
        rows = dict(report.rows())
        assert f"{stats.num_accepted} of {stats.num_drafted} tokens accepted (100%)" in rows["drafts of hypothesis"]
        assert rows["  position 1"] == f"{stats.accepted[0]} of {stats.drafted[0]}"
        assert rows["answer"].startswith("24 tokens")
        with pytest.raises(InputError) as caught:
            llm.explain("text")  # type: ignore[call-overload]
        assert (caught.value.info.code, caught.value.info.param) == ("invalid_value", "output")


def test_what_was_switched_off_failed_or_never_drafts() -> None:
    drafts = (DraftStats("suffix", 8, (8, 3), (1, 0), 1), DraftStats("mine", failed=1))
    output = RequestOutput("r", None, [1, 2], [], drafts=drafts)
    rows = dict(report_answer(output, "").rows())
    assert rows["drafts of suffix"] == "1 of 11 tokens accepted (9%) in 8 drafts; switched off, since it did not pay"
    assert rows["drafts of mine"] == "0 of 0 tokens accepted in 0 drafts; failed"
    assert "other rows of a step" in dict(report_answer(replace(output, drafts=()), "rows").rows())["drafts"]
    assert "num_speculative_tokens=0" in dict(report_answer(replace(output, drafts=()), "off").rows())["drafts"]
