"""Shared state of the family tests: checkpoints, our model and the oracle of each, and their answers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import torch
from family import Family, Question, ask, load_rows
from sensorium import LLM, SamplingParams
from sensorium.engine.types import EngineRequest
from sensorium.engine.worker.sequence_state import SequenceState

TOKENS = 48
BLOCK = 4
ROWS = load_rows()
each = pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in ROWS.items()])


@dataclass(frozen=True, repr=False)
class Answered:
    """The answer of both sides to one question: our tokens, and logits `[prompt + answer - 1, vocab]`."""

    question: Question
    ids: tuple[int, ...]
    prompt: tuple[int, ...]
    ours: torch.Tensor
    theirs: torch.Tensor


MODELS_HELD = 8  # more than a row has seeds and variants


class LoadedModels:
    """Checkpoints, made once per session, and the loaded models used last. Tests that share them run row by row."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = functools.cache(self._folder)
        recent = functools.lru_cache(MODELS_HELD)
        self.oracle = recent(lambda name, seed=0, variant="": ROWS[name].load(self.folder(name, seed, variant)))
        self.llm = recent(self._llm)
        self.alone = recent(self._alone)

    def _folder(self, name: str, seed: int = 0, variant: str = "") -> Path:
        changes = ROWS[name].variants[variant] if variant else {}
        return family.save(ROWS[name], self.root / f"{name}-{seed}-{variant}", seed, **changes)

    def _llm(self, name: str, seed: int = 0, variant: str = "") -> LLM:
        return make_llm(ROWS[name], self.folder(name, seed, variant))

    def _alone(self, name: str, seed: int = 0) -> list[Answered]:
        """Ask every case of a family alone."""
        row = ROWS[name]
        return [self.answer(ask(row, case, seed * 100 + i), seed) for i, case in enumerate(row.default_cases())]

    def answer(self, question: Question, seed: int = 0, variant: str = "", tokens: int = TOKENS) -> Answered:
        row, llm = question.family, self.llm(question.family.name, seed, variant)
        model, processor = self.oracle(row.name, seed, variant)
        output, ours = record(llm, question, tokens)
        ids = output.outputs[0].token_ids
        inputs = question.theirs(processor)
        assert inputs["input_ids"][0].tolist() == list(output.prompt_token_ids)
        place = positions(llm, question, len(ids))
        theirs = row.run(model, inputs, ids, place)
        if not (ours - theirs).abs().max() < limit(row, theirs):
            theirs = run_in_float64(row, model, inputs, ids, place)
        return Answered(question, ids, output.prompt_token_ids, ours, theirs)


def limit(row: Family, logits: torch.Tensor) -> float:
    """Return the largest difference of float32 logits that a row allows."""
    return row.tolerance * max(1.0, float(logits.std()))


def run_in_float64(
    row: Family, model: Any, inputs: Mapping[str, Any], ids: Sequence[int], place: torch.Tensor | None
) -> torch.Tensor:
    """Return the oracle's logits in float64, rounded to float32: where two experts are nearly as likely, its float32 may err.

    An oracle that computes in float32 only returns those logits again.
    """
    wide = {name: widened(value) for name, value in inputs.items()}
    model.double()
    try:
        theirs = row.run(model, wide, ids, place).float()
        print(f"{row.name}: compared with the oracle in float64")
        return theirs
    except RuntimeError as err:  # a product of both dtypes
        print(f"{row.name}: the oracle does not run in float64: {err}")
    finally:
        model.float()
    return row.run(model, inputs, ids, place)


def widened(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def make_llm(row: Family, folder: Path, **options: Any) -> LLM:
    own = {"max_num_seqs": 8, "max_model_len": 1024, "block_size": BLOCK, "device": "cpu"}
    return LLM(folder, **(own | dict(row.options) | options))


def greedy(tokens: int = TOKENS, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **more)


def record(llm: LLM, question: Question, tokens: int, **call: Any) -> tuple[Any, torch.Tensor]:
    """Return the answer and the logits of all prompt and answer tokens but the last."""
    model, rows = llm.engine.loop.core.executor.runner.model, []
    real = model.compute_logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(real(hidden).clone())
        return rows[-1]

    model.compute_logits = spy
    try:
        (output,) = llm.generate(question.ours, greedy(tokens, prompt_logprobs=0), use_tqdm=False, **call)
    finally:
        del model.compute_logits
    assert output.error is None, output.error
    logits = torch.cat(rows)
    count = logits.shape[1] - getattr(getattr(model, "spec", None), "unpredicted", 0)
    assert (logits[:, count:] == -torch.inf).all()
    return output, logits[:, :count]


def positions(llm: LLM, question: Question, more: int) -> torch.Tensor | None:
    """Return the engine's positions of the prompt and `more` tokens after it; None if they are a plain range."""
    axes = llm.engine.loop.core.executor.runner.model.rope_axes
    if axes == 1:
        return None
    prepared = llm.engine.inputs.process(question.ours)
    sequence = SequenceState(EngineRequest("positions", prepared.token_ids, greedy(), (), prepared.features), axes)
    out = np.empty((axes, len(prepared.token_ids) + more), dtype=np.int64)
    sequence.fill_positions(out, 0)
    return torch.from_numpy(out)
