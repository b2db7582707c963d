"""The whole engine against transformers: 64 greedy tokens on small random checkpoints, however the work is cut.

The oracle reads each answer once, teacher-forced, with our positions: a sequence equals its greedy one when every token
is the likeliest after those before it. A token that is not may only be a tie (top-2 margin below 1e-4); ties are
counted, and the log probabilities have to agree everywhere, beyond them too.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import build_checkpoint, load_oracle
from PIL import Image
from sensorium import LLM, SamplingParams
from sensorium.mm.positions import mrope_positions

TOKENS = 64
CASES = {"text": "", "image": "i", "images": "iii", "video": "v", "interleaved": "ivi"}
SEEDS = [pytest.param(seed, marks=[] if seed < 2 else pytest.mark.full) for seed in range(10)]
PADS = {"i": "<|vision_start|><|image_pad|><|vision_end|>", "v": "<|vision_start|><|video_pad|><|vision_end|>"}
VISION = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
CHUNKS = (2048, 7, 13)  # rows a step


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
