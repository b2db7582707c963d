"""/v1/chat/completions with the `openai` package and with plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from dataclasses import replace

import httpx
import openai
import pytest
from http_server import CASES, IMAGE, MEDIA, error, image_url, listening, make_server, saying
from PIL import Image
from prometheus_client import CollectorRegistry
from sensorium.callers.errors import ConfigError, ErrorInfo
from sensorium.processors.elements.element import Element
from sensorium.processors.elements.marked_text import MarkedText
from sensorium.server.config import ServerConfig
from sensorium.server.parsers.reasoning import FORMATS, ReasoningFormat
from waiting import assert_idle, wait_until


def messages(text="hello", *parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


IMAGE_PART = {"type": "image_url", "image_url": {"url": image_url(), "detail": "auto"}}
BROKEN_PART = {"type": "image_url", "image_url": {"url": "data:,x"}}
AUDIO_PART = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
WRONG_CALL = {"function": {"name": "f", "colour": 1}}
QUESTION = messages(CASES[IMAGE]["prompt"], IMAGE_PART)
PLAIN = {"model": "tiny-vl", "messages": messages(), "temperature": 0.0, "max_tokens": 8, "seed": 1}
LONG = {**PLAIN, "ignore_eos": True}


def ask(http, **fields):
    return http.post("/v1/chat/completions", json={**PLAIN, **fields})


def events(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: {") for line in lines)
    return [json.loads(line[6:]) for line in lines]


def test_an_image_is_answered(client):
    found = client.chat.completions.create(model="tiny-vl", messages=QUESTION, temperature=0, max_tokens=96)
    assert found.choices[0].message.content.strip() == CASES[IMAGE]["answer"]
    assert found.choices[0].finish_reason == "stop"
    usage = found.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.prompt_tokens_details.image_tokens < usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0
    stream = client.chat.completions.create(
        model="tiny-vl", messages=QUESTION, temperature=0, max_tokens=96, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == found.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens


def test_the_pages_of_a_pdf_are_images(client, http):
    data = io.BytesIO()
    Image.open(MEDIA / IMAGE).convert("RGB").save(data, "PDF", resolution=144.0, quality=95)
    url = f"data:application/pdf;base64,{base64.b64encode(data.getvalue()).decode()}"
    part = {"type": "file", "file": {"file_data": url, "filename": "scan.pdf"}}
    found = client.chat.completions.create(
        model="tiny-vl", messages=messages(CASES[IMAGE]["prompt"], part), temperature=0, max_tokens=96
    )
    assert found.choices[0].message.content.strip() == CASES[IMAGE]["answer"]
    broken = {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}}
    refused = error(ask(http, messages=messages("hello", broken)))
    assert "message 0 part 0: it is not a PDF" in refused["message"]
    assert (refused["code"], refused["param"]) == ("invalid_media", "messages[0].content[0]")


def test_the_form_of_a_stream(http):
    chunks = events(ask(http, stream=True, **{"max_tokens": 3, "ignore_eos": True}))
    assert {tuple(chunk)[:4] for chunk in chunks} == {("id", "object", "created", "model")}
    assert len({(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    last = chunks[-1]["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({}, "length")
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    whole = ask(http, max_tokens=3, ignore_eos=True).json()
    assert whole["object"] == "chat.completion"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]


def test_elements_on_request(http, monkeypatch):
    seen = []

    def elements(self):
        with pytest.raises(RuntimeError):  # it may take long, so it runs outside the event loop
            asyncio.get_running_loop()
        seen.append(self)
        return (Element("cup", box=(1.0, 2.0, 3.0, 4.0)),)

    monkeypatch.setattr(MarkedText, "elements", elements)
    fields = {"messages": QUESTION, "max_tokens": 3}
    assert "elements" not in ask(http, **fields).json()["choices"][0]
    assert not seen
    (choice,) = ask(http, return_elements=True, **fields).json()["choices"]
    (one,) = choice["elements"]
    assert (one["label"], one["box"], one["cells"]) == ("cup", [1.0, 2.0, 3.0, 4.0], [])
    chunks = events(ask(http, return_elements=True, stream=True, **fields))
    assert [chunk["choices"][0].get("elements") for chunk in chunks] == [None] * (len(chunks) - 1) + [[one]]
    with Image.open(MEDIA / IMAGE) as image:
        width, height = image.size
    (scale,) = seen[-1].images
    assert (seen[-1].format, scale.size) == ("resized_json", (height, width))
    assert scale.resized == (round(height / 16) * 16, round(width / 16) * 16)
    assert choice["message"]["content"] in seen[-1].text


def test_several_answers_of_a_stream(http):
    fields = {"n": 3, "temperature": 1.0, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "max_tokens": 6}
    whole = ask(http, **fields).json()["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2]
    for options in (None, {"include_usage": True, "continuous_usage_stats": True}):
        streamed = ask(http, stream=True, **({"stream_options": options} if options else {}), **fields)
        texts, ids, entries, ends = ["", "", ""], [[], [], []], [[], [], []], [0, 0, 0]
        for chunk in events(streamed):
            assert ("usage" in chunk) == (options is not None)
            for choice in chunk["choices"]:
                index = choice["index"]
                texts[index] += choice["delta"].get("content", "")
                ids[index] += choice.get("token_ids", [])
                entries[index] += (choice["logprobs"] or {"content": []})["content"]
                ends[index] += choice["finish_reason"] is not None
        assert texts == [choice["message"]["content"] for choice in whole]
        assert ids == [choice["token_ids"] for choice in whole]
        assert entries == [choice["logprobs"]["content"] for choice in whole]
        assert ends == [1, 1, 1]
    for entry in whole[0]["logprobs"]["content"]:
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        assert len(entry["top_logprobs"]) == 2


def test_logprobs_have_the_bytes_of_parts_of_characters(http, tiny):
    tokenizer = tiny[1].engine.tokenizer
    part = next(one for one in tokenizer.encode("\U0001f680", add_special_tokens=False) if "\ufffd" in tokenizer.decode([one]))
    found = ask(http, allowed_token_ids=[part], logprobs=True, max_tokens=1).json()["choices"][0]
    (entry,) = found["logprobs"]["content"]
    assert entry["token"] == "\ufffd"
    assert entry["bytes"] == list(tokenizer.token_bytes(part))
    assert entry["bytes"] != list("\ufffd".encode())


def test_sampling_fields_do_what_they_do_in_python(http, tiny):
    from sensorium import SamplingParams

    values = {"temperature": 1.5, "top_p": 0.9, "top_k": 50, "seed": 3, "max_tokens": 12, "repetition_penalty": 1.2}
    values |= {"presence_penalty": 0.3, "frequency_penalty": 0.2, "min_tokens": 4, "stop_token_ids": [7], "bad_words": ["a"]}
    expected = tiny[1].llm.llm.chat(messages(), SamplingParams(**values, logit_bias={9: 5.0}), use_tqdm=False)[0]
    found = ask(http, **values, logit_bias={"9": 5.0}, return_token_ids=True).json()
    assert found["choices"][0]["token_ids"] == expected.outputs[0].token_ids
    assert found["prompt_token_ids"] == expected.prompt_token_ids


def test_structured_outputs(http):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    text = ask(http, response_format=form, max_tokens=40).json()["choices"][0]["message"]["content"]
    assert json.loads(text)["n"] in (1, 2)
    found = ask(http, structured_outputs={"choice": ["yes", "no"]}, response_format={"type": "text"}).json()
    assert found["choices"][0]["message"]["content"] in ("yes", "no")
    wrong = error(ask(http, structured_outputs={"choice": ["a"]}, response_format=form))
    assert wrong["param"] == "response_format"
    assert error(ask(http, response_format={"type": "xml"}))["param"] == "response_format"
    assert error(ask(http, response_format={"type": "json_schema"}))["param"] == "response_format"
    assert "chioce" in error(ask(http, structured_outputs={"chioce": ["a"]}))["message"]


WRONG = {"type": "json_schema", "name": "n", "schema": {"type": "colour"}}


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("chat/completions", {**PLAIN, "response_format": {"type": "json_schema", "json_schema": WRONG}}, "response_format"),
        ("chat/completions", {**PLAIN, "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ("completions", {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": WRONG}}, "response_format"),
        ("responses", {"input": "a", "text": {"format": WRONG}}, "text.format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_format_is_that_of_the_field_that_gives_it(http, path, fields, field, stream):
    found = error(http.post(f"/v1/{path}", json={**fields, "stream": stream}))
    assert found["param"] == field
    assert found["message"].startswith(f"{field} cannot be used: ")


def test_a_wrong_format_of_a_forced_call_is_that_of_the_tools(tools):
    given = [{"type": "function", "function": {"name": "look", "parameters": WRONG["schema"]}}]
    with pytest.raises(openai.BadRequestError, match="tools cannot be used: ") as found:
        tools[0].chat.completions.create(model="tiny-vl", messages=messages(), tools=given, tool_choice="required")
    assert found.value.param == "tools"


TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {
        "type": "object", "properties": {"place": {"enum": ["here", "there"]}}, "required": ["place"],
        "additionalProperties": False,
    }}},
    {"type": "function", "function": {"name": "wait"}},
]  # fmt: skip


def test_forced_tool_calls(tools):
    client, _ = tools
    choice = {"type": "function", "function": {"name": "look"}}
    fields = {"model": "tiny-vl", "messages": messages(), "tools": TOOLS, "tool_choice": choice, "max_tokens": 40}
    (call,) = client.chat.completions.create(**fields).choices[0].message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments)["place"] in ("here", "there")
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, temperature=0, stream=True)]
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.id] == ["look"]
    assert {part.index for part in parts} == {0}
    assert json.loads("".join(part.function.arguments for part in parts))["place"] in ("here", "there")
    fields |= {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 80}
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert [call.function.name for call in whole.message.tool_calls] == ["look"]
    assert whole.message.content is None


def test_chosen_tool_calls(tools, monkeypatch):
    """The model cannot call tools, so the engine's outputs are replaced."""
    client, server = tools
    text = '<think>hm</think>Wait.\n<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
    server.__dict__["answer_format"] = replace(server.answer_format, reasoning=FORMATS["think"])
    monkeypatch.setattr(server.llm, "generate", saying(server.llm.generate, text))
    fields = {"model": "tiny-vl", "messages": messages(), "tools": TOOLS, "max_tokens": 2}
    choice = client.chat.completions.create(**fields).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.reasoning_content) == ("tool_calls", "Wait.", "hm")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "look", '{"place": "here"}')
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Wait."
    assert "".join(getattr(chunk.delta, "reasoning_content", "") for chunk in chunks) == "hm"
    assert [part.function.name for chunk in chunks for part in chunk.delta.tool_calls or ()] == ["look"]
    assert chunks[-1].finish_reason == "tool_calls"
    hidden = client.chat.completions.create(**fields, extra_body={"include_reasoning": False}).choices[0].message
    assert not hasattr(hidden, "reasoning_content")


