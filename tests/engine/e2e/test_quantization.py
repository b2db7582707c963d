"""quantization="int8", "fp8" and "int4": the shipped model gives the same answers for the shipped media as in floats."""

from __future__ import annotations

import json
from pathlib import Path

import family
import pytest
import torch
from cpu import needs_int8, running_with
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.kernels.linear.grouped import ShardedWeight
from sensorium.kernels.linear.groups import GroupPanelWeight
from sensorium.models.layers.linear import Linear

ASSETS = Path(__file__).parents[3] / "assets"
WANTED = json.loads((ASSETS / "media" / "answers.json").read_text())


def chat(name: str) -> list[dict[str, object]]:
    path = ASSETS / "media" / name
    kind = "video" if path.suffix == ".mp4" else "image"
    parts = [{"type": kind, kind: path}, {"type": "text", "text": WANTED[name]["prompt"]}]
    return [{"role": "user", "content": parts}]


@needs_int8
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_reads_the_shipped_media(dtype: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=96, logprobs=0)
    llm = LLM(ASSETS / "tiny-vl", dtype=dtype, device="cpu", quantization="int8")
    outputs = llm.chat([chat(name) for name in WANTED], params, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == [entry["answer"] for entry in WANTED.values()]
    alone = llm.chat(chat("line1.png"), params, use_tqdm=False)[0]
    assert alone.outputs[0].cumulative_logprob == outputs[0].outputs[0].cumulative_logprob


@pytest.mark.parametrize(
    "quantization", ["fp8", "int4", {"method": "int4", "group_size": 32, "symmetric": False, "activations": "int8"}], ids=str
)
def test_other_methods_read_the_shipped_media(quantization: str | dict[str, object]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=96)
    llm = LLM(ASSETS / "tiny-vl", dtype="float32", device="cpu", quantization=quantization)
    outputs = llm.chat([chat(name) for name in WANTED], params, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == [entry["answer"] for entry in WANTED.values()]


@pytest.mark.in_process
def test_int4_is_for_whispers_decoder(tmp_path: Path) -> None:
    folder = family.save(family.load_rows()["whisper"], tmp_path)
    with LLM(folder, device="cpu", quantization="int4") as llm:
        model = llm.engine.loop.core.executor.runner.model
        layers = {path: one.packed for path, one in model.named_modules() if isinstance(one, Linear) and not one.exact}
    assert {path.split(".")[0] for path, one in layers.items() if isinstance(one, GroupPanelWeight | ShardedWeight)} == {
        "decoder"
    }
    towers, no_items = {"method": None, "towers": "int4"}, {"image": 0, "video": 0}
    with pytest.raises(ConfigError, match="has no layer for 4 bits"):
        LLM(ASSETS / "tiny-vl", device="cpu", quantization=towers, limit_mm_per_prompt=no_items)


@pytest.mark.in_process
def test_int8_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with running_with("base"), pytest.raises(ConfigError, match="needs a CPU with AVX2 or AVX-512 VNNI"):
        LLM(ASSETS / "tiny-vl", device="cpu", quantization="int8")
