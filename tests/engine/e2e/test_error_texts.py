"""A long text or a lone surrogate in any public parameter gives an answer, or a short, typed error that names the parameter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sensorium import LLM, SamplingParams, StructuredOutputsParams
from sensorium.callers.errors import ErrorInfo, SensoriumError
from sensorium.engine.sampling_params import RepetitionDetectionParams
from sensorium.mm.types import Media

MODEL = Path(__file__).resolve().parents[3] / "assets" / "tiny-vl"
LONG = "x" * 100_000
HALF = "a\ud800b"
IMAGE = np.zeros((28, 28, 3), np.uint8)
ASK = [{"role": "user", "content": "Hi"}]
PICTURE = {"prompt": "<|vision_start|><|image_pad|><|vision_end|>", "multi_modal_data": {"image": IMAGE}}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def chat(messages: Any, **more: Any) -> Any:
    return lambda llm: llm.chat(messages, SamplingParams(max_tokens=1), False, **more)


def ask(prompt: Any, **params: Any) -> Any:
    return lambda llm: llm.generate(prompt, SamplingParams(**{"max_tokens": 1, **params}), False)


def cases(text: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name of the parameter, call)."""
    yield "prompt", ask(text)
    yield "prompt key", ask({"prompt": "a", text: 1})
    yield "prompt of a wrong type", ask({"prompt": [text]})
    yield "prompt_token_ids", ask({"prompt_token_ids": [1, text]})
    yield "prompt_token_ids as text", ask({"prompt_token_ids": text})
    yield "cache_salt", ask({"prompt": "a", "cache_salt": text})
    yield "cache_salt with an image", ask({**PICTURE, "cache_salt": text})
    yield "cache_salt of a wrong type", ask({"prompt": "a", "cache_salt": [text]})
    yield "fit", ask({"prompt": "a", "fit": text})
    yield "modality", ask({"prompt": "a", "multi_modal_data": {text: IMAGE}})
    yield "multi_modal_data", ask({"prompt": "a", "multi_modal_data": text})
    yield "multi_modal_data path", ask({**PICTURE, "multi_modal_data": {"image": text}})
    yield "multi_modal_data url", ask({**PICTURE, "multi_modal_data": {"image": f"http://{text}/"}})
    yield "multi_modal_data url path", ask({**PICTURE, "multi_modal_data": {"image": f"http://localhost/{text}"}})
    yield "multi_modal_data data url", ask({**PICTURE, "multi_modal_data": {"image": f"data:image/png;base64,{text}"}})
    yield "multi_modal_data file url", ask({**PICTURE, "multi_modal_data": {"image": f"file:///{text}"}})
    yield "multi_modal_uuids", ask({**PICTURE, "multi_modal_uuids": {"image": [text]}})
    yield "multi_modal_uuids without content", ask({**PICTURE, "multi_modal_data": {}, "multi_modal_uuids": {"image": [text]}})
    yield "multi_modal_uuids of a wrong type", ask({**PICTURE, "multi_modal_uuids": {"image": [[text]]}})
    yield "multi_modal_uuids of another modality", ask({**PICTURE, "multi_modal_uuids": {text: ["a"]}})
    yield (
        "two uuids",
        ask({**PICTURE, "multi_modal_data": {"image": Media(IMAGE, "b")}, "multi_modal_uuids": {"image": [text]}}),
    )
    yield "mm_processor_kwargs name", ask({**PICTURE, "mm_processor_kwargs": {text: 1}})
    for name in ("max_pixels", "size", "images_kwargs", "videos_kwargs", "fps", "do_resize"):
        yield f"mm_processor_kwargs {name}", ask({**PICTURE, "mm_processor_kwargs": {name: text}})
        yield f"mm_processor_kwargs {name} in it", ask({**PICTURE, "mm_processor_kwargs": {name: {text: text}}})
    yield "Media option", ask({**PICTURE, "multi_modal_data": {"image": Media(IMAGE, max_pixels=text)}})
    yield "encoder_prompt", ask({"encoder_prompt": text, "decoder_prompt": text})
    yield "encoder_prompt key", ask({"encoder_prompt": text, text: text})
    yield "messages", chat([text])
    yield "messages text", chat(text)
    yield "role", chat([{"role": text, "content": "a"}])
    yield "content", chat([{"role": "user", "content": text}])
    yield "content of a wrong type", chat([{"role": "user", "content": {text: 1}}])
    yield "message key", chat([{**ASK[0], text: "a"}])
    yield "message value", chat([{**ASK[0], "name": text}])
    yield "part", chat(user(text))
    yield "part type", chat(user({"type": text}))
    yield "part key", chat(user({"type": "text", "text": "a", text: 1}))
    yield "part text", chat(user({"type": "text", "text": text}))
    yield "part text of a wrong type", chat(user({"type": "text", "text": [text]}))
    yield "part url", chat(user({"type": "image_url", "image_url": {"url": text}}))
    yield "part url path", chat(user({"type": "image_url", "image_url": {"url": f"http://localhost/{text}"}}))
    yield "part data", chat(user({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}))
    yield "part url key", chat(user({"type": "image_url", "image_url": {"url": "a", text: 1}}))
    yield "part detail", chat(user({"type": "image_url", "image_url": {"url": "a", "detail": text}}))
    yield "part path", chat(user({"type": "image", "image": text}))
    yield "part audio", chat(user({"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}))
    yield "part audio format", chat(user({"type": "input_audio", "input_audio": {"data": "AAAA", "format": text}}))
    for name in ("uuid", "min_pixels", "max_pixels", "detail"):
        yield f"part {name}", chat(user({"type": "image", "image": IMAGE, name: text}))
    for name in ("fps", "num_frames"):
        yield f"part {name}", chat(user({"type": "video", "video": np.zeros((2, 28, 28, 3), np.uint8), name: text}))
    yield "chat_template", chat(ASK, chat_template=text)
    yield "chat_template that is none", chat(ASK, chat_template="{% " + text + " %}")
    yield "chat_template that refuses", chat(ASK, chat_template="{{ raise_exception(x) }}", chat_template_kwargs={"x": text})
    yield "chat_template with an unknown filter", chat(ASK, chat_template="{{ a | " + text + " }}")
    yield "chat_template with a missing key", chat(ASK, chat_template="{{ {}['" + text + "'].a.b }}")
    yield "chat_template and a list", chat(ASK, chat_template="{{ x + [1] }}", chat_template_kwargs={"x": text})
    yield "chat_template and int", chat(ASK, chat_template="{{ range(x) }}", chat_template_kwargs={"x": text})
    yield "chat_template_kwargs", chat(ASK, chat_template_kwargs={"x": text})
    yield "chat_template_kwargs name", chat(ASK, chat_template_kwargs={text: 1})
    yield "chat_template_kwargs in it", chat(ASK, chat_template_kwargs={"x": {"y": [text]}})
    yield "chat_template_kwargs of a wrong type", chat(ASK, chat_template_kwargs=text)
    yield "tools", chat(ASK, tools=[{"type": "function", "function": {"name": text}}])
    yield "tools key", chat(ASK, tools=[{text: "function"}])
    yield "tools of a wrong type", chat(ASK, tools=text)
    yield "continue_final_message", chat([{"role": "assistant", "content": text}], continue_final_message=True)
    yield "unknown argument", chat(ASK, **{text: 1})
    yield "chat cache_salt", chat(ASK, cache_salt=text)
    yield "chat fit", chat(ASK, fit=text)
    yield "chat mm_processor_kwargs", chat(ASK, mm_processor_kwargs={text: text})
    for name in SamplingParams.__dataclass_fields__:
        yield name, ask("a", **{name: text})
        yield f"{name} as a list", ask("a", **{name: [text]})
        yield f"{name} as a mapping", ask("a", **{name: {text: text}})
    yield "structured_outputs json", lambda llm: ask("a", structured_outputs=StructuredOutputsParams(json=text))(llm)
    yield (
        "structured_outputs schema",
        lambda llm: ask("a", structured_outputs=StructuredOutputsParams(json={"type": text}))(llm),
    )
    yield (
        "structured_outputs const",
        lambda llm: ask("a", structured_outputs=StructuredOutputsParams(json={"const": text}))(llm),
    )
    yield "structured_outputs regex", lambda llm: ask("a", structured_outputs=StructuredOutputsParams(regex=f"({text}"))(llm)
    yield "structured_outputs choice", lambda llm: ask("a", structured_outputs=StructuredOutputsParams(choice=[text]))(llm)
    yield "structured_outputs grammar", lambda llm: ask("a", structured_outputs=StructuredOutputsParams(grammar=text))(llm)
    yield "structured_outputs whitespace", lambda llm: StructuredOutputsParams(regex="a", whitespace=text)
    yield "repetition_detection", lambda llm: RepetitionDetectionParams(max_cycle=text)
    yield "priority", lambda llm: llm.generate("a", SamplingParams(max_tokens=1), False, priority=text)
    yield "request_id", lambda llm: llm.request("a", request_id=text) and llm.request("a", request_id=[text])
    yield "sampling_params", lambda llm: llm.generate("a", text, False)
    yield "plan", lambda llm: llm.plan({"multi_modal_data": {"image": text}})
    yield "plan options", lambda llm: llm.plan(PICTURE, mm_processor_kwargs={text: text})
    yield "embed", lambda llm: llm.embed([text])
    yield "score", lambda llm: llm.score(text, [text])
    yield "ocr", lambda llm: llm.ocr(text)
    yield "transcribe", lambda llm: llm.transcribe(text)
    for name in (
        "dtype",
        "device",
        "kernels",
        "quantization",
        "media",
        "max_num_seqs",
        "mm_processor_kwargs",
        "encoder_cache_dir",
        "packed_cache_dir",
    ):
        yield f"LLM {name}", lambda llm, name=name: LLM(str(MODEL), **{name: text})
    yield "LLM option", lambda llm: LLM(str(MODEL), **{text: text})
    yield "LLM model", lambda llm: LLM(text)
    yield "LLM media option", lambda llm: LLM(str(MODEL), media={text: text})
    yield "LLM limit", lambda llm: LLM(str(MODEL), limit_mm_per_prompt={text: text})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(MODEL), max_model_len=512) as llm:
        yield llm


NAMED = {
    "prompt": "prompt",
    "cache_salt": "cache_salt",
    "cache_salt with an image": "cache_salt",
    "multi_modal_uuids": "uuid",
    "multi_modal_uuids without content": "uuid",
    "content": "messages[0].content",
    "message value": "messages[0].name",
    "part text": "messages[0].content[0].text",
    "part uuid": "uuid",
    "chat_template": "chat_template",
    "chat_template_kwargs": "x",
    "chat_template_kwargs in it": "x.y[0]",
    "tools": "tools[0].function.name",
    "tools key": "tools[0]",
    "chat cache_salt": "cache_salt",
}  # what the error about a lone surrogate names
NAMES = [name for name, _ in cases("")]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", [LONG, HALF], ids=["long", "surrogate"])
def test_an_error_is_typed_and_short(llm: LLM, name: str, text: str) -> None:
    found = []
    try:
        answered = dict(cases(text))[name](llm)
        found = [answer.error for answer in answered if answer.error] if isinstance(answered, list) else []
    except SensoriumError as error:
        found = [error.info, ErrorInfo(error.info.code, str(error))]
    for error in found:
        assert error.code not in ("internal", "engine_dead"), error
        assert len(error.message) < 1000, error.message[:200]
        assert len(error.param or "") <= 200
        error.message.encode()
        (error.param or "").encode()
        if text == HALF and name in NAMED:
            assert "lone surrogate" in error.message
            assert NAMED[name] in error.message
