"""Drafting on equals drafting off, bit for bit, for the decoders of all families: windows, chunks, experts, states."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drafting import drafting, free_drafter, with_mistakes
from family import Family, ask
from parity import ROWS, LoadedModels
from sensorium import SamplingParams

TOKENS = 40


@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in ROWS.items()])
@pytest.mark.parametrize("variant", [""])
def test_answers_and_their_bits_are_those_without_drafts(row: Family, variant: str, loaded: LoadedModels) -> None:
    """Several answers at once. Their drafts are the answers with mistakes, and what repeats itself."""
    llm = loaded.llm(row.name, 0, variant)
    prompts = [ask(row, case, number).ours for number, case in enumerate(row.default_cases())]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=TOKENS, ignore_eos=True, logprobs=3)
    with drafting(llm, None) as scheduler:
        steps = scheduler.stats.steps
        expected = [output.outputs for output in llm.generate(prompts, params, use_tqdm=False)]
        steps = scheduler.stats.steps - steps
    size = llm.engine.info.vocab_size
    hints = [
        replace(params, draft_text=with_mistakes(answers[0].token_ids, size, seed)) for seed, answers in enumerate(expected)
    ]
    with drafting(llm, free_drafter(size)) as scheduler:
        before = scheduler.stats.steps
        outputs = llm.generate(prompts, hints, use_tqdm=False)
        assert [output.error for output in outputs] == [None] * len(outputs)
        assert [output.outputs for output in outputs] == expected
        assert scheduler.stats.steps - before < steps * 0.8