def test_tools_that_cannot_be_called(http):
    assert error(ask(http, tools=TOOLS))["param"] == "tools"  # the template has no calls
    assert ask(http, tools=TOOLS, tool_choice="none").status_code == 200
    for tools in ([{}], [{"type": "function"}], [{"type": "function", "function": {"name": "a", "parameters": 3}}]):
        assert error(ask(http, tools=tools))["param"] == "tools"
    for choice in ("maybe", {"type": "function"}, {"type": "function", "function": {"name": "none"}}):
        assert error(ask(http, tools=TOOLS, tool_choice=choice))["param"] == "tool_choice"
    assert error(ask(http, tool_choice="required"))["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"colour": 1}, "colour"),
        ({"max_token": 1}, "max_token"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1025}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 999}, "logprobs"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"logit_bias": {"1": 1000.0}}, "logit_bias"),
        ({"stop": ["a"] * 2000}, "stop"),
        ({"stream": True, "stream_options": {"all": True}}, "stream_options.all"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": messages("\ud800")}, "messages[0].content[0].text"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0]"),
        ({"messages": [*messages(), {"role": "user"}]}, "messages[1]"),
        ({"messages": [*messages(), {"role": "user", "content": "a", "colour": 1}]}, "messages[1]"),
        ({"messages": [{"role": "assistant", "tool_calls": [WRONG_CALL]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": messages("a", IMAGE_PART, {"type": "colour"})}, "messages[0].content[1]"),
        ({"messages": messages("a", IMAGE_PART, AUDIO_PART)}, "messages[0].content[1]"),  # the model takes no audio
        ({"messages": messages("a", {"type": "image_url", "image_url": {"url": 3}})}, "messages[0].content[0]"),
        ({"messages": messages("a", {**IMAGE_PART, "max_pixels": -1})}, "messages[0].content[0].max_pixels"),
        ({"messages": messages("hello " * 4000)}, "messages"),
        ({"messages": [*messages(), *messages("a", IMAGE_PART, BROKEN_PART)]}, "messages[1].content[1]"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"priority": -1}, "priority"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"messages": [1, 2]}, "messages[0]"),
        ({"mm_processor_kwargs": {"max_pixels": -1}}, None),
        ({"repetition_detection": {"depth": 1}}, "repetition_detection"),
        ({"model": 3}, "model"),
    ],
)
def test_wrong_fields(http, fields, param):
    for stream in (False, True):
        found = error(http.post("/v1/chat/completions", content=json.dumps({**PLAIN, "stream": stream, **fields}),
                                headers={"Content-Type": "application/json"}))  # fmt: skip
        assert found["type"] == "invalid_request_error"
        assert param is None or found["param"] == param, found


