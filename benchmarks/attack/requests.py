"""Requests to every public method, whose places are found in the dataclasses and signatures of the interface."""

from __future__ import annotations

import asyncio
import base64
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from PIL import Image
from sensorium import AsyncLLM, Media, RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from sensorium.callers.errors import short_repr
from sensorium.engine.frontend.arguments import _RENDERING, REQUEST_KEYS
from sensorium.engine.frontend.prompts import _PROMPT_KEYS
from sensorium.engine.logits_processors import _FACTORIES
from sensorium.pipelines.embed import EmbedOptions
from sensorium.pipelines.ocr import OcrOptions
from sensorium.pipelines.rank import ScoreOptions
from sensorium.pipelines.speech.options import FileOptions
from sensorium.processors.text import message_parts

from . import files

_TOKENS = 64  # of all answers of a request, so that a valid request ends soon
_IMAGE = Image.new("RGB", (32, 32))
_URL = f"data:image/png;base64,{base64.b64encode(files.png(32, 32)).decode()}"
_PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>a"
_FORMS = {"json": {"type": "object", "properties": {"a": {"enum": [1]}}}, "regex": "a+", "choice": ["a", "b"]}
_FORMS |= {"grammar": 'start: "a"', "json_object": True}
_PROCESSORS = {
    "allowed_tokens": {"tokens": [5, 6]},
    "no_repeat_ngrams": {"ngram_size": 2},
    "timestamps": {"first": 300, "none": 2, "end": 3},
}
_OPTIONS = {"ocr": OcrOptions, "embed": EmbedOptions, "score": ScoreOptions, "transcribe": FileOptions}
_MESSAGES = [
    {"role": "system", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "1", "name": "f"},
    {"role": "user", "content": [{"type": "text", "text": "say a"}]},
]
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@dataclass(frozen=True, repr=False)
class Call:
    """A call `make(**fields)`. Fields may hold further calls, in lists and dicts too."""

    make: Callable[..., Any]
    fields: dict[str, Any]

    def __repr__(self) -> str:
        return f"{getattr(self.make, '__name__', 'call')}({', '.join(f'{k}={short_repr(v)}' for k, v in self.fields.items())})"


@dataclass(frozen=True, repr=False)
class Raw:
    """A value that is passed as it is."""

    value: Any

    def __repr__(self) -> str:
        return short_repr(self.value)


