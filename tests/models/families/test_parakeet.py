"""Parakeet with a CTC head: rows, texts and times of words against transformers' class, alone, batched and cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family import AUDIO_SIZES, RATE, make_media
from measured import peak_bytes
from parakeet import make_model, oracle_inputs, prompt, save
from safetensors.torch import load_file, save_file
from sensorium import LLM, PoolingParams, SamplingParams
from sensorium.callers.errors import CheckpointError, ConfigError, InputError
from sensorium.mm.speech import FrameRule
from sensorium.mm.types import MediaHeader
from sensorium.models.interface import StepLimits
from sensorium.pipelines.speech.frames import frame_tokens

SIZES = (12_000, 30_000, 5001, 48_000)


@pytest.fixture(scope="module")
def oracle() -> tuple[Any, Any]:
    return make_model(0)


@pytest.fixture(scope="module")
def folder(oracle: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("parakeet"), *oracle)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, max_num_seqs=4, device="cpu", block_size=4)


def check_rows(model: Any, processor: Any, samples: Any, rows: torch.Tensor) -> None:
    given = oracle_inputs(processor, samples)
    with torch.inference_mode():
        theirs = model(**given).logits[0].log_softmax(-1)[: len(rows)]
    best = theirs.max(-1)
    is_clear = best.values - theirs.topk(2).values[:, 1] > 1e-4
    assert torch.equal(rows[is_clear, 0].long(), best.indices[is_clear])
    assert (rows[:, 1] - best.values).abs().max() < 2e-4
    assert is_clear.float().mean() > 0.9


def test_rows_are_the_oracles(oracle: tuple[Any, Any], folder: Path, llm: LLM) -> None:
    """Alone, in a batch, in chunks and from cached rows, with equal bits."""
    audio = [make_media("audio", (size,), seed) for seed, size in enumerate(SIZES)]
    pooling = PoolingParams(pooling="tokens")
    together = llm.encode([prompt(one) for one in audio], pooling, use_tqdm=False)
    again = llm.encode([prompt(one) for one in reversed(audio)], pooling, use_tqdm=False)[::-1]
    with LLM(folder, max_num_seqs=1, device="cpu", block_size=4, max_num_batched_tokens=16) as other:
        chunked = other.encode([prompt(one) for one in audio], pooling, use_tqdm=False)
    for samples, first, second, third in zip(audio, together, again, chunked, strict=True):
        assert first.error is None
        assert first.data.shape == (-(-(len(samples) // 160) // 8), 2)
        assert torch.equal(first.data, second.data)
        assert torch.equal(first.data, third.data)
        check_rows(*oracle, samples, first.data)


def test_tensors_and_rows_of_every_size(oracle: tuple[Any, Any], llm: LLM) -> None:
    model, processor = oracle
    info = llm.speech
    for (size,) in [*AUDIO_SIZES[::3], (320,), (1279,), (1280,)]:
        count = info.geometry(MediaHeader("audio", samples=size)).num_embeds
        frames = torch.tensor([size // 160])
        assert count == int(model._get_subsampling_output_length(frames)), size
    with pytest.raises(InputError, match=r"319 samples are too few for one token; give at least 320 \(20 ms\)"):
        info.geometry(MediaHeader("audio", samples=319))
    samples = make_media("audio", (30_000,), 1)
    (feature,) = llm.engine.inputs.process(prompt(samples)).features
    ours, theirs = feature.kwargs["input_features"].data, oracle_inputs(processor, samples)
    assert int(theirs["attention_mask"].sum()) == len(ours) == 187
    assert (ours - theirs["input_features"][0, :187]).abs().max() < 1e-4


def test_texts_and_times_of_words(oracle: tuple[Any, Any], llm: LLM) -> None:
    model, processor = oracle
    audio = [make_media("audio", (size,), seed) for seed, size in enumerate(SIZES[:3])]
    found = llm.transcribe([(one, RATE) for one in audio], vad=False, timestamps="word", compression_ratio_threshold=None)
    for samples, one in zip(audio, found, strict=True):
        assert one.error is None
        with torch.inference_mode():
            ids = model.generate(**oracle_inputs(processor, samples))
        expected = processor.batch_decode(ids, skip_special_tokens=True)[0]
        assert one.text.split() == expected.split()
        words = [word for part in one.segments for word in part.words]
        assert "".join(word.word for word in words).split() == expected.split()
        times = [time for word in words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] <= len(samples) / RATE
        assert all(0 < word.probability <= 1 for word in words)


def test_runs_of_a_token_are_one() -> None:
    rows = torch.tensor([[9, -0.5], [3, -0.2], [3, -0.4], [9, -0.1], [3, -1.0], [4, -2.0]])
    found = [(one.token, one.start, one.end, round(one.logprob, 3)) for one in frame_tokens(rows, FrameRule(9, 0.08))]
    assert found == [(3, 1, 3, -0.3), (3, 4, 5, -1.0), (4, 5, 6, -2.0)]


def test_a_live_stream_ends_with_the_text_of_the_audio(llm: LLM) -> None:
    samples = make_media("audio", (30_000,), 1)
    (whole,) = llm.transcribe((samples, RATE), vad=False, compression_ratio_threshold=None)
    with llm.live_audio(RATE, vad=False, compression_ratio_threshold=None) as session:
        for start in range(0, len(samples), 8000):
            session.push(samples[start : start + 8000])
        session.finish()
        events = list(session.events())
    assert " ".join(event.text for event in events if event.kind == "final").split() == whole.text.split()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sampling_params": SamplingParams(temperature=0.0)}, "sampling_params"),
        ({"beam_size": 2}, "beam_size"),
        ({"temperature": 0.5}, "temperature"),
        ({"timestamps": True}, "timestamps"),
        ({"language": "de"}, "language"),
        ({"context": "Ann"}, "context"),
    ],
)
def test_arguments_without_effect_are_refused(llm: LLM, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        llm.transcribe((make_media("audio", (5000,), 0), RATE), **options)


def test_temperature_0_is_what_a_model_without_a_decoder_does(llm: LLM) -> None:
    audio = make_media("audio", (12_000,), 0), RATE
    (one,), (same,) = (llm.transcribe(audio, vad=False, use_tqdm=False, **more) for more in ({}, {"temperature": 0}))
    assert one.error is None
    assert same.windows == one.windows


def test_prompts_with_text_are_refused(llm: LLM) -> None:
    (found,) = llm.encode(prompt(make_media("audio", (5000,), 0)) | {"prompt": "x"}, use_tqdm=False)
    assert "one audio item per prompt and no text" in found.error.message
    (output,) = llm.generate(prompt(make_media("audio", (5000,), 0)), use_tqdm=False)
    assert output.error is not None


def edited(folder: Path, target: Path, **changes: Any) -> Path:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["encoder_config"] |= changes
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"conv_kernel_size": 8}, "and conv_kernel_size odd"),
        ({"subsampling_factor": 6}, "subsampling_factor 6"),
        ({"num_attention_heads": 5}, "num_attention_heads 5"),
        ({"num_mel_bins": 24}, "num_mel_bins is 24 in encoder_config"),
        ({"hidden_act": "tan"}, "hidden_act"),
    ],
)
def test_wrong_configs_are_named(folder: Path, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(edited(folder, tmp_path, **changes), device="cpu")


def test_wrong_weights_are_named(folder: Path, tmp_path: Path) -> None:
    target = edited(folder, tmp_path)
    tensors = load_file(target / "model.safetensors")
    tensors.pop("encoder.layers.1.self_attn.bias_u")
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"encoder\.layers\.1\.self_attn\.bias_u"):
        LLM(target, device="cpu")


@pytest.mark.parametrize("rows", [13, 128, 300])
def test_memory_is_planned(llm: LLM, rows: int) -> None:
    model = llm.engine.loop.core.executor.runner.model
    given = {"input_features": torch.randn(8 * rows, 16), "audio_frames": torch.tensor([8 * rows])}
    live = given["input_features"].nbytes + peak_bytes(lambda: model.embed_multimodal("audio", given))
    planned = model.encoder_bytes("audio", rows, StepLimits(1, 1, 1, torch.device("cpu")))
    assert live <= planned <= 1.1 * live


@pytest.mark.full
@pytest.mark.parametrize(
    "encoder", [{"scale_input": False, "convolution_bias": False}, {"subsampling_factor": 4, "attention_bias": False}]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_rows_of_other_checkpoints(tmp_path: Path, seed: int, encoder: dict[str, Any]) -> None:
    model, processor = make_model(seed, **encoder)
    samples = make_media("audio", (30_000,), seed)
    with LLM(save(tmp_path, model, processor), device="cpu", block_size=4) as llm:
        (found,) = llm.encode(prompt(samples), PoolingParams(pooling="tokens"), use_tqdm=False)
    assert found.error is None
    check_rows(model, processor, samples, found.data)


@pytest.mark.full
def test_every_tensor_has_a_say(folder: Path, llm: LLM, tmp_path: Path) -> None:
    samples = make_media("audio", (30_000,), 1)
    (whole,) = llm.encode(prompt(samples), PoolingParams(pooling="tokens"), use_tqdm=False)
    target, tensors = edited(folder, tmp_path), load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if not name.endswith(("num_batches_tracked", "k_proj.bias")):  # the latter adds the same to all scores of a row
            save_file({**tensors, name: torch.zeros_like(tensor)}, target / "model.safetensors")
            with LLM(target, device="cpu", block_size=4) as other:
                (found,) = other.encode(prompt(samples), PoolingParams(pooling="tokens"), use_tqdm=False)
            assert (found.data[:, 1] - whole.data[:, 1]).abs().max() > 1e-3, name
