"""The shipped model in float32: the GPU's greedy tokens are the CPU's, with graphs and overlapping steps on and off."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .machine import Bench
from .record import Figure

ASSETS = Path(__file__).parents[2] / "assets"
Answers = list[tuple[int, ...]]


def tokens(bench: Bench) -> Iterator[Figure]:
    """Pictures, the clip and plain text, together in a batch; then an answer alone."""
    wanted = answers("cpu", False, True, bench.tiny)
    yield Figure("tokens of the CPU's answers", sum(map(len, wanted)), "tokens")
    for overlaps in (False, True):
        for graphs in (False, True):
            found = answers(str(bench.device), overlaps, graphs, bench.tiny)
            words = {False: "off", True: "on"}
            name = f"same answers, overlapping {words[overlaps]}, graphs {words[graphs]}"
            yield Figure(name, _same(found, wanted), "of answers", least=1.0, note=_first_difference(found, wanted))


def answers(device: str, overlaps: bool, graphs: bool, tiny: bool) -> Answers:
    """Greedy tokens of every question."""
    from sensorium import LLM, SamplingParams

    with LLM(str(ASSETS / "tiny-vl"), dtype="float32", device=device, max_model_len=1024, async_scheduling=overlaps) as llm:
        if not graphs:
            llm._driver.core.runner.graphs = lambda forward, batch: forward(batch)  # type: ignore[assignment]
        params = SamplingParams(temperature=0.0, max_tokens=12 if tiny else 64, ignore_eos=True)
        chats = _chats()
        outputs = [*llm.chat(chats, params, use_tqdm=False), *llm.chat([chats[0]], params, use_tqdm=False)]
    broken = next((output.error for output in outputs if output.error), None)
    if broken is not None:
        raise RuntimeError(broken)
    return [output.outputs[0].token_ids for output in outputs]


def _chats() -> list[Any]:
    """The questions that ship, and text alone."""
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
