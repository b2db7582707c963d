"""The shipped model with every possible op in Triton against the same engine without: an image, text, and a batch of both."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from PIL import Image
from sensorium import LLM, SamplingParams
from sensorium.kernels.backends import BACKENDS
from sensorium.kernels.dispatch import can_run
from triton.runtime.interpreter import GridExecutor

MODEL = Path(__file__).parents[3] / "assets" / "tiny-vl"


@pytest.mark.parametrize(
    ("dtype", "cached", "near"),
    [
        ("float32", "auto", 1e-4),
        # two nearly equal numbers may be quantised to different values
        pytest.param("float32", "int8", 2e-2, marks=pytest.mark.full),
        pytest.param("bfloat16", "auto", 5e-2, marks=pytest.mark.full),
        pytest.param("bfloat16", "fp8", 1e-1, marks=pytest.mark.full),
    ],
)
def test_the_same_answers(monkeypatch: pytest.MonkeyPatch, dtype: str, cached: str, near: float) -> None:
    cpu, kind = torch.device("cpu"), getattr(torch, dtype)
    every = ",".join(f"{op}=triton" for op, names in BACKENDS.items() if "triton" in names and can_run(op, "triton", cpu, kind))
    launched: set[str] = set()
    launch, alone = GridExecutor.__call__, threading.Lock()  # the interpreter is not thread-safe

    def spy(self: GridExecutor, *args: object, **kwargs: object) -> None:
        with alone:
            launched.add(self.fn.__name__)
            launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", spy)
    image = Image.new("RGB", (56, 56), (200, 30, 60))
    slot = "<|vision_start|><|image_pad|><|vision_end|>"
    prompts = [{"prompt": f"{slot}What?", "multi_modal_data": {"image": image}}, "one two three four", "x"]
    params = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2)
    options = {"max_model_len": 64, "max_num_batched_tokens": 16, "max_num_seqs": 4, "kv_cache_dtype": cached}
    answers = []
    for kernels in ("", every):
        with LLM(MODEL, dtype=dtype, kernels=kernels, **options) as llm:
            answers.append([output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)])
        assert bool(launched) == bool(kernels)
    assert {
        "_norm_kernel",
        "_prepare_qkv_kernel",
        "_attend_kernel",
        "_act_and_mul_kernel",
        "_rotate_kernel",
        "_varlen_kernel",
        "_scatter_kernel",
    } <= launched
    for plain, triton in zip(*answers, strict=True):
        assert triton.token_ids == plain.token_ids
        for one, other in zip(plain.logprobs, triton.logprobs, strict=True):
            assert one.keys() == other.keys()
            for token in one:
                assert other[token].logprob == pytest.approx(one[token].logprob, abs=near)
