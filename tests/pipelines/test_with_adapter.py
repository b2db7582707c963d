"""Tasks with an adapter: results are those of an engine into whose weights the adapter is merged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from family import ask, make_media
from lora import matrices, write
from parity import ROWS, LoadedModels, make_llm
from sensorium import AsyncLLM, SamplingParams
from sensorium.callers.errors import InputError
from sensorium.pipelines.beam_search import BeamSearchParams
from streams import speech

pytestmark = pytest.mark.in_process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LoadedModels:
    return LoadedModels(tmp_path_factory.mktemp("adapters"))


def engines(world: LoadedModels, name: str, folder: Path, chosen: str) -> tuple[Any, Any]:
    """Return an engine with the adapter "mine", and one that is merged."""
    row, base = ROWS[name], world.folder(name)
    model, _ = row.load(base)
    write(folder, str(base), matrices(model, chosen))
    llm = make_llm(row, base, enable_lora=True)
    llm.load_adapter("mine", folder)
    return llm, make_llm(row, folder)


def test_vectors_scores_beams_and_pages(world: LoadedModels, tmp_path: Path) -> None:
    llm, merged = engines(world, "qwen2_vl", tmp_path / "a", r"language_model.*(q_proj|down_proj)$|visual.*fc1$")
    prompts = [ask(ROWS["qwen2_vl"], "i", 0).ours, ask(ROWS["qwen2_vl"], "", 1).ours]
    with llm, merged:
        ours, plain, theirs = (
            one.encode(prompts, use_tqdm=False, **call)
            for one, call in ((llm, {"adapter": ["mine", None]}), (llm, {}), (merged, {}))
        )
        torch.testing.assert_close(ours[0].data, theirs[0].data, rtol=1e-3, atol=1e-3)
        assert torch.equal(ours[1].data, plain[1].data)
        assert not torch.allclose(ours[0].data, plain[0].data, atol=1e-2)
        options: dict[str, Any] = {"chat_template": "{{ messages[-1].content[0].text }}", "use_tqdm": False}
        (vector,), (expected,) = llm.embed(["a b"], adapter="mine", **options), merged.embed(["a b"], **options)
        torch.testing.assert_close(vector.vector, expected.vector, rtol=1e-3, atol=1e-3)
        params = BeamSearchParams(beam_width=2, max_tokens=5)
        ours, theirs = llm.beam_search(prompts, params, adapter="mine"), merged.beam_search(prompts, params)
        assert [one.sequences[0].tokens for one in ours] == [one.sequences[0].tokens for one in theirs]
        (later,) = asyncio.run(AsyncLLM(llm).beam_search(prompts[:1], params, lora_request="mine"))
        assert later.sequences[0].tokens == theirs[0].sequences[0].tokens


def test_transcripts(world: LoadedModels, tmp_path: Path) -> None:
    llm, merged = engines(world, "voxtral", tmp_path / "a", r"language_model.*q_proj$|multi_modal_projector.*linear_[12]$")
    audio = make_media("audio", (9001,), 1), 16_000
    options: dict[str, Any] = {"use_tqdm": False, "vad": False}
    with llm, merged:
        (ours,), (theirs,), (plain,) = (
            llm.transcribe(audio, adapter="mine", **options),
            merged.transcribe(audio, **options),
            llm.transcribe(audio, **options),
        )
    assert (ours.error, theirs.error) == (None, None)
    assert ours.text == theirs.text != plain.text


def test_live_audio(world: LoadedModels, tmp_path: Path) -> None:
    """All passes over a stream use the adapter; its transcript is that of the merged model."""
    llm, merged = engines(world, "whisper", tmp_path / "a", r"decoder.*(encoder_attn|self_attn)\.v_proj$|encoder\..*fc1$")
    samples, texts, params = speech(1.0), list[str](), SamplingParams(temperature=0.0, max_tokens=8)
    with llm, merged:
        for engine, call in ((llm, {"adapter": "mine"}), (merged, {}), (llm, {})):
            with engine.live_audio(vad=False, sampling_params=params, **call) as session:
                session.push(samples)
                session.finish()
                texts.append(" ".join(event.text for event in session.events() if event.kind == "final"))
        with pytest.raises(InputError) as caught:
            llm.live_audio(adapter=["mine"])
        assert (caught.value.info.param, caught.value.info.code) == ("adapter", "invalid_value")
        with pytest.raises(InputError) as caught:
            llm.read(["a.pdf"], adapter="other")
        assert caught.value.info.code == "unknown_name"
    assert texts[0] == texts[1] != texts[2]


def test_a_live_stream_keeps_the_content_of_its_adapter(world: LoadedModels, tmp_path: Path) -> None:
    """Streams of threads and of coroutines: the name is loaded again, or unloaded, before the first pass."""
    row, base = ROWS["whisper"], world.folder("whisper")
    model, _ = row.load(base)
    old, new = (write(tmp_path / str(seed), str(base), matrices(model, r"decoder.*v_proj$", seed=seed)) for seed in range(2))
    samples, params = speech(1.0), SamplingParams(temperature=0.0, max_tokens=8)
    options: dict[str, Any] = {"vad": False, "sampling_params": params, "adapter": "mine"}

    async def transcribe(llm: Any) -> str:
        async def blocks() -> Any:
            yield samples

        stream = AsyncLLM(llm).stream_transcribe(blocks(), 16_000, **options)
        await AsyncLLM(llm).load_adapter("mine", new)
        return " ".join([event.text async for event in stream if event.kind == "final"])

    def hear(llm: Any, change: Any) -> str:
        with llm.live_audio(**options) as session:
            change()
            session.push(samples)
            session.finish()
            return " ".join(event.text for event in session.events() if event.kind == "final")

    with make_llm(row, base, enable_lora=True) as llm:
        llm.load_adapter("mine", old)
        expected = hear(llm, lambda: None)
        assert hear(llm, lambda: llm.load_adapter("mine", new)) == expected
        assert hear(llm, lambda: llm.unload_adapter("mine")) != expected
        llm.load_adapter("mine", old)
        assert hear(llm, lambda: llm.unload_adapter("mine")) == expected
        llm.load_adapter("mine", old)
        assert asyncio.run(transcribe(llm)) == expected
        assert hear(llm, lambda: None) != expected


@pytest.mark.parametrize(
    ("call", "param", "code"),
    [
        (lambda llm: llm.embed(["a", "b"], adapter=["mine"]), "adapter", "invalid_input"),
        (lambda llm: llm.score("a", ["b", "c"], adapter=["mine", None]), "adapter", "invalid_value"),
        (lambda llm: llm.encode("a", adapter="other"), "adapter", "unknown_name"),
        (lambda llm: llm.encode("a", adapter="mine", lora_request="mine"), "lora_request", "invalid_input"),
        (lambda llm: llm.beam_search("a", BeamSearchParams(2, 2), adapter=5), "adapter", "invalid_value"),
    ],
)
def test_choices_that_are_refused(world: LoadedModels, call: Any, param: str, code: str) -> None:
    with make_llm(ROWS["qwen2_vl"], world.folder("qwen2_vl"), enable_lora=True) as llm, pytest.raises(InputError) as caught:
        call(llm)
    assert (caught.value.info.param, caught.value.info.code) == (param, code)
