"""Audio through the whole engine: every input form, and what is refused."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from oracle import build_checkpoint
from sensorium import LLM, RequestOutput, SamplingParams
from sensorium.mm.media import audio as audio_module

PLACEHOLDER = "<|audio_bos|><|AUDIO|><|audio_eos|>"
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("models") / "qwen2_audio", "qwen2_audio")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, max_model_len=512)


def sound(count: int = 20_000, seed: int = 0) -> np.ndarray:
    time = np.arange(count)
    pitch = 0.02 + 0.1 * np.random.default_rng(seed).random()
    return (0.3 * np.sin(time * pitch) + np.random.default_rng(seed).normal(0, 0.05, count)).astype(np.float32)


def asked(*sounds: object, text: str = "") -> dict[str, Any]:
    prompt = f"def f(x):{text}" + " and ".join([PLACEHOLDER] * len(sounds)) + " return it"
    return {"prompt": prompt, "multi_modal_data": {"audio": list(sounds)} if sounds else {}}


def answer(llm: LLM, prompt: dict[str, Any]) -> RequestOutput:
    return llm.generate(prompt, SHORT, use_tqdm=False)[0]


def test_other_audio_changes_the_answer(llm: LLM) -> None:
    one, other = (answer(llm, asked((sound(seed=seed), 16_000))).outputs[0].token_ids for seed in (0, 1))
    assert one != other


def test_every_form_of_one_audio(llm: LLM, tmp_path: Path) -> None:
    samples = np.round(sound() * 32_768).clip(-32_768, 32_767).astype(np.int16)
    flat = samples.astype(np.float32) / 32_768
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="FLAC")
    (tmp_path / "a.flac").write_bytes(file.getvalue())
    forms = [
        (flat, 16_000), flat, flat.tolist(), torch.from_numpy(flat), (samples, 16_000), (np.stack([flat, flat]), 16_000),
        file.getvalue(), tmp_path / "a.flac", str(tmp_path / "a.flac"),
    ]  # fmt: skip
    answers = [answer(llm, asked(form)) for form in forms]
    assert [one.error for one in answers] == [None] * len(forms)
    assert all(one.outputs[0].token_ids == answers[0].outputs[0].token_ids for one in answers)
    single = answer(llm, {**asked(flat), "multi_modal_data": {"audio": (flat, 16_000)}})
    assert single.outputs[0].token_ids == answers[0].outputs[0].token_ids


def test_the_plan_equals_the_tokens_of_the_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = asked((sound(30_000), 16_000), (sound(100_000), 44_100))
    took = answer(llm, prompt).items
    monkeypatch.setattr(audio_module, "decode_audio", None)
    plans = llm.plan(prompt)
    assert plans == list(took)
    assert [(plan.modality, plan.num_tokens, plan.grid, plan.exact) for plan in plans] == [
        ("audio", 47, (47, 1, 1), True),
        ("audio", 57, (57, 1, 1), True),
    ]
    assert [plan.bytes for plan in plans] == [47 * 64 * 4, 57 * 64 * 4]


@pytest.mark.in_process
def test_precomputed_embeddings_give_the_answer_of_their_audio(llm: LLM) -> None:
    prepared = llm.engine.inputs.process(asked(sound()))
    tensors = {
        name: elem.data[None] if elem.data.ndim == 0 else elem.data for name, elem in prepared.features[0].kwargs.items()
    }
    with torch.inference_mode():
        (rows,) = llm.engine.loop.core.executor.runner.model.embed_multimodal("audio", tensors)
    given = {**asked(sound()), "multi_modal_data": {"audio": {"audio_embeds": rows.clone()}}}
    assert answer(llm, given).outputs[0].token_ids == answer(llm, asked(sound())).outputs[0].token_ids


def test_conversations_with_audio(llm: LLM) -> None:
    content = [{"type": "audio", "audio": (sound(), 16_000)}, {"type": "text", "text": "what is <|AUDIO|>?"}]
    (output,) = llm.chat([{"role": "user", "content": content}], SHORT, use_tqdm=False)
    assert output.error is None
    assert output.prompt_token_ids.count(640) == 31
    assert output.prompt_token_ids.count(641) == 1


@pytest.mark.parametrize(
    ("sounds", "text"),
    [
        ([(sound(64_001), 16_000)], r"audio 0: it lasts 4\.00 s, the model takes at most 4 s"),
        ([(sound(), 16_000), (sound(100), 16_000)], "audio 1: its 100 samples are too few for one token"),
        ([b"no sound"], "audio 0: it is not in a supported audio format"),
        ([(sound() * np.nan, 16_000)], "audio 0: its samples hold NaN"),
    ],
)
def test_invalid_audio_is_refused_with_the_reason(llm: LLM, sounds: list[object], text: str) -> None:
    bad, good = llm.generate([asked(*sounds), asked((sound(), 16_000))], SHORT, use_tqdm=False)
    assert good.error is None
    assert re.match(text, str(bad.error))
