"""`LLM(kernels=...)` chooses backends for one engine; unknown backends and backends that cannot run are refused."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError, InputError
from sensorium.engine.config import EngineConfig
from sensorium.engine.setup.resolve import check_kernels
from sensorium.kernels import dispatch
from sensorium.kernels.attention import reference
from sensorium.kernels.backends import BACKENDS
from sensorium.kernels.gpu import launch_config
from sensorium.processors import images

MODEL = Path(__file__).parents[3] / "assets" / "tiny-vl"
PARAMS = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.mark.in_process
def test_an_engine_uses_the_selected_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = reference.attend

    def spy(*args: object) -> object:
        calls.append(threading.current_thread().name)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(reference, "attend", spy)
    with LLM(MODEL, max_model_len=64) as usual, LLM(MODEL, max_model_len=64, kernels="attention=reference") as told:
        expected = usual.generate(["one two three"], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        assert not calls
        assert told.generate(["one two three"], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == expected
        assert calls
        calls.clear()
        usual.generate(["one two four"], PARAMS, use_tqdm=False)
        assert not calls


def test_media_processing_uses_the_selected_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def spy(self: object, *args: object) -> None:
        if self is info:  # an earlier engine may still warm up
            found.append(dispatch.backend("act_and_mul", torch.device("cpu"), torch.float32))
        raise InputError("seen enough")

    slot = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = {"prompt": slot, "multi_modal_data": {"image": Image.new("RGB", (32, 32))}}
    with LLM(MODEL, max_model_len=64, kernels="act_and_mul=torch", warm_up=False) as llm:
        info = llm.engine.inputs.media._info
        monkeypatch.setattr(type(info), "process", spy)
        assert "seen enough" in llm.generate([prompt], PARAMS, use_tqdm=False)[0].error.message
    assert found == ["torch"]


@pytest.mark.in_process
def test_media_go_to_a_device_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for the device, and the CPU path of processing is disabled."""
    ask = "<|vision_start|><|{}_pad|><|vision_end|>What is written?"
    media = Path(__file__).parents[3] / "assets" / "media"
    prompts = [
        {"prompt": ask.format("image"), "multi_modal_data": {"image": media / "line1.png"}},
        {"prompt": ask.format("video"), "multi_modal_data": {"video": media / "clip.mp4"}},
    ]
    with LLM(MODEL, max_model_len=256) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    monkeypatch.setattr(EngineConfig, "torch_media_device", torch.device("cpu"))
    monkeypatch.delattr(images, "_fill_patches")
    with LLM(MODEL, max_model_len=256, media_device="cuda") as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)] == wanted


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_media_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="media_device='cuda': torch sees no GPU; use media_device='cpu'"):
        LLM(MODEL, media_device="cuda")


def test_kernels_of_media_are_checked_where_media_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineConfig, "torch_device", torch.device("cuda", 0))
    monkeypatch.setattr(EngineConfig, "torch_media_device", torch.device("cpu"))
    monkeypatch.setattr(launch_config, "user_configs", dict)
    config = EngineConfig("m", kernels="pixels=triton")
    check_kernels(config, torch.float32)
    with pytest.raises(ConfigError, match="pixels=triton cannot run float32 on cpu here; torch can"):
        check_kernels(replace(config, media_device="cuda"), torch.float32)


def test_a_backend_alone_selects_it_for_all_ops_that_have_it() -> None:
    table = dispatch.parse_overrides("attention=reference, torch")
    assert table == dict.fromkeys(BACKENDS, "torch") | {"attention": "reference"}
    assert dispatch.parse_overrides("onednn") == {"linear": "onednn"}
    with LLM(MODEL, max_model_len=64, kernels="torch") as told, LLM(MODEL, max_model_len=64) as usual:
        one, two = (llm.generate("one two three", PARAMS)[0].outputs[0].token_ids for llm in (told, usual))
    assert one == two


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        (
            "attention=natve",
            r"kernels: attention has no backend 'natve'; did you mean native\? The known ones are native, triton, ",
        ),
        (
            "atention=torch",
            r"kernels: 'atention' is not an op; did you mean attention\? The known ones are attention, varlen_attention",
        ),
        (
            "attention",
            "kernels: 'attention' is not a backend; write op=backend, .* known ones are native, triton, torch, reference, ",
        ),
        ("triton", r"kernels: attention=triton cannot run float32 on cpu here; .*torch"),
        (["attention=torch"], "must be a string like"),
        ("rms_norm=triton", r"kernels: rms_norm=triton cannot run float32 on cpu here; .*torch can"),
    ],
)
def test_refused(kernels: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(MODEL, dtype="float32", device="cpu", kernels=kernels)
