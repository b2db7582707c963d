"""What the tests over families share: their checkpoints, both sides loaded, and what each answers. Tests only."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import torch
from family import Family, Question, ask, load_rows
from sensorium import LLM, SamplingParams
from sensorium.engine.batch import Track
from sensorium.engine.types import EngineRequest

TOKENS = 48
BLOCK = 4
ROWS = load_rows()
each = pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in ROWS.items()])


@dataclass(frozen=True, repr=False)
class Answered:
    """What both sides say to one question: the tokens of ours, and logits `[prompt + answer - 1, vocab]`."""

    question: Question
    ids: tuple[int, ...]
    prompt: tuple[int, ...]
    ours: torch.Tensor
    theirs: torch.Tensor


class World:
    """Checkpoints and what was made of them, once per session."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = functools.cache(self._folder)
        self.oracle = functools.cache(lambda name, seed=0, variant="": ROWS[name].load(self.folder(name, seed, variant)))
        self.llm = functools.cache(self._llm)
        self.alone = functools.cache(self._alone)

    def _folder(self, name: str, seed: int = 0, variant: str = "") -> Path:
        changes = ROWS[name].variants[variant] if variant else {}
        return family.save(ROWS[name], self.root / f"{name}-{seed}-{variant}", seed, **changes)

    def _llm(self, name: str, seed: int = 0, variant: str = "") -> LLM:
        return make_llm(ROWS[name], self.folder(name, seed, variant))

    def _alone(self, name: str, seed: int = 0) -> list[Answered]:
        """Every case of a row, each asked alone."""
        row = ROWS[name]
        return [self.answer(ask(row, case, seed * 100 + i), seed) for i, case in enumerate(row.default_cases())]

    def answer(self, question: Question, seed: int = 0, variant: str = "", tokens: int = TOKENS) -> Answered:
        row, llm = question.family, self.llm(question.family.name, seed, variant)
        model, processor = self.oracle(row.name, seed, variant)
        output, ours = record(llm, question, tokens)
        ids = output.outputs[0].token_ids
        inputs = question.theirs(processor)
        assert inputs["input_ids"][0].tolist() == list(output.prompt_token_ids)
        theirs = row.run(model, inputs, ids, positions(llm, question, len(ids)))
        return Answered(question, ids, output.prompt_token_ids, ours, theirs)


def make_llm(row: Family, folder: Path, **options: Any) -> LLM:
    own = {"max_num_seqs": 8, "max_model_len": 1024, "block_size": BLOCK, "device": "cpu"}
    return LLM(folder, **(own | dict(row.options) | options))


def greedy(tokens: int = TOKENS, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **more)


def record(llm: LLM, question: Question, tokens: int) -> tuple[Any, torch.Tensor]:
    """The answer, and the logits of all rows of the prompt and of the answer but its last."""
    model, rows = llm._driver.core.runner.model, []
    real = model.compute_logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(real(hidden).clone())
        return rows[-1]

    model.compute_logits = spy
    try:
        (output,) = llm.generate(question.ours, greedy(tokens, prompt_logprobs=0), use_tqdm=False)
    finally:
        del model.compute_logits
    assert output.error is None, output.error
    return output, torch.cat(rows)


def positions(llm: LLM, question: Question, more: int) -> torch.Tensor | None:
    """As the engine computes them, for the prompt and so many tokens behind it; None where they are a plain count."""
    axes = llm._driver.core.runner.model.rope_axes
    if axes == 1:
        return None
    prepared = llm._inputs.prepare(question.ours)
    track = Track(EngineRequest("positions", prepared.token_ids, greedy(), (), prepared.features), axes)
    out = np.empty((axes, len(prepared.token_ids) + more), dtype=np.int64)
    track.fill_positions(out, 0)
    return torch.from_numpy(out)
