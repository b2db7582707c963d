"""Prompts that are served in the order given, however slowly each of them is prepared. Tests only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sensorium import LLM, SamplingParams
from waiting import wait_until


def generate_together(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> list[Any]:
    """As `llm.generate`; the first to be computed are there all at once, and begin in order."""
    hold_until_prepared(llm, min(len(prompts), 2 * llm.config.max_num_seqs))
    return llm.generate(prompts, params, use_tqdm=False, priority=list(range(len(prompts))))


def hold_until_prepared(llm: LLM, count: int) -> None:
    """The engine's loop does nothing until so many prompts are prepared; 2 max_num_seqs are at most."""
    llm._driver.send(lambda driver: wait_until(lambda: driver._commands.qsize() >= count))
