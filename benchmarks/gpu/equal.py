"""The shipped model in float32: the GPU's greedy tokens are the CPU's, with graphs and overlapping steps on and off."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .e2e import recorded
from .machine import Bench
from .parts import Made
from .record import Figure

ASSETS = Path(__file__).parents[2] / "assets"
Answers = list[tuple[int, ...]]


def tokens(bench: Bench) -> Iterator[Made]:
    """Compare answers to images, the video and plain text in one batch, then an answer alone."""
    wanted, _, _ = answers("cpu", False, True, bench.tiny)
    yield Figure("tokens of the CPU's answers", sum(map(len, wanted)), "tokens")
    for overlaps in (False, True):
        for graphs in (False, True):
            yield partial(_compared, bench, wanted, overlaps, graphs)


def _compared(bench: Bench, wanted: Answers, overlaps: bool, graphs: bool) -> Iterator[Figure]:
    words = {False: "off", True: "on"}
    name = f"overlapping {words[overlaps]}, graphs {words[graphs]}"
    found, ahead, replayed = answers(str(bench.device), overlaps, graphs, bench.tiny)
    yield Figure(f"same answers, {name}", _same(found, wanted), "of answers", least=1.0, note=_first_difference(found, wanted))
    if overlaps:
        yield Figure(f"steps ahead, {name}", ahead, "steps", least=1)
    if graphs:
        yield Figure(f"recorded steps, {name}", replayed, "graphs", least=1)


def answers(device: str, overlaps: bool, graphs: bool, tiny: bool) -> tuple[Answers, int, int]:
    """Return the greedy tokens of every question, and the numbers of steps started ahead and recorded."""
    from sensorium import LLM, SamplingParams

    with LLM(str(ASSETS / "tiny-vl"), dtype="float32", device=device, max_model_len=1024, async_scheduling=overlaps) as llm:
        core = llm.engine.loop.core
        if not graphs:
            core.executor.runner.decode_graphs = lambda forward, batch: forward(batch)  # type: ignore[assignment]
        params = SamplingParams(temperature=0.0, max_tokens=12 if tiny else 64, ignore_eos=True)
        chats = _chats()
        outputs = [*llm.chat(chats, params, use_tqdm=False), *llm.chat([chats[0]], params, use_tqdm=False)]
        counts = core.stats.steps_ahead, recorded(core)
    broken = next((output.error for output in outputs if output.error), None)
    if broken is not None:
        raise RuntimeError(broken)
    return [output.outputs[0].token_ids for output in outputs], *counts


def _chats() -> list[Any]:
    """Return the shipped questions and one of text alone."""
    asked = json.loads((ASSETS / "media" / "answers.json").read_text("utf-8"))
    from sensorium.cli.demo import message

    chats: list[Any] = [message(ASSETS / "media" / name, entry["prompt"]) for name, entry in asked.items()]
    return [*chats, [{"role": "user", "content": "Read the text."}]]


def _same(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    return sum(one == other for one, other in zip(found, wanted, strict=True)) / len(wanted)


def _first_difference(found: Answers, wanted: Answers) -> str:
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for place, (a, b) in enumerate(zip(one, other, strict=False)):
            if a != b:
                return f"answer {number} differs at token {place}: {a}, not {b}"
    return ""
