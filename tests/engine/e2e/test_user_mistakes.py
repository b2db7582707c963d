"""Mistakes of new users: failures are reported, and errors say what is wrong and what to do."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sensorium import LLM, AsyncLLM, MediaError, SamplingParams
from sensorium.callers.errors import ConfigError, InputError
from sensorium.engine.structured_outputs import StructuredOutputsParams

MODEL = Path(__file__).parents[3] / "assets" / "tiny-vl"
PAGE = MODEL.parent / "media" / "line1.png"
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
USER = {"role": "user", "content": "Hello"}
IMAGE = Image.new("RGB", (40, 40))
BROKEN = {"prompt": "<|vision_start|><|image_pad|><|vision_end|>", "multi_modal_data": {"image": b"no image"}}


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, max_model_len=256, max_num_seqs=4) as llm:
        yield llm


def test_one_warning_for_all_failed_prompts(llm, caplog):
    with caplog.at_level(logging.WARNING):
        llm.generate(["a", BROKEN, "b", 5], SHORT, use_tqdm=False)
        (record,) = caplog.records
        said = record.getMessage()
        assert said.startswith("2 of 4 prompts failed; the first, at index 1: image 0: ")
        assert "`error`" in said
        llm.chat([[USER], [{"role": "nobody", "content": ""}]], SHORT, use_tqdm=False)
        assert "1 of 2 prompts failed; the first, at index 1: message 0" in caplog.records[1].getMessage()
        llm.ocr([b"no image"], use_tqdm=False)
        assert (
            "1 of 1 inputs failed; the first, at index 0: it is not in a supported image format"
            in caplog.records[2].getMessage()
        )
        llm.generate(["a"], SHORT, use_tqdm=False)
        assert len(caplog.records) == 3


def test_the_first_error_can_be_raised(llm, caplog):
    with pytest.raises(MediaError, match=r"^prompt 1: image 0: ") as caught:
        llm.generate(["a", BROKEN, "b"], SHORT, use_tqdm=False, on_error="raise")
    assert (caught.value.info.code, caught.value.info.modality, caught.value.info.index) == ("invalid_media", "image", 0)
    with pytest.raises(InputError, match=r"^message 0: "):
        llm.chat([{"role": "nobody", "content": ""}], SHORT, use_tqdm=False, on_error="raise")
    assert not caplog.records
    assert len(llm.generate(["a", "b"], SHORT, use_tqdm=False, on_error="raise")) == 2
    assert (llm.stats.running, llm.stats.idle) == (0, 0)
    with pytest.raises(InputError, match='on_error=\'ignore\' must be "return" or "raise"'):
        llm.generate("a", SHORT, on_error="ignore")


def test_a_shared_llm_stays_open(llm):
    async def ask():
        async with AsyncLLM(llm) as engine:
            return [output async for output in engine.generate("a", SHORT, output_kind="final")]

    for _ in range(2):
        (output,) = asyncio.run(ask())
        assert output.error is None
    AsyncLLM(llm).close()
    assert llm.generate("a", SHORT, use_tqdm=False)[0].error is None


def test_async_llm_closes_the_model_that_it_loaded():
    async def ask():
        async with AsyncLLM(MODEL, max_model_len=256) as engine:
            pass
        return engine.llm

    with pytest.raises(InputError, match="was closed"):
        asyncio.run(ask()).generate("a", SHORT)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda llm: llm.chat([[USER], USER], SHORT), r"entry 0 is a conversation .*, but entry 1 is a dict; give one conv"),
        (lambda llm: llm.chat([USER, [USER]], SHORT), r"entry 1 is a conversation .*, but entry 0 is a dict; give one conv"),
        (lambda llm: llm.chat("hi"), r'not a str; give \[{"role": "user", "content": text}\]'),
        (lambda llm: llm.chat(USER), r"not a dict; give \[message\]"),
        (lambda llm: llm.ocr(None), "images=None must be an image item or a list of them"),
        (lambda llm: llm.transcribe(None), "audio=None must be an audio item or a list of them"),
        (lambda llm: llm.ocr(IMAGE, question="docling"), "give one of olmocr, or a question"),
        (
            lambda llm: llm.plan(str(PAGE)),
            r"line1.png' is a text to plan, but a file has this name; give .*: {\"image\": path}}",
        ),
        (lambda llm: llm.plan(str(PAGE.with_name("clip.mp4"))), r'give {"multi_modal_data": {"video": path}}'),
        (lambda llm: SamplingParams(stop=5), "stop=5 must be a string or a list of strings"),
        (
            lambda llm: llm.chat([{"role": "user", "contnet": "x"}], SHORT, on_error="raise"),
            r"unknown field 'contnet' of messages\[0\]; did you mean content\?",
        ),
        (
            lambda llm: llm.chat([{"role": "user", "content": "x", "audio": np.zeros(4)}], SHORT, on_error="raise"),
            r"unknown field 'audio' of messages\[0\]",
        ),
        (lambda llm: llm.generate([USER], SHORT, on_error="raise"), "these are messages, which only `chat`"),
        (lambda llm: llm.chat([{"role": "user"}], SHORT, on_error="raise"), "message 0: content is missing; give a text"),
        (lambda llm: llm.chat([{"role": "user", "content": []}], SHORT, on_error="raise"), "content is an empty list"),
        (
            lambda llm: llm.generate({"prompt": "a", "multi_modal_data": {"image": IMAGE}}, on_error="raise"),
            r"image 0: the prompt has no placeholder for it; write <\|image_pad\|> once for each item \(1 here\), or ask",
        ),
    ],
)
def test_errors_say_what_to_do(llm, ask, said):
    with pytest.raises(InputError, match=said):
        ask(llm)


def test_messages_are_not_appended_to_a_session(llm):
    with llm.live([USER], SHORT) as session:
        for wrong in ([USER], USER):
            with pytest.raises(InputError, match="these are messages, which only `chat`"):
                session.append(wrong)
        session.append("more")
        assert session.answer().error is None


@pytest.mark.parametrize("wrong", [None, 3, b"a", {}, {"promt": "a"}])
def test_a_session_refuses_what_is_no_prompt_at_once(llm, wrong):
    with pytest.raises(InputError, match="prompt"):
        llm.live(wrong, SHORT)


def test_token_ids_as_an_argument_are_a_hint(llm):
    with pytest.raises(
        InputError, match=r"unknown argument 'prompt_token_ids'; give it as a prompt: {.prompt_token_ids.: ...}"
    ):
        llm.generate(prompt_token_ids=[1])
    with pytest.raises(InputError, match="prompts must be a string, a mapping or a list of them, not None"):
        llm.generate()


def test_every_call_raises_for_no_prompt(llm):
    for ask in (llm.generate, llm.stream, llm.live, llm.request, AsyncLLM(llm).generate):
        for wrong in (None, 5, b"a"):
            with pytest.raises(InputError, match="must be a string"):
                ask(wrong)


def test_a_session_gives_no_old_answer_as_a_new_one(llm):
    with llm.live("user 1 moves left", SHORT) as session:
        first = session.answer()
        assert session.answer() is first
        with pytest.raises(InputError, match="image 0"):
            session.append(BROKEN)
        for ask in (session.answer, lambda: list(session.stream())):
            with pytest.raises(InputError, match="there is no new answer: the last append failed; append something first"):
                ask()
        session.append("more")
        second = session.answer()
        assert len(second.prompt_token_ids) > len(first.prompt_token_ids)
        session.truncate(4)
        with pytest.raises(InputError, match="there is no new answer: the session was truncated"):
            session.answer()
        session.append("again")
        third = session.answer()
    assert session.answer() is third


def test_a_path_that_is_embedded_as_text_is_a_warning(llm, caplog):
    path = MODEL.parent / "media" / "line1.png"
    with caplog.at_level(logging.WARNING):
        llm.embed([path, "a cat", "no.png", str(path.with_suffix(".txt"))], use_tqdm=False)
        assert not caplog.records
        llm.embed(str(path), use_tqdm=False)
    assert "line1.png' is embedded as a text, but a file of this name exists" in caplog.records[0].getMessage()


def test_a_wrong_template_is_an_input_error(llm):
    with pytest.raises(InputError, match="the chat template cannot be compiled") as caught:
        llm.chat([USER], chat_template="{% if", on_error="raise")
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_input", "chat_template")


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": "a{5,2}"}, "invalid repetition count range"),
        ({"json": {"type": "string", "pattern": "(a"}}, "unclosed group"),
    ],
)
def test_errors_of_regular_expressions_do_not_quote_the_grammar(llm, form, said):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**form))
    with pytest.raises(InputError, match=said) as caught:
        llm.generate("a", params, on_error="raise")
    assert "start:" not in str(caught.value)
    assert "^" not in str(caught.value)


def test_a_tiff_with_several_pages_gives_each(llm, tmp_path):
    page = Image.effect_noise((60, 40), 50).convert("RGB")
    for name, options in (
        ("one.tiff", {}),
        ("two.tiff", {"append_images": [page]}),
        ("big.tiff", {"append_images": [page], "big_tiff": True}),
    ):
        page.save(tmp_path / name, save_all=True, **options)
        pages = llm.ocr(tmp_path / name, max_tokens=1, use_tqdm=False)
        assert [page.error for page in pages] == [None] * (2 if options else 1)
        prompt = {"prompt": BROKEN["prompt"], "multi_modal_data": {"image": tmp_path / name}}
        (whole,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        if options:
            assert "sensorium.pdf_pages" in whole.error.message
        else:
            assert whole.error is None


@pytest.mark.parametrize("option", ["encoder_cache_dir", "packed_cache_dir"])
def test_a_folder_that_cannot_be_created_is_an_error_at_the_start(tmp_path, option):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"^{option}=.* cannot be created .*; give a folder that can be written") as caught:
        LLM(MODEL, max_model_len=64, **{option: tmp_path / "file" / "rows"})
    assert caught.value.info.param == option


def test_an_adapter_without_its_files_names_them(tmp_path):
    with pytest.raises(ConfigError, match=r"has no adapter_config.json; give a folder .* \(adapter_model.safetensors\)"):
        LLM(MODEL, adapter=tmp_path)
