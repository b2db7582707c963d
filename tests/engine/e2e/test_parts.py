"""Engines with a part of a model: a decoder that gets an encoder's rows answers like the whole model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family import ask, load_rows, save
from sensorium import LLM, AsyncLLM, SamplingParams
from sensorium.callers.errors import ConfigError, InputError
from sensorium.engine.worker.encoder_runner import EncoderRunner

TINY_VL = Path(__file__).parents[3] / "assets" / "tiny-vl"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
FAMILIES = {
    "qwen2_vl": "iv",
    "qwen3_vl": "iv",  # deepstack levels, timestamps as text
    "gemma3": "ii",
    "llava": "i",
    "idefics3": "i",  # tiles with text between them
    "granite_speech": "a",  # a LoRA adapter of the decoder
    "qwen2_audio": "a",
    "phi4mm": "ia",
    "kimi_audio": "a",  # the projector adds a row of the decoder's table
}


def make(folder, row=None, **options):
    return LLM(folder, **{"device": "cpu", "max_model_len": 2048, **(row.options if row else {}), **options})


def answer(llm, prompt):
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    return output


def encode(llm, prompt):
    (output,) = llm.encode_media(prompt, use_tqdm=False)
    assert output.error is None, output.error
    return output.encoded


def with_rows(prompt, encoded):
    data = {}
    for item in encoded:
        data.setdefault(item.modality, []).append(item)
    return {**prompt, "multi_modal_data": data}


@pytest.mark.in_process
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_give_the_answer_of_the_media(name, tmp_path):
    row = load_rows()[name]
    folder, prompt = save(row, tmp_path / "model"), ask(row, FAMILIES[name]).ours
    with (
        make(folder, row) as whole,
        make(folder, row, parts="encoder") as encoder,
        make(folder, row, parts="decoder") as decoder,
    ):
        want = answer(whole, prompt)
        assert want.error is None
        encoded = encode(encoder, prompt)
        assert [item.modality for item in encoded] == [item.modality for item in want.items]
        for llm in (whole, decoder):
            got = answer(llm, with_rows(prompt, encoded))
            assert got.error is None, got.error
            assert (got.outputs, got.prompt_token_ids) == (want.outputs, want.prompt_token_ids)
        assert 'parts="decoder"' in answer(decoder, prompt).error.message
        parts = encoder.explain(), decoder.explain(), whole.explain()
        assert [plan.kv_cache > 0 for plan in parts] == [False, True, True]
        assert [plan.encoder_step > 0 for plan in parts] == [True, False, True]
        assert [plan.decoder_step > 0 for plan in parts] == [False, True, True]
        if not row.name.startswith("granite_speech"):  # whose adapter only the decoder has
            assert parts[0].weights + parts[1].weights == parts[2].weights


@pytest.fixture(scope="module")
def encoder():
    with make(TINY_VL, parts="encoder") as llm:
        yield llm


def image(seed, size=(64, 48)):
    return ask(load_rows()["qwen2_vl"], "i", seed, sizes=[size]).data["image"][0]


def test_tiny_vl_gives_the_same_answer_for_rows_and_pixels(encoder):
    images = [image(1), image(2, (90, 60))]
    chat = [
        {"role": "user", "content": [*({"type": "image", "image": one} for one in images), {"type": "text", "text": "Read."}]}
    ]
    with make(TINY_VL) as whole:
        (want,) = whole.chat(chat, GREEDY, use_tqdm=False)
        for part, item in zip(chat[0]["content"], encode(encoder, {"multi_modal_data": {"image": images}}), strict=False):
            part["image"] = item
        (got,) = whole.chat(chat, GREEDY, use_tqdm=False)
    assert got.error is None
    assert got.outputs == want.outputs


def test_rows_in_vllms_form(encoder):
    prompt = {"prompt": "<|vision_start|><|image_pad|><|vision_end|>Read.", "multi_modal_data": {"image": image(3)}}
    (item,) = encode(encoder, prompt)
    (grid,) = item.geometries
    given = {"image_embeds": item.rows, "image_grid_thw": [[grid.t, grid.h, grid.w]]}
    with make(TINY_VL) as whole:
        assert answer(whole, prompt).outputs == answer(whole, {**prompt, "multi_modal_data": {"image": given}}).outputs


def test_several_requests_and_items_that_fail(encoder):
    prompts = [{"multi_modal_data": {"image": [image(4)] * 2}}, {"multi_modal_data": {"image": b"x"}}, {"multi_modal_data": {}}]
    good, bad, none = encoder.encode_media(prompts, use_tqdm=False)
    first, second = good.encoded
    assert torch.equal(first.rows, second.rows)
    assert first.hash == second.hash
    assert (bad.encoded, none.encoded) == ((), ())
    assert bad.error.modality == "image"
    assert none.error.param == "multi_modal_data"
    assert encoder.stats.running == encoder.stats.waiting == 0

    async def ask_async():
        return await AsyncLLM(encoder).encode_media(prompts[0])

    assert torch.equal(asyncio.run(ask_async()).encoded[0].rows, first.rows)


@pytest.mark.in_process
def test_the_calls_of_one_request_are_as_large_as_the_plan_counts(encoder, monkeypatch):
    prompt, real = {"multi_modal_data": {"image": [image(seed) for seed in range(10, 14)]}}, EncoderRunner.encode
    want, calls = encode(encoder, prompt), []

    def record(runner, model, items):
        calls.append(sum(item.range.num_embeds for item in items))
        if len(calls) > 2:
            raise RuntimeError("the device failed")
        return real(runner, model, items)

    monkeypatch.setattr(EncoderRunner, "encode", record)
    rows = len(want[0].rows)
    with make(TINY_VL, parts="encoder", max_encoder_tokens=2 * rows, warm_up=False) as llm:
        found, core = encode(llm, prompt), llm.engine.loop.core
        assert calls == [2 * rows, 2 * rows]
        assert [one.hash for one in found] == [one.hash for one in want]
        torch.testing.assert_close([one.rows for one in found], [one.rows for one in want])
        assert llm.explain().encoder_cache >= 2 * llm.max_model_len * core.info.row_bytes
        (broken,) = llm.encode_media(prompt, use_tqdm=False)
        assert broken.error.code == "interrupted"
        assert not core._store.rows


def test_rows_that_do_not_fit_are_refused(encoder):
    (item,) = encode(encoder, {"multi_modal_data": {"image": image(5)}})
    cases = {
        "its geometries make": replace(item, geometries=item.geometries * 2),
        "must have the shape": replace(item, rows=item.rows[:, 1:]),
        "NaN or infinite": replace(item, rows=item.rows * torch.nan),
        "encoded as 'video'": replace(item, modality="video"),
        "must be the ones that": replace(item, geometries=((1, 4, 4),)),
    }
    with make(TINY_VL, parts="decoder") as decoder:
        for reason, wrong in cases.items():
            data = {"image": [wrong]}
            output = answer(decoder, {"prompt": "<|image_pad|>", "multi_modal_data": data})
            assert reason in output.error.message


def test_an_engine_with_only_the_encoder_refuses_other_calls(encoder):
    for ask_for in (encoder.generate, encoder.embed, encoder.live):
        with pytest.raises(InputError, match="only the encoder"):
            ask_for("hello")
    with pytest.raises(InputError, match="cannot sleep"):
        encoder.sleep()
    with make(TINY_VL) as whole, pytest.raises(InputError, match='parts="encoder"'):
        whole.encode_media({"multi_modal_data": {"image": image(1)}})


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("text-llama", {}, "no encoder is left"),
        ("qwen2_vl", {"limit_mm_per_prompt": {"image": 0, "video": 0}}, "no encoder is left"),
        ("whisper", {}, "leave it out"),
    ],
)
def test_models_that_have_no_separate_encoder(name, options, reason, tmp_path):
    row = load_rows()[name]
    with pytest.raises(ConfigError, match=reason):
        LLM(save(row, tmp_path / "model"), device="cpu", max_model_len=64, parts="encoder", **options)
