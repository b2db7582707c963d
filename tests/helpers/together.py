"""Serve prompts in the given order, however slowly each is prepared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sensorium import LLM, SamplingParams
from waiting import wait_until


def generate_together(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> list[Any]:
    """Return what `llm.generate` does; the first prompts start together and in order."""
    hold_until_prepared(llm, min(len(prompts), 2 * llm.config.max_num_seqs))
    return llm.generate(prompts, params, use_tqdm=False, priority=list(range(len(prompts))))


def hold_until_prepared(llm: LLM, count: int) -> None:
    """Block the engine loop until `count` prompts are prepared; at most 2 max_num_seqs can be."""
    llm.engine.loop.send(lambda engine_loop: wait_until(lambda: engine_loop._messages.qsize() >= count))