def test_fields_that_say_nothing(http):
    fields = {"user": "me", "metadata": {}, "service_tier": "auto", "store": False, "modalities": ["text"], "top_p": None}
    assert ask(http, **fields).status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"3", b'"a"', b"\xff", b"[" * 100_000, b'{"messages": 1' + b"0" * 5000 + b"}"]
)
def test_bodies_that_are_no_json_object(http, body):
    found = error(http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}))
    assert found["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/chat/completions", [], None, "the body is []; it must be an object"),
        ("/v1/chat/completions", {"messages": []}, "messages", "messages is []; it must be a list with 1 or more entries"),
        ("/v1/chat/completions", {**PLAIN, "stop": 5}, "stop", "stop is 5; it must be a string or a list"),
        ("/v1/chat/completions", {**PLAIN, "stop": ["a", 5]}, "stop[1]", "stop[1] is 5; it must be a string"),
        ("/v1/chat/completions", {**PLAIN, "stream": "yes"}, "stream", "stream is 'yes'; it must be true or false"),
        ("/v1/completions", {"prompt": [[1, "a"]]}, "prompt[0][1]", "prompt[0][1] is 'a'; it must be an integer"),
        ("/v1/chat/completions", {**PLAIN, "max_new_tokens": 3}, "max_new_tokens", "did you mean max_tokens?"),
    ],
)
def test_wrong_forms_are_said_in_plain_words(http, path, body, param, said):
    found = error(http.post(path, json=body))
    assert found["param"] == param
    assert said in found["message"]
    assert "Input should" not in found["message"]


