"""Lifecycle and guard of the server: status endpoints, keys, limits of bodies, errors, SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.request
from urllib.parse import urlparse

import httpx
import pytest
from fastapi import FastAPI, Request
from http_server import TINY, listening, make_server
from pydantic import ValidationError
from sensorium.callers.errors import ConfigError, ErrorInfo, InputError
from sensorium.engine.config import EngineConfig
from sensorium.server.app import make_app
from sensorium.server.config import ServerConfig, environment_options, read_config, split_options
from sensorium.server.errors import error_response, on_error
from sensorium.server.guard import CONNECTION, Guard
from sensorium.server.protocol.chat import ChatBody
from sensorium.server.protocol.completions import CompletionBody
from sensorium.server.protocol.tokens import DetokenizeBody
from sensorium.server.run import serve
from sensorium.server.state import Server, unless_disconnected
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect


def error(response):
    found = response.json()["error"]
    assert {"message", "type", "param", "code"} <= found.keys()
    assert "\n" not in found["message"]
    assert "Traceback" not in response.text
    return found


def ask(app, method="GET", path="/", **options):
    """Send one request to an application without a network."""

    async def send():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def test_status(http):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").status_code == 200
    assert set(http.get("/version").json()) == {"version"}
    (card,) = http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny-vl", "model", 1024)
    assert http.get("/v1/models/tiny-vl").json() == card
    assert error(http.get("/v1/models/other"))["code"] == "model_not_found"
    assert "sensorium_steps_total" in http.get("/metrics").text


def test_the_openai_package_lists_models(client):
    assert [model.id for model in client.models.list()] == ["tiny-vl"]


def test_the_document_has_the_fields_of_each_body(http):
    document = http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/embeddings", "/metrics"} <= set(document["paths"])
    assert {"messages", "tools", "top_logprobs"} <= set(document["components"]["schemas"]["ChatBody"]["properties"])


def test_wrong_paths_and_methods(http):
    assert (http.get("/nothing").status_code, error(http.get("/nothing"))["code"]) == (404, "not_found")
    assert (http.post("/health").status_code, error(http.post("/health"))["code"]) == (405, "method_not_allowed")


def test_a_sleeping_or_closed_engine_is_not_ready():
    server = make_server(TINY, "tiny-vl", max_model_len=256, warm_up=False)
    app = make_app(server.services)
    server.llm.llm.sleep()
    assert ask(app, path="/health").status_code == 200
    ready = ask(app, path="/ready")
    assert (ready.status_code, error(ready)["code"]) == (503, "engine_asleep")
    server.engine.close()
    for path in ("/health", "/ready"):
        assert (ask(app, path=path).status_code, error(ask(app, path=path))["code"]) == (503, "engine_closed")


def guarded(**options):
    """Return a guarded application that answers with its body's length and the tenant of the key."""
    app = FastAPI()

    async def echo(request: Request):
        return {"bytes": len(await request.body()), "tenant": request.scope["sensorium.tenant"]}

    app.add_api_route("/echo", echo, methods=["GET", "POST", "DELETE"])
    app.add_api_route("/v1/files", echo, methods=["POST"])
    app.add_api_route("/health", echo, methods=["GET"])
    app.add_exception_handler(HTTPException, on_error)
    app.add_middleware(Guard, config=ServerConfig(**options))
    return app


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", "Basic one", "one", "Bearer onetwo", "Bearer \xff"])
def test_a_wrong_key_is_refused(given):
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    response = ask(guarded(api_key=["one", "two"]), path="/echo", headers=headers)
    assert (response.status_code, error(response)["code"]) == (401, "invalid_api_key")


def test_each_key_is_a_tenant():
    app = guarded(api_key=["one", "two"])
    tenants = [ask(app, path="/echo", headers={"Authorization": f"Bearer {key}"}).json()["tenant"] for key in ("one", "two")]
    assert None not in tenants
    assert tenants[0] != tenants[1]
    assert not any("one" in tenant or "two" in tenant for tenant in tenants)
    assert ask(app, path="/health").json()["tenant"] is None
    assert ask(guarded(), path="/echo").json()["tenant"] is None


def test_a_body_that_is_too_large_is_refused():
    app = guarded(max_body_bytes=10)
    assert ask(app, "POST", "/echo", content=b"x" * 10).json()["bytes"] == 10
    assert error(ask(app, "POST", "/echo", content=b"x" * 11))["code"] == "body_too_large"

    async def chunks():
        for _ in range(3):
            yield b"1234"

    response = ask(app, "POST", "/echo", content=chunks())  # without a length
    assert response.status_code == 413
    for length in (b"x", b"-1", b"9" * 30):
        assert ask(app, "POST", "/echo", content=b"", headers={"Content-Length": length}).status_code == 413


