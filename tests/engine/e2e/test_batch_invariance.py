"""A request gives the same bits with any other requests, chunks and cache hits."""

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import build_checkpoint
from PIL import Image
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.engine.types import EngineRequest

PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request, tmp_path_factory):
    path = build_checkpoint(tmp_path_factory.mktemp("invariant"), "qwen2_5_vl", 3)
    return LLM(path, max_model_len=1024, dtype=request.param, batch_invariant=True)


def asked(llm: Any, name: str, seed: int, text: str) -> EngineRequest:
    rng = np.random.default_rng(seed)
    picture = Image.fromarray(rng.integers(0, 256, (90 + 40 * (seed % 3), 130, 3), dtype=np.uint8))
    prepared = llm.engine.inputs.process(
        {"prompt": f"look at {PLACEHOLDER} and say: {text}", "multi_modal_data": {"image": picture}}
    )
    return EngineRequest(name, prepared.token_ids, PARAMS, (), prepared.features)


def run(core: Any, ours: EngineRequest, mates: list[EngineRequest], lead: int) -> list[Any]:
    """Return the log probabilities of one request that is added `lead` steps after the others."""
    for mate in mates:
        core.add(mate)
    found: list[Any] = []
    added = False
    while core.scheduler.requests or not added:
        if lead <= 0 and not added:
            core.add(ours)
            added = True
        lead -= 1
        for output in core.step().outputs:
            assert output.error is None
            if output.request_id == ours.request_id:
                found += output.logprobs or ()
    return found


@pytest.fixture(params=[None, "torch"])
def kernels(request, monkeypatch):
    """Run with the C++ kernels, if there are any, and without."""
    if request.param:
        ops = ("attention", "varlen_attention", "rms_norm", "rotary", "act_and_mul")
        monkeypatch.setenv("SENSORIUM_KERNELS", ",".join(f"{op}={request.param}" for op in ops))


CASES = list(itertools.product((0, 1, 4, 7), (4096, 5, 16, 33), (0, 3), (16, 4), (True, False)))


@pytest.mark.parametrize("count", [16, pytest.param(len(CASES), marks=pytest.mark.full)])
def test_bits_do_not_depend_on_batching_chunking_or_caches(llm, toy, kernels, count):
    model = llm.engine.loop.core.executor.runner.model
    ours = asked(llm, "ours", 1, "what is it, and why is it so?")
    others = [asked(llm, f"mate{i}", 1 + i % 4, "something else " * (1 + 3 * i)) for i in range(7)]
    expected = run(
        toy.make_core(blocks=200, block_size=16, budget=4096, max_len=1024, encoder_rows=999, model=model, invariant=True),
        ours,
        [],
        0,
    )
    assert len(expected) == 12
    for mates, budget, lead, block_size, warm in random.Random(0).sample(CASES, count):
        core = toy.make_core(
            blocks=3200 // block_size,
            block_size=block_size,
            budget=budget,
            max_len=1024,
            encoder_rows=999,
            model=model,
            invariant=True,
        )
        if warm:  # its image, or all but the end of its prompt, is cached
            run(core, replace(ours, request_id="before", prompt_token_ids=(*ours.prompt_token_ids[:-3], 5)), [], 0)
        got = run(core, ours, others[:mates], lead)
        assert got == expected, f"{mates} mates, {budget} rows a step, {lead} steps late, blocks of {block_size}, warm={warm}"


def test_bits_do_not_depend_on_preemption(llm, toy, kernels):
    model = llm.engine.loop.core.executor.runner.model
    ours, other = asked(llm, "ours", 1, "what is it?"), asked(llm, "other", 2, "what is that?")
    options = {"blocks": 40, "block_size": 16, "max_len": 300, "encoder_rows": 999, "model": model, "invariant": True}
    expected = run(toy.make_core(budget=4096, **options), ours, [], 0)
    core = toy.make_core(budget=20, seqs=1, caching=False, **options)
    core.add(ours)
    found = [entry for _ in range(6) for output in core.step().outputs for entry in output.logprobs or ()]
    core.add(replace(other, priority=-1))
    outputs = toy.drain(core)["ours"]
    assert outputs[-1].stats.preemptions == 1
    assert found + [entry for output in outputs for entry in output.logprobs or ()] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_soft_caps_latent_rows_and_bidirectional_items(dtype, toy, kernels):
    """The decoder has a layer of each kind. An item is computed in one step; the rest of the prompt is cut anywhere."""
    model, rng = toy.Stack(dtype), random.Random(3)
    drawn = [toy.make_request(f"mate{i}", random.Random(i), logprobs=3) for i in range(5)]
    text = [rng.randrange(4, 101) for _ in range(60)]
    ours = toy.request("ours", [*text[:20], *[toy.PAD] * 14, *text[20:]], [toy.item(20, 12, edges=True)])
    ours = replace(ours, params=PARAMS)
    options = {"max_len": 200, "model": model, "invariant": True, "prompt_attention": "bidirectional_items"}
    expected = run(toy.make_core(blocks=90, block_size=16, budget=512, **options), ours, [], 0)
    assert len(expected) == 12
    for mates, budget, lead, block_size, warm in ((0, 18, 0, 16, False), (5, 21, 2, 4, True), (3, 40, 1, 8, True)):
        core = toy.make_core(blocks=1440 // block_size, block_size=block_size, budget=budget, seqs=6, **options)
        if warm:
            run(core, replace(ours, request_id="before", prompt_token_ids=(*ours.prompt_token_ids[:-3], 5)), [], 0)
        assert run(core, ours, drawn[:mates], lead) == expected
        assert warm == (core.stats.prefix_hits > 40)


def test_setups_that_cannot_guarantee_it_are_refused(tmp_path):
    path = build_checkpoint(tmp_path / "model", "qwen2_vl", 0)
    with pytest.raises(ConfigError, match="batch_invariant=True needs a CPU and float32 or bfloat16"):
        LLM(path, max_model_len=256, dtype="float16", batch_invariant=True)
