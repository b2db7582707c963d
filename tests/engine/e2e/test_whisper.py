"""Whisper through the whole engine: tiny.en against transformers, and the prompts of an encoder-decoder model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import family
import pytest
import soundfile
import torch
from cpu import needs_int8
from oracle import load_oracle
from sensorium import LLM, SamplingParams
from sensorium.engine.model_files import load_model_files
from sensorium.engine.setup.resolve import load_processing
from sensorium.mm.types import AudioItem

CLIPS = ("jfk", "jfk_late", "lj001_0001", "lj001_0002", "lj001_0003", "lj001_0005", "lj001_0007")
CLIPS += ("espeak_en", "espeak_de", "silence_10s", "noise_10s")


def features(folder: Path, samples: Any) -> torch.Tensor:
    files = load_model_files(folder)
    info = load_processing(files, {})
    kwargs, geometry = info.process(AudioItem(torch.from_numpy(samples), 16_000), torch.float32)
    assert geometry.num_embeds == 1500
    return kwargs["input_features"].data


@pytest.mark.shared
@pytest.mark.sampled
@pytest.mark.parametrize("names", [CLIPS[i::5] for i in range(5)])
def test_every_recording_is_transcribed_as_by_transformers(names: Sequence[str], shared_data: Path) -> None:
    """The recordings run in one batch. transformers gets our features, which equal its own within 1e-5."""
    folder = shared_data / "whisper-tiny.en"
    sounds = [soundfile.read(shared_data / "speech" / f"{name}.flac", dtype="float32")[0] for name in names]
    model, processor = load_oracle(folder)
    llm = LLM(folder, dtype="float32", max_num_seqs=8)
    prompt = "<|startoftranscript|><|notimestamps|>"
    prompts = [{"prompt": prompt, "multi_modal_data": {"audio": (sound, 16_000)}} for sound in sounds]
    rules = llm.default_params.logits_processors
    params = SamplingParams(temperature=0.0, max_tokens=None, logits_processors=rules)
    for name, sound, output in zip(names, sounds, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.error is None
        mine = features(folder, sound)
        theirs = processor.feature_extractor(sound, sampling_rate=16_000, return_tensors="pt").input_features[0].T
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
        with torch.inference_mode():
            ids = model.generate(mine.T[None])[0].tolist()
        assert [token for token in ids if token < 50_256] == [t for t in output.outputs[0].token_ids if t < 50_256], name


START = "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def llm(whisper: Path) -> LLM:
    return LLM(whisper, max_num_seqs=4)


def asked(seed: int = 0, text: str = "") -> dict[str, Any]:
    sound = family.make_media("audio", (4000 + 3000 * seed,), seed)
    return {"prompt": START + text, "multi_modal_data": {"audio": (sound, 16_000)}}


def error(llm: LLM, prompt: object) -> str | None:
    info = llm.generate(prompt, GREEDY, use_tqdm=False)[0].error
    return None if info is None else info.message


def test_encoder_and_decoder_prompts_are_one_prompt(llm: LLM) -> None:
    whole = asked()
    parted = {"encoder_prompt": {**whole, "prompt": ""}, "decoder_prompt": START}
    first, second = llm.generate([whole, parted], GREEDY, use_tqdm=False)
    assert first.error is second.error is None
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert "reads media only" in error(llm, {**parted, "encoder_prompt": {**whole, "prompt": "words"}})
    assert "reads media only" in error(llm, {"encoder_prompt": {**whole, "prompt": ""}})


def test_a_prompt_takes_one_audio(llm: LLM) -> None:
    sound = asked()["multi_modal_data"]["audio"]
    assert "which is audio; give it in multi_modal_data" in error(llm, START)
    assert "At most 1 audio" in error(llm, {"prompt": START, "multi_modal_data": {"audio": [sound, sound]}})
    assert "no tokens" in error(llm, {**asked(), "prompt": ""})


def test_audio_takes_rows_and_no_tokens(llm: LLM) -> None:
    (plan,) = llm.plan(asked())
    assert (plan.num_tokens, plan.num_embeds) == (0, 50)
    (output,) = llm.generate(asked(), GREEDY, use_tqdm=False)
    assert len(output.prompt_token_ids) == 4
    assert output.items[0].num_embeds == 50


def test_the_same_audio_is_encoded_once(whisper: Path) -> None:
    """Another prompt with the same audio hits the encoder cache; the same prompt also hits the prefix cache."""
    llm = LLM(whisper, block_size=4)
    for text in ("", " def f(x): return x", " def f(x): return x"):
        assert error(llm, asked(1, text)) is None
    assert llm.stats.encoder_calls == 1
    assert llm.stats.prefix_hits > 0


def test_precomputed_embeddings(llm: LLM) -> None:
    def given(*rows: int) -> dict[str, Any]:
        return {"prompt": START, "multi_modal_data": {"audio": {"audio_embeds": [torch.randn(n, 64) for n in rows]}}}

    assert error(llm, given(50)) is None
    assert "at most 50" in error(llm, given(51))
    assert "takes one item per prompt, not 2" in error(llm, given(50, 50))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_batch(whisper: Path, dtype: str) -> None:
    prompts = [asked(seed, " x" * seed) for seed in range(4)]
    options = {"dtype": dtype, "batch_invariant": True, "enable_prefix_caching": False}
    together = LLM(whisper, max_num_batched_tokens=5, max_num_seqs=4, **options).generate(prompts, GREEDY, use_tqdm=False)
    llm = LLM(whisper, **options)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.outputs[0].cumulative_logprob == alone.outputs[0].cumulative_logprob


@pytest.mark.parametrize("attention", ["torch", "reference"])
def test_every_attention_backend_gives_the_same_transcript(whisper: Path, llm: LLM, attention: str) -> None:
    """This includes decode steps, which write no cross-attention keys."""
    prompts = [asked(seed) for seed in range(3)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    other = LLM(whisper, max_num_seqs=4, kernels=f"attention={attention}").generate(prompts, GREEDY, use_tqdm=False)
    assert [output.error for output in other] == [None] * 3
    assert [output.outputs[0].token_ids for output in other] == expected


def test_in_half_precision(whisper: Path) -> None:
    assert error(LLM(whisper, dtype="float16"), asked()) is None


@needs_int8
def test_in_8_bits(whisper: Path) -> None:
    assert error(LLM(whisper, quantization="int8"), asked()) is None


def test_decoding_is_planned_for_a_window(llm: LLM) -> None:
    """The media policy allows hours of audio; the model takes one second, and no more is decoded."""
    workers, media = llm.config.media_workers, llm.config.media
    assert media.max_audio_seconds > 3600
    assert llm.explain().decoding == workers * (media.max_bytes + 2 * 4 * 16_000)