def test_a_slow_body_is_refused():
    async def never():
        await asyncio.Event().wait()
        yield b""

    assert ask(guarded(body_seconds=0.01), "POST", "/echo", content=never()).status_code == 408


def test_too_many_requests_are_refused():
    async def run():
        started, go_on = asyncio.Event(), asyncio.Event()

        async def inner(scope, receive, send):
            started.set()
            await go_on.wait()
            await error_response(ErrorInfo("internal", "x"))(scope, receive, send)

        transport = httpx.ASGITransport(Guard(inner, ServerConfig(max_requests=1)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            first = asyncio.ensure_future(client.post("/"))
            await started.wait()
            second = await client.post("/")
            go_on.set()
            return await first, second, await client.post("/")

    first, second, third = asyncio.run(run())
    assert (first.status_code, second.status_code, third.status_code) == (500, 429, 500)
    assert second.headers["Retry-After"] == "1"
    assert error(second)["code"] == "overloaded"


@pytest.mark.parametrize("path", ["/v1/responses/resp_1/cancel", "/v1/batches/batch_1/cancel"])
def test_a_full_server_takes_requests_that_cancel(path):
    async def inner(scope, receive, send):
        await error_response(ErrorInfo("internal", "x"))(scope, receive, send)

    guard = Guard(inner, ServerConfig(max_requests=1), is_full=lambda: True)
    guard._in_progress = 1
    assert ask(guard, "POST", path).status_code == 500
    assert ask(guard, "POST", "/v1/responses").status_code == 429
    assert guard._in_progress == 1


def test_the_work_of_a_client_that_left_is_cancelled():
    async def run():
        cancelled = asyncio.Event()

        async def work():
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async def receive():
            return {"type": "http.disconnect"}

        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        with pytest.raises(ClientDisconnect) as found:
            await unless_disconnected(request, work())
        assert cancelled.is_set()
        return found.value

    assert error_response(asyncio.run(run())).status_code == 499


def test_errors_are_openais_objects():
    item = InputError("a\nb", param="max_tokens").info.for_item("image", 2)
    response = error_response(item)
    assert response.status_code == 400
    assert json.loads(response.body)["error"] == {
        "message": "image 2: a b",
        "type": "invalid_request_error",
        "param": "max_tokens",
        "code": "invalid_input",
        "modality": "image",
        "index": 2,
    }
    wrong = error_response(HTTPException(415, "x"))
    assert json.loads(wrong.body)["error"]["code"] == "unsupported_media_type"
    hidden = error_response(RuntimeError("secret /path"))
    assert hidden.status_code == 500
    assert b"secret" not in hidden.body
    assert json.loads(hidden.body)["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", ""), ("port", -1), ("port", 65536), ("port", True), ("max_body_bytes", 0), ("max_requests", 1.5),
        ("body_seconds", 0), ("drain_seconds", float("inf")), ("api_key", [""]), ("api_key", [1]), ("tls_cert", "x"),
        ("served_model_name", 3),
    ],
)  # fmt: skip
def test_wrong_options(name, value):
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: value})


