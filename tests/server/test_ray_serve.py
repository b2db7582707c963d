"""The server on Ray Serve: which replica gets a request, what the ingress passes on, and a local Ray with two replicas."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import os
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sensorium
import soundfile
from http_server import TINY, error, image_url, make_server
from sensorium.callers.errors import ConfigError
from sensorium.server.app import make_app
from sensorium.server.config import ServerConfig
from sensorium.server.ray_serve.bridge import MAX_UNREAD_BYTES, Start, run_app
from sensorium.server.ray_serve.ingress import ReplicaLost, make_ingress
from sensorium.server.ray_serve.replica import Replica
from sensorium.server.ray_serve.routing import FACTOR, SLACK, preferred, routing_key
from waiting import wait_until

ENGINE = {"max_model_len": 512, "max_num_seqs": 4, "warm_up": False, "engine_process": False}
CHAT = "/v1/chat/completions"


def asked(*messages: object, **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(messages)], **fields}


def image_part(url: str = "data:image/png;base64,AAAA") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_questions_about_one_image_have_one_key_in_every_api() -> None:
    data, one, other = "AAAA", image_part(), image_part("data:image/png;base64,BBBB")
    key = routing_key(asked([one, text_part("what?")]))
    assert key == routing_key(asked([text_part("who?"), one, other])) == routing_key(asked([one], "a", "b"))
    assert key != routing_key(asked([other]))
    assert key != routing_key(asked([one]), "tenant") != routing_key(asked([one]), "another")
    assert key != routing_key(asked([one], cache_salt="a"))
    source = {"type": "base64", "media_type": "image/png", "data": data}
    anthropic = [routing_key(asked([text_part(text), {"type": "image", "source": source}])) for text in "ab"]
    assert anthropic[0] == anthropic[1]
    responses = [routing_key({"input": asked([{"type": "input_image", "image_url": url}])["messages"]}) for url in ("u", "u")]
    assert responses[0] == responses[1]
    ollama = [routing_key({"prompt": text, "images": [data]}) for text in ("a", "a")]
    assert ollama[0] == ollama[1]
    named = [routing_key(asked([part | {"uuid": "id"}])) for part in (one, other, {"type": "image_url", "image_url": None})]
    assert named[0] == named[1] == named[2]


def test_turns_of_a_conversation_have_one_key() -> None:
    system = {"role": "system", "content": "s" * 100}
    first, second = asked("a"), asked("a", "b", "c")
    assert routing_key(first) == routing_key(second) != routing_key(asked("b"))
    with_system = [{"messages": [system, *body["messages"]]} for body in (first, second)]
    assert routing_key(with_system[0]) == routing_key(with_system[1]) != routing_key(first)
    document = "d" * 2000
    assert routing_key({"prompt": document + "a"}) == routing_key({"prompt": document + "b"}) != routing_key({"prompt": "d"})
    for body in (None, [], "text", {}, {"messages": 7}, {"prompt": [1, 2]}, {"messages": [None]}):
        assert routing_key(body) is None, body
    nested: Any = "text"
    for _ in range(100_000):
        nested = [nested]
    assert routing_key({"messages": nested}) == routing_key({"messages": ["text"]})


def test_a_replica_that_comes_or_goes_moves_its_own_requests_only() -> None:
    keys, few = [str(number) for number in range(600)], {"a": 0, "b": 0, "c": 0}
    before = {key: preferred(key, few)[0] for key in keys}
    after = {key: preferred(key, {**few, "d": 0})[0] for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert {after[key] for key in moved} == {"d"}
    assert 100 < len(moved) < 200
    assert all(150 < count < 250 for count in Counter(before.values()).values())
    gone = {key: preferred(key, {"a": 0, "b": 0})[0] for key in keys}
    assert all(gone[key] == before[key] for key in keys if before[key] != "c")


def test_a_replica_with_too_many_requests_comes_last() -> None:
    first, *others = preferred("key", dict.fromkeys("abc", 0))
    assert preferred("key", {name: SLACK - 1 if name == first else 0 for name in "abc"})[0] == first
    busy = {name: SLACK if name == first else 0 for name in "abc"}
    assert list(preferred("key", busy)) == [*others, first]
    assert preferred("key", dict.fromkeys("abc", 100))[0] == first
    assert preferred("key", {"a": 100, "b": 100, "c": 100, first: int(100 * FACTOR * 1.2)})[0] != first
    assert preferred(None, {"a": 2, "b": 0, "c": 1}) == ["b", "c", "a"]
    assert preferred("key", {}) == []


Calls = list[tuple[str, str | None]]


def call(models: Mapping[str, Any], *requests: tuple[str, str, Any], **options: Any) -> list[httpx.Response]:
    """Return the responses of an ingress before these models, to requests of method, path and arguments of httpx."""

    async def run() -> list[httpx.Response]:
        app = make_ingress(models, lambda: True, ServerConfig(**options))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=240) as client:
            return [await client.request(method, path, **arguments) for method, path, arguments in requests]

    return asyncio.run(run())


def fake(name: str, calls: Calls, failures: int = 0, parts: tuple[Any, ...] = ()) -> Any:
    """Return a model that loses its replica some times, after `parts`, and then answers with its name."""
    left = [failures]

    async def respond(key: str | None, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[Any, None]:
        calls.append((name, key))
        if left[0]:
            left[0] -= 1
            for part in parts:
                yield part
            raise ReplicaLost("killed")
        yield 200, [(b"content-type", b"application/json")]
        lists = {"/v1/models": {"object": "list", "data": [{"id": name}]}, "/api/tags": {"models": [{"name": name}]}}
        yield json.dumps(lists.get(scope["path"], {"name": name})).encode()

    return respond


def test_answers_are_those_of_the_server() -> None:
    """The same application answers: text, streams, images, errors."""
    body = asked([image_part(image_url()), text_part("read")], model="tiny-vl", max_tokens=8, temperature=0)
    requests = [
        ("POST", CHAT, {"json": body}),
        ("POST", CHAT, {"json": body | {"stream": True}}),
        ("POST", "/v1/completions", {"json": {"prompt": "The sky is", "max_tokens": 8, "temperature": 0}}),
        ("POST", CHAT, {"json": body | {"model": "other"}}),
        ("POST", CHAT, {"json": body | {"max_tokens": -1}}),
        ("POST", CHAT, {"content": b"{", "headers": {"Content-Type": "application/json"}}),
        ("POST", "/v1/messages", {"json": asked("a", model="tiny-vl", max_tokens=-1)}),
        ("GET", "/v1/models", {}),
        ("GET", "/v1/models/tiny-vl", {}),
        ("GET", "/nothing", {}),
    ]
    replica = Replica(str(TINY), {**ENGINE, "served_model_name": "tiny-vl"})
    try:
        found = call({"tiny-vl": replica.respond}, *requests)
    finally:
        replica.close()

    async def direct() -> list[httpx.Response]:
        server = make_server(TINY, "tiny-vl", **ENGINE)
        transport = httpx.ASGITransport(make_app(server.services))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=240) as client:
            answers = [await client.request(method, path, **arguments) for method, path, arguments in requests]
        server.engine.close()
        return answers

    expected = asyncio.run(direct())
    assert [answer.status_code for answer in found] == [200, 200, 200, 404, 400, 400, 400, 200, 200, 404]
    assert [_stable(answer) for answer in found] == [_stable(answer) for answer in expected]


def _stable(response: httpx.Response) -> Any:
    """Return a response without ids and times, and without the places at which a stream is cut."""
    if response.headers["content-type"].startswith("text/event-stream"):
        *lines, last = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        return last, "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)
    changing = r'"(id|request_id|system_fingerprint)":"[^"]*"|"created":[0-9]+'
    return response.status_code, re.sub(changing, "", response.text)


def test_a_request_goes_to_the_model_that_it_names() -> None:
    calls: Calls = []
    one, two = fake("one", calls), fake("two", calls)
    models = {"one": one, "uno": one, "two": two}
    form = {"files": {"file": ("a.wav", b"RIFF")}, "data": {"model": "two"}}
    names = [({"json": asked("a", model=name)}) for name in ("two", "uno", "one")]
    requests = [*(("POST", CHAT, arguments) for arguments in names), ("POST", CHAT, {"json": asked("a")})]
    answers = call(models, *requests, ("POST", "/v1/audio/transcriptions", form), ("GET", "/v1/models/two", {}))
    assert [answer.json()["name"] for answer in answers] == ["two", "one", "one", "one", "two", "two"]
    assert calls[0][1] == calls[1][1] == routing_key(asked("a"))
    unknown, listed, metrics = call(
        models, ("POST", CHAT, {"json": asked("a", model="three")}), ("GET", "/v1/models", {}), ("GET", "/metrics", {})
    )
    assert error(unknown, 404)["code"] == "model_not_found"
    assert [card["id"] for card in listed.json()["data"]] == ["one", "two"]
    assert error(metrics, 404)["code"] == "not_found"
    tags, latest, voices = call(
        models,
        ("GET", "/api/tags", {}),
        ("POST", "/api/chat", {"json": asked("a", model="two:latest")}),
        ("GET", "/v1/audio/voices", {"params": {"model": "two"}}),
    )
    assert [card["name"] for card in tags.json()["models"]] == ["one", "two"]
    assert latest.json()["name"] == voices.json()["name"] == "two"


def test_keys_and_sizes_are_checked_before_a_replica_is_asked() -> None:
    calls: Calls = []
    models = {"one": fake("one", calls)}
    request = ("POST", CHAT, {"json": asked("a" * 200)})
    (answer,) = call(models, request, api_key="secret")
    assert error(answer, 401)["code"] == "invalid_api_key"
    (answer,) = call(models, request, max_body_bytes=100)
    assert error(answer, 413)["code"] == "body_too_large"
    assert not calls
    open_paths = [call(models, ("GET", path, {}), api_key="secret")[0] for path in ("/health", "/ready", "/ping")]
    assert [answer.status_code for answer in open_paths] == [200, 200, 200]


def test_pages_of_allowed_origins_learn_what_a_key_is_for() -> None:
    """A preflight request has no key, and its answer comes from the ingress; so does the one about a missing key."""
    calls: Calls = []
    page = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    options = {"api_key": "secret", "allowed_origins": "https://app.example"}
    preflight, refused = call(
        {"one": fake("one", calls)}, ("OPTIONS", CHAT, {"headers": page}), ("POST", CHAT, {"headers": page}), **options
    )
    assert preflight.status_code == 200
    assert error(refused, 401)["code"] == "invalid_api_key"
    assert {answer.headers["access-control-allow-origin"] for answer in (preflight, refused)} == {"https://app.example"}
    assert not calls


def test_a_request_whose_replica_ends_is_sent_again_unless_it_was_answered() -> None:
    calls: Calls = []
    request = ("POST", CHAT, {"json": asked("a")})
    (answer,) = call({"one": fake("one", calls, failures=2)}, request)
    assert answer.json() == {"name": "one"}
    assert len(calls) == 3
    (answer,) = call({"one": fake("one", calls, failures=3)}, request)
    assert error(answer, 503)["code"] == "engine_dead"
    start = 200, [(b"content-type", b"text/event-stream; charset=utf-8")]
    (answer,) = call({"one": fake("one", calls, failures=1, parts=(start, b'data: {"a": 1}\n\n'))}, request)
    assert len(calls) == 7
    *_, last = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert last["error"]["code"] == "engine_dead"
    (answer,) = call({"one": fake("one", calls, failures=1)}, ("GET", "/v1/models", {}))
    assert error(answer, 503)["code"] == "engine_dead"


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"models": 7}, "models"),
        ({"models": []}, "models"),
        ({"models": [{"path": "a", "preload": True}]}, "models[0]"),
        ({"models": [{"path": "a"}, {"path": "a"}]}, "models"),
        ({"models": "a", "replicas": 0}, "models[0].replicas"),
        ({"models": "a", "replicas": (2, 1)}, "models[0].replicas"),
        ({"models": [{"path": "a", "num_gpus": -1}]}, "models[0].num_gpus"),
        ({"models": "a", "ingress_replicas": True}, "ingress_replicas"),
        ({"models": "a", "server_options": {"data_dir": "/x"}}, "data_dir"),
        ({"models": "a", "server_options": {"port": 8000}}, "port"),
        ({"models": "a", "engine_options": {"max_num_sequences": 1}}, "max_num_sequences"),
        ({"models": "a", "engine_options": {"max_num_seqs": "many"}}, "max_num_seqs"),
        ({"models": "a", "engine_options": {"media": {"max_image_pixel": 1}}}, "media"),
        ({"models": "a", "engine_options": {"port": 8000}}, "port"),
        ({"models": "a", "engine_options": {"max_requests": 8}}, "max_requests"),
        ({"models": "a", "engine_options": ["max_num_seqs"]}, "engine_options"),
        ({"models": [{"path": "a"}, {"path": "b", "options": {"max_num_sequences": 1}}]}, "max_num_sequences"),
        ({"models": [{"path": "a"}, {"path": "b", "options": {"dtype": "float17"}}]}, "dtype"),
        ({"models": [{"path": "a", "options": {"data_dir": "/x"}}]}, "data_dir"),
        ({"models": "a", "server_options": {"max_requests": 0}}, "max_requests"),
        ({"model": "a"}, "model"),
        ({}, "models"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_anything_runs(
    arguments: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sensorium.server.ray_serve.app._check_packages", lambda: None)
    with pytest.raises(ConfigError) as raised:
        sensorium.ray.build_app(arguments)
    assert raised.value.info.param == param


def test_options_that_only_the_nodes_can_honour_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that builds the application may have neither the GPU nor the folder of the nodes."""
    monkeypatch.setattr("sensorium.server.ray_serve.app._check_packages", lambda: None)
    monkeypatch.setattr("sensorium.server.ray_serve.app._bind", lambda *_: "bound")
    media = {"allowed_local_media_path": "/no/such/folder"}
    engine = {"device": "cuda:7", "media": media, "chat_template": "{{ 1 }}"}
    models = [{"path": "a", "options": {"tool_call_parser": "hermes"}}]
    assert sensorium.ray.serve_app(models, engine_options=engine) == "bound"


