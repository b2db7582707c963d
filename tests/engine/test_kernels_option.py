"""`LLM(kernels=...)`: one engine computes as it was told, others as ever; what is unknown or cannot run is refused."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from PIL import Image
from sensorium import LLM, SamplingParams
from sensorium.kernels import attention, dispatch
from sensorium.mm.errors import ConfigError, InputError

MODEL = Path(__file__).parents[2] / "assets" / "tiny-vl"
PARAMS = SamplingParams(max_tokens=4, temperature=0.0)


def test_an_engine_computes_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = attention.paged_attention_reference

    def spy(*args: object) -> object:
        calls.append(threading.current_thread().name)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "paged_attention_reference", spy)
    with LLM(MODEL, max_model_len=64) as usual, LLM(MODEL, max_model_len=64, kernels="attention=reference") as told:
        expected = usual.generate(["one two three"], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        assert not calls
        assert told.generate(["one two three"], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == expected
        assert calls
        calls.clear()
        usual.generate(["one two four"], PARAMS, use_tqdm=False)
        assert not calls


def test_media_are_processed_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def spy(self: object, *args: object) -> None:
        found.append(dispatch.backend("gated", torch.device("cpu"), torch.float32))
        raise InputError("seen enough")

    slot = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = {"prompt": slot, "multi_modal_data": {"image": Image.new("RGB", (32, 32))}}
    with LLM(MODEL, max_model_len=64, kernels="gated=torch") as llm:
        monkeypatch.setattr(type(llm._inputs.media._info), "process", spy)
        assert "seen enough" in str(llm.generate([prompt], PARAMS, use_tqdm=False)[0].error)
    assert found == ["torch"]


def test_one_word_is_for_all_ops_that_have_it() -> None:
    table = dispatch.overrides("attention=reference, torch")
    assert table == dict.fromkeys(dispatch.BACKENDS, "torch") | {"attention": "reference"}
    assert dispatch.overrides("onednn") == {"linear": "onednn"}
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
            r"kernels: 'atention' is no op; did you mean attention\? The known ones are attention, varlen_attention",
        ),
        (
            "attention",
            "kernels: 'attention' is no backend; write op=backend, .* known ones are native, triton, torch, reference, ",
        ),
        ("triton", r"kernels: attention=triton cannot run float32 on cpu here; .*torch"),
        (["attention=torch"], "must be text like"),
        ("rms_norm=triton", r"kernels: rms_norm=triton cannot run float32 on cpu here; .*torch can"),
    ],
)
def test_refused(kernels: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(MODEL, dtype="float32", device="cpu", kernels=kernels)
