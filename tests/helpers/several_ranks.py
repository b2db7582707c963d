"""Engines of one process and of several ranks: their answers, which must have the same bits, and the processes of the ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sensorium import LLM, SamplingParams
from sensorium.kernels.bodies import bodies_in_use

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=1)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True, logprobs=1, presence_penalty=0.5)


@pytest.fixture
def same_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all engines compute with the bodies of this process, also where measured rates cannot be kept."""
    if "SENSORIUM_CPU" not in os.environ:
        monkeypatch.setenv("SENSORIUM_CPU", ",".join(bodies_in_use()))


def answers(llm: LLM, prompts: object, params: object, adapter: str | Sequence[str | None] | None = None) -> list[Any]:
    """Return prompt log probabilities, token ids and log probabilities, bit for bit."""
    outputs = llm.generate(prompts, params, adapter=adapter, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [(output.prompt_logprobs, output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def peers(llm: LLM) -> list[int]:
    """Return the process ids of all ranks but the first."""
    return children_of(llm.engine.loop.core.pid, "rank_server")


def children_of(pid: int, program: str) -> list[int]:
    """Return the children of a process whose command names a program."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for file in files for child in _read(file).split()]
    return [child for child in children if program.encode() in _read(Path(f"/proc/{child}/cmdline"))]


def _read(file: Path) -> bytes:
    """Return the content of a file of a process, nothing if it has ended."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