def test_the_file_of_options(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("port: 1\nmax-model-len: 32k\nmedia:\n  max_jpeg_scans: 3\n")
    config, engine = split_options(read_config(path))
    assert config.port == 1
    media = {"decode_isolation": "process", "max_jpeg_scans": 3}
    assert engine == {"max_model_len": "32k", "media": media, "engine_process": True, "engine_standby": True}
    assert split_options({"engine_process": False})[1]["engine_process"] is False
    for text in ("- a", "{", "1: 2", "\x00"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="--config"):
            read_config(path)
    with pytest.raises(ConfigError, match="--config"):
        read_config(tmp_path / "none.yaml")
    assert split_options({"chat_template": "x", "metrics": True, "tracing": None})[1]["chat_template"] == "x"
    for name, meant in (("prot", "port"), ("max_model_length", "max_model_len")):
        with pytest.raises(ConfigError, match=rf"unknown option '{name}'; did you mean {meant}\?"):
            split_options({name: 80})


def test_sigterm_ends_the_command_after_the_last_response(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("max_model_len: 256\nengine_process: false\nserved_model_name: small\n")
    words = [sys.executable, "-m", "sensorium", "serve", str(TINY), "--config", str(path), "--port", "0", "--no-such"]
    wrong = subprocess.run(words, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    with subprocess.Popen(words[:-1], stderr=subprocess.PIPE, text=True) as run:
        line = run.stderr.readline()
        assert line.startswith("small is served on http://127.0.0.1:"), line
        url = line.split()[-1]
        with urllib.request.urlopen(f"{url}/ready") as answer:
            assert answer.status == 200
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=240) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            run.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert run.wait() == 0
        stopping, line = run.stderr.read().splitlines()  # the second is the access log's; /ready has none at the level info
        assert stopping.startswith("stopping")
        assert "path=/v1/chat/completions status=200 outcome=ok" in line
    with socket.socket() as probe:
        assert probe.connect_ex((urlparse(url).hostname, urlparse(url).port)) != 0


def test_a_port_in_use_is_found_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["serve", "/none", "--port", str(taken.getsockname()[1])]
        run = subprocess.run([sys.executable, "-m", "sensorium", *words], capture_output=True, text=True, env=os.environ)
    assert run.returncode == 2
    assert "cannot be used" in run.stderr


def test_two_servers_have_their_own_metrics(tiny):
    other = make_server(tiny[1].llm.llm, "other")
    with listening(other) as url:
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "other"


def test_a_body_of_too_many_values_is_refused():
    response = ask(guarded(), "POST", "/echo", content=b"[" + b"[]," * (1 << 20) + b"0]")
    assert (response.status_code, error(response)["code"]) == (413, "body_too_large")
    assert ask(guarded(), "POST", "/echo", content=b"A" * (4 << 20)).status_code == 200


def test_the_limit_on_values_does_not_depend_on_headers():
    types = [("Content-Type", "application/json"), ("Content-Type", "multipart/form-data; boundary=a")]
    for headers in (types, types[::-1]):
        response = ask(guarded(), "POST", "/echo", content=b"," * (1 << 20) + b",", headers=headers)
        assert (response.status_code, error(response)["code"]) == (413, "body_too_large")
    assert ask(guarded(), "POST", "/v1/files", content=b"," * (1 << 20) + b",").json()["bytes"] > 1 << 20


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:8000", "null", "http://[", ""])
@pytest.mark.parametrize("options", [{}, {"api_key": "one"}])
def test_pages_of_other_origins_cannot_write(origin, options):
    headers = {"Authorization": "Bearer one", "Origin": origin}
    for method, status in ("POST", 403), ("DELETE", 403), ("GET", 200):
        response = ask(guarded(**options), method, "/echo", headers=headers)
        assert response.status_code == status
        assert status == 200 or error(response)["code"] == "wrong_origin"
    assert ask(guarded(**options), "POST", "/echo", headers={**headers, "Origin": "http://localhost"}).status_code == 200


def test_pages_of_allowed_origins(tiny):
    page = "https://app.example"
    for config in ServerConfig(allowed_origins=page), ServerConfig(allowed_origins=[page, "http://b"], api_key="one"):
        app = make_app(make_server(tiny[1].llm.llm, "tiny-vl", config).services)
        asks = {"Origin": page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        allowed = ask(app, "OPTIONS", "/tokenize", headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == page
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        headers = {"Origin": page, "Authorization": "Bearer one"}
        found = ask(app, "POST", "/tokenize", json={"prompt": "a"}, headers=headers)
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, page)
        other = ask(app, "POST", "/tokenize", json={"prompt": "a"}, headers={**headers, "Origin": "https://app.example.evil"})
        assert (other.status_code, error(other)["code"]) == (403, "wrong_origin")
        assert "access-control-allow-origin" not in other.headers
    refused = ask(app, "POST", "/tokenize", json={"prompt": "a"}, headers={"Origin": page})
    assert (refused.status_code, error(refused)["code"]) == (401, "invalid_api_key")
    assert refused.headers["access-control-allow-origin"] == page  # the page may read why
    for wrong in "*", "app.example", "https://app.example/", ["https://a", ""]:
        with pytest.raises(ConfigError, match="is no origin"):
            ServerConfig(allowed_origins=wrong)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "[", "", "127.0.0.1.evil.example", "10.0.0.1"])
def test_names_of_other_machines_are_refused_without_keys(host):
    headers = {"Host": host, "Origin": f"http://{host}", "Authorization": "Bearer one"}
    for method in "GET", "POST":
        response = ask(guarded(), method, "/echo", headers=headers)
        assert (response.status_code, error(response)["code"]) == (403, "wrong_host")
        assert ("no header Host" in error(response)["message"]) == (host == "")
    assert ask(guarded(), path="/health", headers=headers).status_code == 200
    for options in {"api_key": "one"}, {"host": "0.0.0.0"}:
        assert ask(guarded(**options), path="/echo", headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:80", "127.0.0.2", "[::1]:8000"])
def test_names_of_this_machine_need_no_key(host):
    assert ask(guarded(), "POST", "/echo", headers={"Host": host, "Origin": f"http://{host}"}).status_code == 200


def test_the_bodies_of_all_requests_have_a_limit():
    async def run():
        app = guarded(max_body_bytes=10, max_total_body_bytes=12)
        arrived, go_on = asyncio.Event(), asyncio.Event()

        async def slow():
            yield b"12345678"
            arrived.set()
            await go_on.wait()
            yield b"9"

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            first = asyncio.ensure_future(client.post("/echo", content=slow()))
            await arrived.wait()
            refused = await client.post("/echo", content=b"x" * 5)
            go_on.set()
            return refused, await first, await client.post("/echo", content=b"x" * 10)

    refused, first, last = asyncio.run(run())
    assert (refused.status_code, error(refused)["code"]) == (429, "overloaded")
    assert refused.headers["Retry-After"] == "1"
    assert (first.json()["bytes"], last.json()["bytes"]) == (9, 10)


def test_a_client_that_does_not_read_is_disconnected():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    guard = Guard(app, ServerConfig(send_seconds=0.01))
    with pytest.raises(TimeoutError):
        asyncio.run(guard(scope, None, send))


def test_a_refused_client_that_does_not_read_is_disconnected():
    async def send(message):
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"host", b"localhost")]}
    guard = Guard(None, ServerConfig(send_seconds=0.01, api_key="key"))
    with pytest.raises(TimeoutError):
        asyncio.run(guard(scope, None, send))


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_reads_slowly_is_not_disconnected(reads):
    class Connection:
        unsent, calls, is_closed = 3, 0, False

        async def drain(self):
            self.calls += 1
            self.unsent -= reads
            if self.unsent:
                await asyncio.Event().wait()

        def abort(self):
            self.is_closed = True

    async def app(scope, receive, send):
        await send({"type": "http.response.body", "body": b"abc"})

    async def send(message):
        pass

    connection = Connection()
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], CONNECTION: connection}
    asyncio.run(Guard(app, ServerConfig(send_seconds=0.01))(scope, None, send))
    assert (connection.is_closed, connection.calls) == ((False, 3) if reads else (True, 1))