def call(make: Callable[..., Any], **given: Any) -> Call:
    """Return a call with every parameter: those given, and the others with their defaults or None."""
    parameters = inspect.signature(make).parameters.values()
    defaults = {p.name: None if p.default is p.empty else p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    return Call(make, defaults | given)


def build(node: Any) -> Any:
    """Run a call, innermost calls first."""
    if isinstance(node, Raw):
        return node.value
    if isinstance(node, Call):
        return node.make(**{name: build(value) for name, value in node.fields.items()})
    if isinstance(node, dict):
        return {key: build(value) for key, value in node.items()}
    return [build(value) for value in node] if isinstance(node, list) else node


def places(node: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value below a node."""
    below = node.fields if isinstance(node, Call) else node
    items = below.items() if isinstance(below, dict) else enumerate(below) if isinstance(below, list) else ()
    for key, value in items:
        yield (key,)
        yield from ((key, *path) for path in places(value))


def put(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return the node with another value at this path."""
    if not path:
        return value
    key, *rest = path
    if isinstance(node, Call):
        return Call(node.make, put(node.fields, path, value))
    if isinstance(node, dict):
        return {**node, key: put(node.get(key), tuple(rest), value)}
    return [put(entry, tuple(rest), value) if i == key else entry for i, entry in enumerate(node)]


def sampling(**fields: Any) -> SamplingParams:
    """Return checked parameters that take a bounded number of steps."""
    params = SamplingParams(**fields)
    most = max(1, _TOKENS // params.n)
    return replace(params, max_tokens=min(params.max_tokens or most, most), min_tokens=min(params.min_tokens, most))


def params(**given: Any) -> Call:
    return Call(sampling, call(SamplingParams, **{"max_tokens": 2, **given}).fields)


def prompt(**given: Any) -> dict[str, Any]:
    text = {"prompt": _PLACEHOLDER, "multi_modal_data": {"image": [_IMAGE]}, "multi_modal_uuids": {"image": [None]}}
    return dict.fromkeys(_PROMPT_KEYS) | text | given


def part(kind: str) -> dict[str, Any]:
    """Return a content part of this kind with all of its fields."""
    modality = message_parts.PART_TYPES[kind]
    if modality == "text":
        return {"type": kind, "text": "a"}
    key = kind if kind in message_parts._KEYS[modality] else "image_url"
    value: Any = _IMAGE if modality == "image" else [_IMAGE] if modality == "video" else [0.0] * 1600
    if key == "input_audio":
        value = {"data": base64.b64encode(files.wav(8000, 1)).decode(), "format": "wav"}
    elif key.endswith("_url"):
        value = {"url": _URL, "detail": None}
    elif key.endswith("_embeds"):
        value = [[0.0] * 8]
    return {"type": kind, key: value, "uuid": None, **dict.fromkeys(message_parts._OPTIONS[modality])}


def requests(llm: Any) -> dict[str, list[Call]]:
    """Return calls of every public method that takes arguments, by its name. A method that is not known gets its defaults."""
    chat = call(llm.chat).fields
    rendering = {name: chat.get(name) for name in _RENDERING}
    given = {
        "tools": _TOOLS,
        "chat_template_kwargs": {"enable_thinking": True, "x": [1]},
        "mm_processor_kwargs": options(llm.engine.inputs._info),
        **dict.fromkeys(set(REQUEST_KEYS) - {"mm_processor_kwargs"}),
    }
    own = {"sampling_params": params(), "use_tqdm": False}
    talk = {"messages": _MESSAGES, **given}
    kinds = [[{"role": "user", "content": [part(kind), part("text")]}] for kind in message_parts.PART_TYPES]
    forms = [{"structured_outputs": call(StructuredOutputsParams, **{name: form})} for name, form in _FORMS.items()]
    processors = [
        {"logits_processors": {name: call(make, **_PROCESSORS.get(name, {})).fields}} for name, make in _FACTORIES.items()
    ]
    lists = {"stop": ["q"], "stop_token_ids": [5], "bad_words": ["zz"], "logit_bias": {"5": 1.0}}
    detection = {"repetition_detection": call(RepetitionDetectionParams)}
    media = call(Media, data=_IMAGE)
    full = prompt(mm_processor_kwargs=given["mm_processor_kwargs"], multi_modal_data={"image": [media]})
    one = {"prompt": full, "sampling_params": params()}
    known = {
        "generate": [
            call(llm.generate, prompts=full, **own),
            call(llm.generate, prompts=[prompt(), {"prompt_token_ids": [5, 6]}], **own | {"sampling_params": [params()] * 2}),
            *(
                call(llm.generate, prompts="user: say a", **own | {"sampling_params": params(**some)})
                for some in (lists, detection, *forms, *processors)
            ),
        ],
        "chat": [
            call(llm.chat, **own, **talk),
            *(call(llm.chat, **own, **given | {"messages": messages}) for messages in kinds),
        ],
        "stream": [call(llm.stream, **one), call(llm.stream, prompt=_MESSAGES, sampling_params=params(), **rendering | given)],
        "live": [Call(partial(live, llm), {**call(llm.live, **one).fields, "part": "b", "num_tokens": 6})],
        "request": [Call(partial(answer, llm), call(llm.request, **one, request_id="x").fields)],
        "serve": [call(llm.serve, handles=[call(llm.request, **one)], use_tqdm=False)],
        "plan": [call(llm.plan, prompt=full)],
        "embed": [call(llm.embed, inputs=["a", {"text": "b", "image": media}], use_tqdm=False)],
        "score": [call(llm.score, query="a", documents=["b", {"image": media}], use_tqdm=False)],
        "sleep": [Call(partial(sleep, llm), call(llm.sleep).fields)],
        "ocr": [call(llm.ocr, images=[media], use_tqdm=False, sampling_params=params())],
        "transcribe": [call(llm.transcribe, audio=[[0.0] * 1600], use_tqdm=False, sampling_params=params())],
    }
    for name, kind in _OPTIONS.items():
        known[name] = [Call(one.make, call(kind).fields | one.fields) for one in known[name]]
    methods = [name for name in dir(type(llm)) if not name.startswith("_") and inspect.isfunction(getattr(type(llm), name))]
    return {
        name: known.get(name, [call(getattr(llm, name))])
        for name in methods
        if len(inspect.signature(getattr(type(llm), name)).parameters) > 1
    }


def live(llm: Any, part: object, num_tokens: Any, **fields: Any) -> list[Any]:
    """Answer, roll back, append and answer again in a live session."""
    with llm.live(**fields) as session:
        outputs = [session.answer()]
        if outputs[0].error is None:
            session.truncate(num_tokens)
            session.append(part)
            outputs.append(session.answer())
        return outputs


def sleep(llm: Any, **fields: Any) -> None:
    """Put the engine to sleep, and wake it up for the calls after this one."""
    llm.sleep(**fields)
    llm.wake_up()


def answer(llm: Any, **fields: Any) -> list[Any]:
    """Answer a request in an event loop."""

    async def run() -> list[Any]:
        engine = AsyncLLM(llm)
        return [output async for output in engine.generate(**fields)]

    return asyncio.run(run())


def options(info: Any) -> Mapping[str, Any]:
    """Return every processing option of a family, not given, flat and by modality."""
    nested = {f"{modality}s_kwargs": dict.fromkeys(names) for modality, names in info.valid_kwargs.items()}
    return {name: None for names in info.valid_kwargs.values() for name in names} | nested
