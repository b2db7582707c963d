"""The whole engine against transformers: 64 greedy tokens on small random checkpoints, however the work is cut.

The oracle reads each answer once, teacher-forced, with our positions: a sequence equals its greedy one when every token
is the likeliest after those before it. A token that is not may only be a tie (top-2 margin below 1e-4); ties are
counted, and the log probabilities have to agree everywhere, beyond them too.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import build_checkpoint, load_oracle
from PIL import Image
from sensorium import LLM, SamplingParams
from sensorium.engine.types import EngineRequest
from sensorium.mm.positions import mrope_positions

TOKENS = 64
CASES = {"text": "", "image": "i", "images": "iii", "video": "v", "interleaved": "ivi"}
SEEDS = [pytest.param(seed, marks=[] if seed < 2 else pytest.mark.full) for seed in range(10)]
PADS = {"i": "<|vision_start|><|image_pad|><|vision_end|>", "v": "<|vision_start|><|video_pad|><|vision_end|>"}
VISION = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
CHUNKS = (2048, 7, 13)  # rows a step
ANSWER = 24  # tokens of an answer in a history


@cache
def checkpoint(root: Path, family: str, seed: int) -> Path:
    return build_checkpoint(root / f"{family}-{seed}", family, seed)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("parity")


def make_prompt(items: str, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def noise(*shape: int) -> np.ndarray:
        return rng.integers(0, 256, (*shape, 3), dtype=np.uint8)

    sizes = [(90, 130), (60, 60), (140, 70)]
    data = {
        "image": [Image.fromarray(noise(*sizes[i % 3])) for i, kind in enumerate(items) if kind == "i"],
        "video": [noise(6, 80, 100) for kind in items if kind == "v"],
    }
    text = f"def f{seed}(x):" + " and ".join(PADS[kind] for kind in items) + " return it" + " + x" * (seed % 5)
    return {"prompt": text, "multi_modal_data": {name: values for name, values in data.items() if values}}


def oracle_logits(model: Any, processor: Any, llm: LLM, prompt: dict[str, Any], answer: tuple[int, ...]) -> torch.Tensor:
    """Logits that the oracle has for each token of the answer, `[tokens, vocab]`; the prompts' tokens must be equal."""
    data = prompt["multi_modal_data"]
    made = dict(processor(text=[prompt["prompt"]], images=data.get("image"), videos=data.get("video"), return_tensors="pt"))
    prepared = llm._inputs.prepare(prompt)
    assert made["input_ids"][0].tolist() == list(prepared.token_ids)
    placed = [(feature.range, feature.geometry) for feature in prepared.features]
    start = len(prepared.token_ids)
    positions = mrope_positions(start + len(answer), placed, axes=3)[0][:, None]
    kept = {name: value for name, value in made.items() if name in VISION}
    with torch.inference_mode():
        first = model(input_ids=made["input_ids"], position_ids=positions[..., :start], use_cache=True, **kept)
        rest = model(
            input_ids=torch.tensor([answer[:-1]]),  # in a second call: an answer may hold placeholder tokens as such
            position_ids=positions[..., start : start + len(answer) - 1],
            past_key_values=first.past_key_values,
        )
    return torch.cat([first.logits[0, -1:], rest.logits[0]]).float()


