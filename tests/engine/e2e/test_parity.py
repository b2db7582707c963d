"""Requests at random steps through engines of random size, on small models: each answer equals the one alone.

tests/models/families/test_parity.py compares the answers alone with transformers.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from family import ask, load_rows
from sensorium import LLM, SamplingParams
from sensorium.engine.types import EngineRequest

ANSWER = 24  # tokens of an answer
ROW = load_rows()["qwen2_5_vl"]


def menu() -> list[dict[str, Any]]:
    """Return questions that share beginnings and images, so that caches are hit."""
    pictures = [ask(ROW, "i", seed).data["image"][0] for seed in (1, 2, 3)]
    texts = ("def f(x): return x", "def f(x): return y + 1", "import os and the rest", "")
    begin = "class A: look at this and that one first, and then at the other one: "
    shown = [(), (0,), (0, 1), (2,)]
    return [
        {
            "prompt": begin + " and ".join(ROW.placeholders["image"] for _ in which) + text,
            "multi_modal_data": {"image": [pictures[i] for i in which]} if which else {},
        }
        for which in shown
        for text in texts
    ]


def history(toy: Any, model: Any, requests: list[EngineRequest], rng: random.Random) -> tuple[dict[str, list], Any]:
    """Run some of the requests at random steps through an engine of random size. Return answers and statistics."""
    longest = max(len(request.prompt_token_ids) for request in requests) + ANSWER + 1
    block_size = rng.choice([4, 16])
    core = toy.make_core(
        blocks=-(-longest // block_size) + rng.randint(0, longest // block_size),
        block_size=block_size,
        seqs=rng.randint(2, 8),
        budget=rng.choice([1, 5, 16, 40, 200, 2000]),
        max_len=longest,
        encoder_rows=max(f.range.num_embeds for request in requests for f in request.features) + rng.choice([0, 0, 5, 99]),
        encoder_budget=rng.choice([1, 30, 1000]),
        max_cached=rng.choice([None, None, 0, 8]),
        model=model,
    )
    coming = rng.sample(requests, rng.randint(4, 10))
    answers: dict[str, list[int]] = {request.request_id: [] for request in coming}
    while coming or core.scheduler.requests:
        if coming and rng.random() < 0.4:
            core.add(coming.pop())
        if core.scheduler.requests and rng.random() < 0.02:
            name = rng.choice(sorted(core.scheduler.requests))
            core.abort(name)
            del answers[name]
        for output in core.step().outputs:
            assert output.error is None
            answers[output.request_id] += output.token_ids
    toy.assert_empty(core)
    return answers, core.stats


@pytest.mark.parametrize("histories", [20, pytest.param(2000, marks=pytest.mark.full)])
def test_histories_change_no_answer(checkpoint, toy, histories):
    llm = LLM(checkpoint, max_num_seqs=8, max_model_len=1024)
    short = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    expected, requests = {}, []
    for i, prompt in enumerate(menu()):
        (output,) = llm.generate(prompt, short, use_tqdm=False)
        prepared = llm.engine.inputs.process(prompt)
        expected[str(i)] = list(output.outputs[0].token_ids)
        requests.append(EngineRequest(str(i), prepared.token_ids, short, (), prepared.features))
    counted = dict.fromkeys(("preemptions", "prefix_hits", "encoder_hits", "encoder_evictions", "cut_items"), 0)
    for seed in range(histories):
        answers, stats = history(toy, llm.engine.loop.core.executor.runner.model, requests, random.Random(seed))
        assert answers == {name: expected[name] for name in answers}, f"history {seed}"
        for name in counted:
            counted[name] += getattr(stats, name)
    print(f"{histories} histories: {counted}")
    assert all(count >= histories / 4 for count in counted.values()), counted