def test_another_content_type(http):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = http.post("/v1/chat/completions", content=json.dumps(PLAIN), headers={"Content-Type": kind})
        assert error(response, 415)["code"] == "unsupported_media_type"


def test_another_model(http):
    assert error(ask(http, stream_options={"include_usage": True}))["param"] == "stream_options"
    assert error(ask(http, model="gpt"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    "url", ["/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/a.png", "http://169.254.169.254/", "data:,x"]
)
def test_media_that_strangers_may_not_name(http, url):
    part = {"type": "image_url", "image_url": {"url": url}}
    for stream in (False, True):
        found = error(ask(http, messages=messages("what", IMAGE_PART, part), stream=stream))
        assert (found["code"], found["modality"], found["index"]) == ("invalid_media", "image", 1)
        assert found["param"] == "messages[0].content[1]"


def test_a_prompt_that_is_too_long(http):
    assert error(ask(http, messages=messages("hello " * 4000)))["code"] == "too_long"


def test_the_package_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model="tiny-vl", messages=messages(), max_tokens=0)
    assert found.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages())


def test_an_error_in_the_middle_of_a_stream(http, tiny, monkeypatch):
    engine = tiny[1].llm
    generate = engine.generate

    async def failing(*args, **options):
        async for output in generate(*args, **options):
            yield output
            output = type(output)("x", None, [], [], error=ErrorInfo("engine_dead", "the engine has failed"))
            yield output
            return

    monkeypatch.setattr(engine, "generate", failing)
    lines = ask(http, **{**LONG, "stream": True}).text.split("\n\n")
    assert json.loads(lines[-2][6:])["error"]["code"] == "engine_dead"
    assert "[DONE]" not in lines[-2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(tiny, stream):
    url, server = tiny
    stats = server.llm.llm
    body = {**LONG, "max_tokens": 900, "n": 4, "temperature": 1.0, "stream": stream}
    with httpx.Client() as leaving:
        if stream:
            with leaving.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(f"{url}/v1/chat/completions", json=body, timeout=0.2)
    wait_until(lambda: not stats.engine.loop._names)
    assert_idle(stats)


def test_each_key_has_its_own_cache(tiny):
    server = make_server(tiny[1].llm.llm, "tiny-vl", ServerConfig(api_key=["one", "two"]))
    long = {**PLAIN, "messages": messages("a long text of many tokens " * 8)}
    with listening(server) as url:

        def cached(key, **fields):
            headers = {"Authorization": f"Bearer {key}"}
            found = httpx.post(f"{url}/v1/chat/completions", json=long | fields, headers=headers, timeout=240).json()
            return found["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("one") == 0
        assert cached("one") > 0
        assert cached("two") == 0
        assert cached("one", cache_salt="x") == 0


def test_reasoning_tokens_are_counted_alike_in_answers_and_streams(tiny, http, monkeypatch):
    """The answer's text up to the word COFFEE is taken for reasoning."""
    server, name = tiny[1], "receipt1.png"
    part = {"type": "image_url", "image_url": {"url": image_url(name)}}
    fields = {"messages": messages(CASES[name]["prompt"], part), "max_tokens": 96, "return_token_ids": True}
    before = ask(http, **fields).json()
    assert before["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    form = ReasoningFormat((), ("COFFEE",), implicit=True)
    monkeypatch.setitem(server.__dict__, "answer_format", replace(server.answer_format, reasoning=form))
    found = ask(http, **fields).json()
    assert found["choices"][0]["message"]["reasoning_content"].strip() == "ICG4 114"
    ids = found["choices"][0]["token_ids"]
    decode = server.engine.tokenizer.decode
    expected = next(count for count in range(len(ids)) if "COFFEE" in decode(ids[:count]))
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    usages = [chunk["usage"] for chunk in events(ask(http, **fields, stream=True, stream_options={"include_usage": True}))]
    assert usages[-1] == {**found["usage"], "prompt_tokens_details": usages[-1]["prompt_tokens_details"]}
    several = ask(http, **fields, n=2, temperature=0.01).json()
    assert several["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * expected}


def test_the_fingerprint_names_model_and_options(tiny, http):
    found = ask(http).json()["system_fingerprint"]
    assert found.startswith("fp_")
    assert {chunk["system_fingerprint"] for chunk in events(ask(http, stream=True))} == {found}
    assert make_server(tiny[1].llm.llm, "other").fingerprint == found
    completion = http.post("/v1/completions", json={"model": "tiny-vl", "prompt": "a", "max_tokens": 1}).json()
    assert completion["system_fingerprint"] == found


def test_unknown_fields_may_be_left_out_and_counted(tiny):
    server = make_server(tiny[1].llm.llm, "tiny-vl", ServerConfig(allow_unknown_fields=True))
    server.services.registry = CollectorRegistry()
    with listening(server) as url, httpx.Client(base_url=url, timeout=240) as http:
        expected = ask(http).json()["choices"]
        message = {**messages()[0], "mood": "good"}
        found = ask(http, colour=1, stream_options={"colour": 2}, stream=None, messages=[message])
        assert error(found)["param"] == "stream_options"  # known fields are checked as before
        found = ask(http, colour=1, size=None, messages=[message])
        assert found.json()["choices"] == expected
        assert error(ask(http, logits_processors=["a"]))["code"] == "unsupported"
        assert 'sensorium_unknown_fields_total{model_name="tiny-vl"} 6.0' in http.get("/metrics").text
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "colour": 1}).status_code == 200
    with pytest.raises(ConfigError, match="must be true or false"):
        ServerConfig(allow_unknown_fields="yes")