def count_ties(output: Any, logits: torch.Tensor) -> int:
    """Assert that an answer is the oracle's; tokens that stand where its two best are level."""
    (answer,) = output.outputs
    assert output.error is None
    assert len(answer.token_ids) == TOKENS
    table = logits.log_softmax(-1)
    ours = torch.tensor([entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)])
    chosen = torch.tensor(answer.token_ids)
    theirs = table.gather(-1, chosen[:, None])[:, 0]
    tolerance = 2e-4 * max(1.0, float(logits.std()))
    assert (ours - theirs).abs().max() < tolerance
    behind = table.amax(-1) - theirs
    assert behind.max() < 1e-4
    return int((behind > 0).sum())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_greedy_tokens_are_the_oracles(root, family, seed):
    path = checkpoint(root, family, seed)
    model, processor = load_oracle(path)
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    prompts = [make_prompt(items, seed * 100 + i) for i, items in enumerate(CASES.values())]
    mixed = [*prompts, *(make_prompt(items, seed * 100 + 50 + i) for i, items in enumerate(("i", "", "iv")))]
    ties = sequences = 0
    expected: list[tuple[int, ...]] = []
    for chunk in CHUNKS:
        llm = LLM(path, max_num_seqs=8, max_model_len=1024, max_num_batched_tokens=chunk)
        outputs = llm.generate(mixed, greedy, use_tqdm=False)
        checked = list(zip(mixed, outputs, strict=True))
        if expected:  # what an earlier cut gave is known to be right
            checked = [pair for pair, known in zip(checked, expected, strict=True) if pair[1].outputs[0].token_ids != known]
        else:
            expected = [output.outputs[0].token_ids for output in outputs]
            checked += [(prompt, llm.generate(prompt, greedy, use_tqdm=False)[0]) for prompt in prompts]  # each alone
        for prompt, output in checked:
            logits = oracle_logits(model, processor, llm, prompt, output.outputs[0].token_ids)
            found = count_ties(output, logits)
            ties, sequences = ties + bool(found), sequences + 1
        assert not llm._driver.core.scheduler.requests
    print(f"{family} seed {seed}: {ties} of {sequences} sequences hold a tie")
    assert ties <= max(1, sequences // 100)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("case", ["image", "video"])
def test_another_picture_changes_the_answer(root, family, case):
    llm = LLM(checkpoint(root, family, 0), max_model_len=1024)
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    one, other = make_prompt(CASES[case], 1), make_prompt(CASES[case], 6)
    other["prompt"] = one["prompt"]
    outputs = llm.generate([one, other], greedy, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids


def menu() -> list[dict[str, Any]]:
    """Questions that begin alike and share pictures, so that blocks and encoder rows are found again."""
    pictures = [make_prompt("i", seed)["multi_modal_data"]["image"][0] for seed in (1, 2, 3)]
    texts = ("def f(x): return x", "def f(x): return y + 1", "import os and the rest", "")
    begin = "class A: look at this and that one first, and then at the other one: "
    shown = [(), (0,), (0, 1), (2,)]
    return [
        {
            "prompt": begin + " and ".join(PADS["i"] for _ in which) + text,
            "multi_modal_data": {"image": [pictures[i] for i in which]} if which else {},
        }
        for which in shown
        for text in texts
    ]


def history(toy: Any, model: Any, requests: list[EngineRequest], rng: random.Random) -> tuple[dict[str, list], Any]:
    """Some of the requests at random moments through an engine of random size; what each answered, and the counts."""
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
        kept=rng.choice([None, None, 0, 8]),
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
        for output in core.step():
            assert output.error is None
            answers[output.request_id] += output.token_ids
    toy.assert_empty(core)
    return answers, core.stats


@pytest.mark.parametrize("histories", [20, pytest.param(2000, marks=pytest.mark.full)])
def test_histories_give_the_oracles_tokens(root, toy, histories):
    path = checkpoint(root, "qwen2_5_vl", 0)
    model, processor = load_oracle(path)
    llm = LLM(path, max_num_seqs=8, max_model_len=1024)
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    prompts, short = menu(), SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    expected, requests = {}, []
    for i, prompt in enumerate(prompts):
        (output,) = llm.generate(prompt, greedy, use_tqdm=False)
        assert count_ties(output, oracle_logits(model, processor, llm, prompt, output.outputs[0].token_ids)) == 0
        prepared = llm._inputs.prepare(prompt)
        expected[str(i)] = list(output.outputs[0].token_ids[:ANSWER])
        requests.append(EngineRequest(str(i), prepared.token_ids, short, (), prepared.features))
    counted = dict.fromkeys(("preemptions", "prefix_hits", "encoder_hits", "encoder_evictions", "cut_items"), 0)
    for seed in range(histories):
        answers, stats = history(toy, llm._driver.core.runner.model, requests, random.Random(seed))
        assert answers == {name: expected[name] for name in answers}, f"history {seed}"
        for name in counted:
            counted[name] += getattr(stats, name)
    print(f"{histories} histories: {counted}")
    assert all(count >= histories / 4 for count in counted.values()), counted
