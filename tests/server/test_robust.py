"""Silent connections, clients that leave, large bodies and a full engine."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import logging
import resource
import socket
import threading
from contextlib import suppress
from urllib.parse import urlparse

import httpx
import pytest
from fastapi.responses import Response, StreamingResponse
from http_server import listening
from PIL import Image
from sensorium.engine.frontend.input_processor import InputProcessor, ParsedPrompt
from sensorium.engine.worker.encoder_runner import EncoderRunner
from sensorium.engine.worker.model_runner import ModelRunner
from sensorium.server import app as app_module
from sensorium.server import large_json
from sensorium.server.config import ServerConfig
from sensorium.server.connections import connection_class
from sensorium.server.guard import _Body
from sensorium.server.listeners import bind
from sensorium.server.logs import FIELDS
from sensorium.server.state import Server
from waiting import LONG, assert_idle, wait_until

CHAT = "/v1/chat/completions"


def listen(tiny, **options):
    engine = tiny[1].llm
    return listening(Server(engine, ServerConfig(**options), "tiny-vl"))


def connect(url):
    where = urlparse(url)
    return socket.create_connection((where.hostname, where.port), timeout=LONG)


def is_ended(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # closed while it had unread bytes
        return True


def request(**body):
    content = json.dumps({"messages": [{"role": "user", "content": "a"}], **body}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def picture():
    data = io.BytesIO()
    Image.new("RGB", (64, 64), (1, 2, 3)).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a"}]}]


def test_silent_connections_are_closed(tiny):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if 0 < hard < 4096 else max(soft, 4096), hard))
    with listen(tiny, header_seconds=0.2) as url:
        silent = [connect(url) for _ in range(500)]
        for number, one in enumerate(silent):
            with suppress(OSError):  # it is closed already
                one.sendall(b"POST / HTTP/1.1\r\nX: "[: number % 20])
        assert httpx.get(f"{url}/health", timeout=LONG).status_code == 200
        assert all(map(is_ended, silent))
        for one in silent:
            one.close()


def test_the_number_of_connections_is_limited(tiny):
    with listen(tiny, max_connections=100, header_seconds=1000) as url:
        silent = [connect(url) for _ in range(100)]
        with connect(url) as refused:
            answer = b""
            while part := refused.recv(1000):
                answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head.lower()
        assert json.loads(body)["error"]["code"] == "overloaded"
        for one in silent:
            one.close()

        def served():
            try:
                return httpx.get(f"{url}/health", timeout=LONG).status_code == 200
            except httpx.TransportError:  # closed while the request was sent
                return False

        wait_until(served)


HANDSHAKE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


@pytest.mark.parametrize(
    ("start", "changes", "status", "code"),
    [
        ("GARBAGE", {}, 400, "invalid_http"),
        ("GET / HTTP/1.1", {"Content-Length": "-5"}, 400, "invalid_http"),
        ("GET /v1/realtime HTTP/1.1", {**HANDSHAKE, "Sec-WebSocket-Key": "x"}, 400, "invalid_http"),
        ("GET /v1/realtime HTTP/1.1", {**HANDSHAKE, "Sec-WebSocket-Version": "12"}, 400, "invalid_http"),
        ("GET /v1/realtime HTTP/1.1", {**HANDSHAKE, "Sec-WebSocket-Protocol": "a,,;"}, 400, "invalid_http"),
        ("GET /v1/realtime HTTP/1.1", {"Connection": "Upgrade", "Upgrade": "websocket"}, 400, "invalid_http"),
        ("POST /v1/realtime HTTP/1.1", {**HANDSHAKE, "Content-Length": "0"}, 400, "invalid_http"),
        ("GET /v1/chat/completions HTTP/1.1", HANDSHAKE, 404, "not_found"),
        ("GET /v1/realtime HTTP/1.1", HANDSHAKE, 400, "invalid_config"),
    ],
)
def test_what_is_no_request_gets_an_error_object(tiny, start, changes, status, code):
    lines = [start, *(f"{name}: {value}" for name, value in {"Host": "localhost", **changes}.items())]
    malformed = []
    http = connection_class(ServerConfig(), lambda: malformed.append(1))
    with listening(tiny[1], http) as url, connect(url) as connection, connection.makefile("rb") as stream:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        head, _, body = stream.read().partition(b"\r\n\r\n")  # until the connection is closed
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"content-type: application/json" in head.lower()
    assert json.loads(body)["error"]["code"] == code
    assert len(malformed) == (code == "invalid_http")


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_reads_nothing_is_disconnected_without_a_traceback(tiny, monkeypatch, caplog, streams):
    size, closed = 64 << 20, threading.Event()

    async def pieces():
        try:
            for _ in range(size >> 16):
                yield bytes(1 << 16)
        finally:
            closed.set()

    async def large():
        return StreamingResponse(pieces()) if streams else Response(bytes(size))

    monkeypatch.setitem(app_module._GET, "/version", large)
    with caplog.at_level(logging.INFO), listen(tiny, send_seconds=0.05) as url, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((urlparse(url).hostname, urlparse(url).port))
        client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: any(record.message == "request" for record in caplog.records))
        wait_until(lambda: closed.is_set() == streams)
    (record,) = [record for record in caplog.records if record.message == "request"]
    assert getattr(record, FIELDS)["outcome"] == "disconnected"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_header_after_a_response_has_a_limit_too(tiny):
    with listen(tiny, header_seconds=0.2) as url, connect(url) as one:
        one.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\nGET /ver")
        answer = b""
        while part := one.recv(1000):
            answer += part
        assert answer.count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize("rest", [b"x", b"x" * 10 + b"GET /ver"])
def test_a_response_before_the_body_does_not_end_the_limit(tiny, rest):
    with listen(tiny, header_seconds=0.2) as url, connect(url) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        while not one.recv(1000).endswith(b"}"):
            pass
        one.sendall(rest)
        assert is_ended(one)


@pytest.mark.parametrize("stage", ["body", "parsing", "queued", "decoding", "encoding", "prefill", "decode"])
def test_a_client_that_leaves_is_not_served_further(tiny, monkeypatch, stage):
    statuses, reached, go_on = list[int](), threading.Event(), threading.Event()

    async def recorded(*args, on_error=app_module.on_error):
        response = await on_error(*args)
        statuses.append(response.status_code)
        return response

    def hold(owner, name, after=0):
        work, calls = getattr(owner, name), itertools.count()

        def held(*args, **options):
            if next(calls) >= after:
                reached.set()
                go_on.wait(LONG)
            return work(*args, **options)

        monkeypatch.setattr(owner, name, held)

    async def receive(body, work=_Body.receive):
        reached.set()
        return await work(body)

    monkeypatch.setattr(app_module, "on_error", recorded)
    core = tiny[1].engine.loop.core
    whole, used = request(messages=picture(), max_tokens=500, ignore_eos=True), 1.0
    tiny[1].llm.llm.reset_mm_cache()
    if stage == "body":
        monkeypatch.setattr(_Body, "receive", receive)
        used = 0.5
    elif stage == "decoding":
        hold(ParsedPrompt, "finish")
    elif stage == "encoding":
        hold(EncoderRunner, "_embed")
    elif stage == "parsing":
        hold(InputProcessor, "parse_chat")
    else:
        whole = request(max_tokens=500, ignore_eos=True)
        if stage == "queued":  # in the scheduler, before the first step
            hold(core, "step")
        else:
            hold(ModelRunner, "_forward", after=3 if stage == "decode" else 0)
    with listen(tiny) as url:
        with connect(url) as client:
            client.sendall(whole[: int(len(whole) * used)])
            assert reached.wait(LONG)
        wait_until(lambda: statuses)
        go_on.set()
        assert statuses == [499]
        wait_until(lambda: not tiny[1].engine.loop._names)
    monkeypatch.undo()
    assert_idle(tiny[1].llm)


def test_a_full_engine_refuses_requests(tiny, http):
    budget = tiny[1].engine.inputs.media.budget
    ledger = budget.open()
    ledger.hold(budget.policy.max_total_bytes)
    try:
        response = http.post(CHAT, json={"messages": [{"role": "user", "content": "a"}]})
        assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
        assert response.json()["error"]["code"] == "overloaded"
        assert "max_total_bytes" in response.json()["error"]["message"]
        assert http.get("/health").status_code == 200
    finally:
        ledger.close()
    assert http.post(CHAT, json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"])
def test_a_body_that_is_not_json_is_refused(http, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    response = http.post(CHAT, content=b'{"messages": []}', headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "nested too deeply; send lists and objects of fewer levels",
        ),
        (b'{"messages": "\xff"}', "the body is not JSON: byte 14 is not valid UTF-8; encode it as UTF-8"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "an integer of too many digits"),
        (b'{"messages": [}', "the body is not JSON: Expecting value at character 14"),
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_json_that_cannot_be_parsed(http, monkeypatch, body, said, large):
    monkeypatch.setattr(large_json, "LARGE", 0 if large else large_json.LARGE)
    response = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_input")
    assert said in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [{"data": {"file": "a.wav"}}, {"data": {"model": "a"}, "files": {"x": b""}}, {"files": {"file": (None, "a.wav")}}]
)
def test_forms_without_a_file(http, body):
    response = http.post("/v1/audio/transcriptions", **body)
    refused = response.json()["error"]
    assert (response.status_code, refused["param"]) == (400, "file")
    assert refused["message"].startswith("file is missing")


def test_a_broken_form_is_named_in_the_answer_only(http, caplog):
    response = http.post(
        "/v1/audio/transcriptions", content=b"--x\r\n\r\nb", headers={"Content-Type": "multipart/form-data; boundary=y"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_input")
    assert "the body is not a form that can be read (Invalid multipart data); " in response.json()["error"]["message"]
    assert any(isinstance(one, logging.NullHandler) for one in logging.getLogger("python_multipart").handlers)


def test_a_large_body_is_parsed_in_a_thread(http, monkeypatch):
    threads = []

    def recorded(body, loads=large_json.loads):
        threads.append(threading.current_thread().name)
        return loads(body)

    monkeypatch.setattr(large_json, "loads", recorded)
    text = "é" * (1 << 20)
    response = http.post(CHAT, json={"messages": [{"role": "user", "content": text}]})
    assert response.status_code == 400  # longer than the context
    assert http.post(CHAT, content=b" " * (2 << 20), headers={"Content-Type": "application/json"}).status_code == 400
    assert len(threads) == 2
    assert all("asyncio" in name for name in threads)


LARGE = "x" * (3 << 20)
VALUES = [
    {}, [], 1, -0.0, 1e400, 2**70, None, True, "",
    "é\ud800\U0001f600", {"a": {"b": [1, "\"\\\n", [None, "\u2028"]]}, "": LARGE},
    [LARGE, LARGE + '"', "\\" + LARGE, LARGE + "\x7f"], {"a": [LARGE[: 1 << 20], LARGE[:-1] + "é"]},
]  # fmt: skip
BROKEN = [
    "",
    " ",
    "{",
    "[1,]",
    '"',
    f'"{LARGE}',
    f'"{LARGE}\n"',
    f'"{LARGE}\\x"',
    '{"a" 1}',
    "nul",
    "[1] 2",
    '{"a":1,}',
]


@pytest.mark.parametrize("ascii", [True, False])
def test_large_json_is_parsed_like_other_json(ascii):
    for value in VALUES:
        text = json.dumps(value, ensure_ascii=ascii, indent=1).encode("utf-8", "surrogatepass")
        assert large_json.loads(text) == json.loads(text) == value
    for text in BROKEN:
        with pytest.raises(json.JSONDecodeError) as expected:
            json.loads(text.encode())
        with pytest.raises(json.JSONDecodeError) as found:
            large_json.loads(text.encode())
        assert (found.value.msg, found.value.pos) == (expected.value.msg, expected.value.pos)
    with pytest.raises(UnicodeDecodeError):
        large_json.loads(b'"\xff"')
    with pytest.raises(RecursionError):
        large_json.loads(b"[" * 100_000)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_send_small_segments_at_once(host):
    """Without TCP_NODELAY, the body of a response waits about 40 ms until the client has acknowledged the header."""

    async def accepted() -> int:
        delay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            delay.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind(ServerConfig(host=host, port=0))
        async with await asyncio.start_server(connected, sock=listener):
            _, writer = await asyncio.open_connection(host, listener.getsockname()[1])
            found = await delay
            writer.close()
        return found

    assert asyncio.run(accepted())