@pytest.mark.parametrize("kind", ["completions", "chat", "tokens"])
def test_errors_of_long_lists_are_few(kind):
    many = [None] * 10_000
    body, values = {
        "completions": (CompletionBody, {"prompt": many}),
        "chat": (ChatBody, {"messages": many, "stop": many}),
        "tokens": (DetokenizeBody, {"tokens": many}),
    }[kind]
    with pytest.raises(ValidationError) as found:
        body.model_validate(values)
    assert found.value.error_count() < 10


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificate is made by openssl")
def test_https(tmp_path):
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-out", cert, "-keyout", key]
    subprocess.run(words, check=True, capture_output=True)
    words = [sys.executable, "-m", "sensorium", "serve", str(TINY), "--port", "0", "--max-model-len", "256"]
    words += ["--engine-process", "false", "--tls-cert", cert, "--tls-key", key, "--header-seconds", "2"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as run:
        try:
            line = run.stderr.readline()
            assert "https://127.0.0.1:" in line, line
            url = httpx.URL(line.split()[-1])
            with socket.create_connection((url.host, url.port), timeout=30) as silent:
                assert httpx.get(f"{url}/ready", verify=ssl.create_default_context(cafile=cert)).status_code == 200
                assert silent.recv(1) == b"", "a connection without a handshake is closed"
        finally:
            run.terminate()


@pytest.mark.parametrize("name", ["Host", "Origin", "Authorization", "x-api-key"])
def test_a_header_that_comes_twice_is_refused(name):
    response = ask(guarded(), "POST", "/echo", headers=[("Host", "localhost"), (name, "localhost"), (name, "localhost")])
    assert (response.status_code, error(response)["code"]) == (400, "duplicate_header")
    assert name.title() in error(response)["message"]


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "identity"])
def test_compressed_bodies_are_refused(encoding):
    response = ask(guarded(), "POST", "/echo", content=b"x", headers={"Content-Encoding": encoding})
    assert response.status_code == (200 if encoding == "identity" else 415)
    if encoding != "identity":
        assert error(response)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