Message = MutableMapping[str, Any]


async def sent_until_it_waits(counts: list[int], block: int) -> AsyncGenerator[Any, None]:
    """Return the response of an application that sends 16 blocks and counts them; its start is read."""

    async def app(scope: Message, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(16):
            await send({"type": "http.response.body", "body": bytes(block), "more_body": number < 15})
            counts[0] += 1

    response = run_app(app, {"type": "http"}, b"")
    assert isinstance(await anext(response), Start)
    for _ in range(100):
        await asyncio.sleep(0)
    return response


def test_a_response_that_is_not_read_stops_its_application() -> None:
    async def run() -> None:
        counts, block = [0], MAX_UNREAD_BYTES // 4
        response = await sent_until_it_waits(counts, block)
        assert counts == [3]  # the fourth fills the limit
        assert len(await anext(response)) == block
        for _ in range(100):
            await asyncio.sleep(0)
        assert counts == [4]
        assert [len(part) async for part in response] == [block] * 15
        assert counts == [16]

    asyncio.run(run())


def test_a_reader_that_leaves_ends_an_application_that_waits_for_it() -> None:
    """Also one that still sends an error when it is cancelled."""

    async def run() -> None:
        errors: list[str] = []

        async def app(scope: Message, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            try:
                while True:
                    await send({"type": "http.response.body", "body": bytes(MAX_UNREAD_BYTES), "more_body": True})
            except asyncio.CancelledError:
                await send({"type": "http.response.body", "body": bytes(MAX_UNREAD_BYTES), "more_body": False})
                errors.append("sent")
                raise

        response = run_app(app, {"type": "http"}, b"")
        assert isinstance(await anext(response), Start)
        assert len(await anext(response)) == MAX_UNREAD_BYTES
        await asyncio.wait_for(response.aclose(), 60)
        assert errors == ["sent"]

    asyncio.run(run())


def needs_ray(test: Any) -> Any:
    """Skip a test where Ray is not installed. Ray leaves sockets open, which are closed with its objects."""
    test = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")(test)
    return pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")(test)


@pytest.fixture(scope="module")
def served() -> Iterator[httpx.Client]:
    """Serve a model with two replicas, and another one with one, on a local Ray of two cores; the ingress takes one."""
    import ray
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    try:
        serve.start(http_options={"port": port})
        models = [
            {"name": "tiny-vl", "path": str(TINY), "options": {"max_model_len": 512}, "replicas": 2, "num_cpus": 0.4},
            {"name": "tiny-asr", "path": str(TINY.parent / "tiny-asr"), "num_cpus": 0.2},
        ]
        engine = {"max_num_seqs": 4, "warm_up": False, "engine_standby": False}
        app = sensorium.ray.serve_app(models, engine_options=engine, server_options={"drain_seconds": 30})
        serve.run(app, route_prefix="/llm")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/llm", timeout=240) as client:
            yield client
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(client: httpx.Client, text: str, **fields: Any) -> dict[str, Any]:
    body = asked(text, **({"model": "tiny-vl", "temperature": 0, "max_tokens": 4, "ignore_eos": True} | fields))
    response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@needs_ray
def test_ray_sends_equal_beginnings_to_the_same_replica(served: httpx.Client) -> None:
    """Each of eight prompts is in the cache of the replica that gets it again."""
    assert served.get("/ready").status_code == 200
    assert [card["id"] for card in served.get("/v1/models").json()["data"]] == ["tiny-vl", "tiny-asr"]
    texts = [f"{number} " + "words of a long prompt " * 12 for number in range(8)]
    first = [ask(served, text) for text in texts]
    again = [ask(served, text) for text in texts]
    assert [answer["choices"] for answer in first] == [answer["choices"] for answer in again]
    cached = [[answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] for answers in (first, again)]
    assert all(before < after for before, after in zip(*cached, strict=True))


@needs_ray
def test_ray_streams_and_other_models_answer(served: httpx.Client) -> None:
    plain = ask(served, "The sky is", max_tokens=12)["choices"][0]["message"]["content"]
    body = asked("The sky is", model="tiny-vl", temperature=0, max_tokens=12, ignore_eos=True, stream=True)
    with served.stream("POST", CHAT, json=body) as response:
        lines = [line[6:] for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1]) == plain
    sound = io.BytesIO()
    soundfile.write(sound, np.zeros(16000, np.float32), 16000, format="WAV")
    form = {"files": {"file": ("a.wav", sound.getvalue())}, "data": {"model": "tiny-asr"}}
    response = served.post("/v1/audio/transcriptions", **form)
    assert response.status_code == 200, response.text
    assert "text" in response.json()
    assert error(served.post(CHAT, json=asked("a", model="none")), 404)["code"] == "model_not_found"


def stream(client: httpx.Client, text: str, lines: list[str]) -> None:
    """Append the lines of a long answer."""
    body = asked(text, model="tiny-vl", temperature=0, max_tokens=400, ignore_eos=True, stream=True)
    with client.stream("POST", CHAT, json=body, timeout=240) as response:
        lines += (line[6:] for line in response.iter_lines() if line)


def replicas(name: str) -> list[int]:
    """Return the process ids of a deployment's replicas, as Ray names them."""
    title = f"ray::ServeReplica:default:{name}".encode()
    files = Path("/proc").glob("[0-9]*/cmdline")
    return [int(file.parent.name) for file in files if _read(file).startswith(title)]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has ended
        return b""


@needs_ray
def test_ray_replaces_a_replica_that_is_killed_and_its_stream_ends_with_an_error(served: httpx.Client) -> None:
    before = ask(served, "The sky is")["choices"]
    lines: list[str] = []
    thread = threading.Thread(target=stream, args=(served, "The sky is", lines))
    pids = replicas("0-tiny-vl")
    assert len(pids) == 2
    thread.start()
    wait_until(lambda: lines)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    thread.join()
    assert json.loads(lines[-1])["error"]["code"] == "engine_dead"
    wait_until(lambda: len({*replicas("0-tiny-vl")} - {*pids}) == 2 and served.get("/ready").status_code == 200)
    assert ask(served, "The sky is")["choices"] == before


@needs_ray
def test_ray_lets_requests_in_progress_finish_when_the_application_is_deleted(served: httpx.Client) -> None:
    from ray import serve

    lines: list[str] = []
    thread = threading.Thread(target=stream, args=(served, "The sea is", lines))
    thread.start()
    wait_until(lambda: lines)
    serve.delete("default")
    thread.join()
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