def test_a_request_with_two_lengths_closes_its_connection(tiny, method):
    config = ServerConfig(allowed_origins="https://app.example", header_seconds=60)
    with listening(Server(tiny[1].llm, config, "tiny-vl")) as url:
        preflight = "Origin: https://app.example\r\nAccess-Control-Request-Method: POST\r\n"
        lengths = "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        sent = f"{method} /tokenize HTTP/1.1\r\nHost: localhost\r\n{preflight if method == 'OPTIONS' else ''}{lengths}"
        with socket.create_connection((urlparse(url).hostname, urlparse(url).port), timeout=60) as connection:
            connection.sendall(sent.encode() + b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with connection.makefile("rb") as stream:
                received = stream.read()  # until the connection is closed
    assert received.count(b"HTTP/1.1 ") == 1
    assert b'"version"' not in received
    assert received.startswith(b"HTTP/1.1 400" if method == "POST" else b"HTTP/1.1 200")


def test_the_page_answers_head(http):
    head, page = http.head("/"), http.get("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == page.headers["content-length"] == str(len(page.content))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": None}, "prompt is null"),
        ({"prompt": "a", "max_tokens": -1}, "at most 9223372036854775807, or null"),
        ({"prompt": "a", "seed": 2**70}, "from -9223372036854775808 to 18446744073709551615"),
        ({"prompt": [None, True]}, "prompt[0] is null"),
        ({"prompt": "a", "stream": "None"}, "'None'"),
        (None, "the body is null; it must be an object"),
    ],
)
def test_errors_have_jsons_words(http, body, said):
    response = http.post("/v1/completions", headers={"Content-Type": "application/json"}, content=json.dumps(body))
    message = error(response)["message"]
    assert (response.status_code, said in message) == (400, True), message
    assert not re.search(r"None|True|2\*\*|\bint\b|\bstr\b", message.replace("'None'", ""))


def test_suggestions_are_short(http):
    message = error(http.post("/v1/chat/completions", json={"messages": [], "temprature": 1}))["message"]
    assert "did you mean temperature?" in message
    assert message.count(",") < 20
    assert "others" in message


def test_options_may_be_environment_variables(monkeypatch):
    """Values are those of flags; flags and the file take precedence; the engine reads the kernels' variable itself."""
    given = {"PORT": "0", "API_KEY": "12", "ACCESS_LOG": "false", "MAX_MODEL_LEN": "256", "MEDIA": '{"max_jpeg_scans": 3}'}
    given |= {"MODEL": "m", "KERNELS": "torch", "HOST": "", "CPU": "avx2", "COLOUR": "red", "DTYPE": "float32"}
    options = environment_options({f"SENSORIUM_{name}": value for name, value in given.items()} | {"PORT": "1"})
    assert options == {
        "port": 0, "api_key": "12", "access_log": False, "max_model_len": 256, "media": {"max_jpeg_scans": 3},
        "model": "m", "dtype": "float32",
    }  # fmt: skip
    assert environment_options({"SENSORIUM_PORT": "tcp://10.0.0.1:8000"}) == {}, "Kubernetes sets it for a service of that name"
    with pytest.raises(ConfigError, match="SENSORIUM_MEDIA"):
        environment_options({"SENSORIUM_MEDIA": "{"})
    for option in (*dataclasses.fields(ServerConfig), *dataclasses.fields(EngineConfig)):
        read = environment_options({f"SENSORIUM_{option.name.upper()}": "1"})
        assert (option.name in read) is (option.name != "kernels")
    served = []
    monkeypatch.setattr("sensorium.server.run._load_and_serve", lambda *args: served.append(args))
    monkeypatch.setenv("SENSORIUM_MODEL", "m")
    monkeypatch.setenv("SENSORIUM_PORT", "1")
    monkeypatch.setenv("SENSORIUM_MAX_REQUESTS", "7")
    serve({"port": 2})
    ((model, config, _),) = served
    assert (model, config.port, config.max_requests) == ("m", 2, 7)


@pytest.mark.parametrize(
    ("role", "options", "parts"),
    [("encoder", {"encoder_listen": "127.0.0.1:1"}, "encoder"), ("language", {"encoder": "127.0.0.1:1"}, "decoder")],
)
def test_roles_set_the_parts_of_the_model(role, options, parts):
    config, engine = split_options({"role": role, **options})
    assert (config.role, engine["parts"]) == (role, parts)
    assert "parts" not in split_options(options)[1]
    models = [{"name": "m", "path": "m"}]
    for wrong in ({}, {**options, "parts": "all"}, {**options, "models": models}):
        with pytest.raises(ConfigError) as caught:
            split_options({"role": role, **wrong})
        assert caught.value.info.param == "role"
