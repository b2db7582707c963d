"""What an operator sees of a server: its log, its counters, the end of its engine and of its requests."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from http_server import TINY, image_url
from sensorium.callers.errors import ConfigError, SensoriumError
from sensorium.cli.main import main
from sensorium.server.access_log import _printable
from sensorium.server.config import ServerConfig
from sensorium.server.drain import Drain, Draining
from sensorium.server.logs import FIELDS, JsonFormatter, TextFormatter, logging_to_stderr
from sensorium.server.request_record import RequestRecord, current_record, request_id
from sensorium.server.run import _run, _stop, serve
from sensorium.server.state import Server
from waiting import LONG, wait_until
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

SECRET = "a text that stays private"


@contextmanager
def command(*options):
    """Run the command, and yield (process, URL, lines of its log so far)."""
    words = [
        sys.executable,
        "-m",
        "sensorium",
        "serve",
        str(TINY),
        "--port",
        "0",
        "--max-model-len",
        "256",
        "--warm-up",
        "false",
    ]
    words += ["--log-format", "json", *options]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as run:
        try:
            url = json.loads(run.stderr.readline())["message"].split()[-1]
            yield run, url
        finally:
            run.kill()


def chat(**fields):
    return {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "ignore_eos": True, **fields}


def child_of(pid):
    """Return the engine's process, which any thread of the server may have started. One in reserve is younger."""
    children = [int(pid) for path in Path(f"/proc/{pid}/task").glob("*/children") for pid in path.read_text().split()]
    return min(child for child in children if b"core.server" in Path(f"/proc/{child}/cmdline").read_bytes())


def test_the_engine_dies_and_the_server_ends_with_a_code():
    """Each death has a line, an idle one too; after the last restart the process ends with 1."""
    with command("--engine-restarts", "1") as (run, url), httpx.Client(base_url=url, timeout=LONG) as http:
        first = child_of(run.pid)
        os.kill(first, signal.SIGKILL)
        death = json.loads(run.stderr.readline())
        assert (death["level"], death["logger"]) == ("error", "sensorium.engine.frontend.engine_loop")
        assert "SIGKILL" in death["message"]
        assert "restarted in" in json.loads(run.stderr.readline())["message"]
        assert http.get("/ready").status_code == 200
        assert http.post("/v1/chat/completions", json=chat()).status_code == 200
        metrics = http.get("/metrics").text
        assert 'sensorium_engine_deaths_total{model_name="tiny-vl"} 1.0' in metrics
        assert 'sensorium_engine_restarts_total{model_name="tiny-vl"} 1.0' in metrics
        os.kill(child_of(run.pid), signal.SIGKILL)
        assert run.wait(LONG) == 1
        assert "died too often" in run.stderr.read().splitlines()[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_requests_are_told_at_the_time_limit_of_the_shutdown(stream):
    with command("--drain-seconds", "0.1") as (run, url):
        body = chat(max_tokens=1800, stream=True)
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LONG) as streamed:
            lines = streamed.iter_lines()
            next(lines)
            if stream:
                run.terminate()
                last = [line for line in lines if line][-1]
                error = json.loads(last.removeprefix("data: "))["error"]
            else:
                with httpx.Client(timeout=LONG) as http:
                    answers = []
                    body = chat(max_tokens=1800)
                    caller = threading.Thread(target=lambda: answers.append(http.post(f"{url}/v1/chat/completions", json=body)))
                    caller.start()
                    running = 'sensorium_requests_running{model_name="tiny-vl"} 2.0'
                    wait_until(lambda: running in httpx.get(f"{url}/metrics", timeout=LONG).text)
                    run.terminate()
                    caller.join()
                assert answers[0].status_code == 503
                error = answers[0].json()["error"]
        assert error["code"] == "shutting_down"
        assert run.wait(LONG) == 0


def test_the_access_log_says_what_happened_and_nothing_private(tiny, http, caplog):
    caplog.set_level(logging.DEBUG, "sensorium.server.access_log")
    body = chat(stream=True)
    body["messages"][0]["content"] = [
        {"type": "text", "text": SECRET},
        {"type": "image_url", "image_url": {"url": image_url()}},
    ]
    headers = {"X-Request-Id": "trace-1", "Authorization": "Bearer secret-key"}
    answer = http.post("/v1/chat/completions?private=1", json=body, headers=headers)
    assert answer.headers["x-request-id"] == "trace-1"
    wrong = http.post("/v1/chat/completions", json={"model": "forged\nname"}, headers={"X-Request-Id": "two words"})
    assert wrong.headers["x-request-id"] not in ("two words", "")
    http.get("/none%0Aforged")
    http.get("/health")
    wait_until(lambda: len(caplog.records) >= 4)  # a line is written after the response
    records = {record.fields["path"]: record for record in caplog.records}
    done = records["/v1/chat/completions"].fields
    first = next(record.fields for record in caplog.records if record.fields["request_id"] == "trace-1")
    assert (first["status"], first["outcome"], first["model"], first["completion_tokens"]) == (200, "ok", "tiny-vl", 3)
    assert first["prompt_tokens"] > 10
    assert first["bytes_in"] > 100
    assert first["bytes_out"] == len(answer.content)
    assert 0 < first["first_byte_seconds"] <= first["seconds"]
    assert (done["status"], done["outcome"], done["completion_tokens"]) == (400, "error", 0)
    assert records["/none\\nforged"].fields["status"] == 404
    assert records["/health"].levelno == logging.DEBUG
    for formatter in TextFormatter(), JsonFormatter():
        text = "\n".join(formatter.format(record) for record in caplog.records)
        assert len(text.splitlines()) == len(caplog.records)
        for private in (SECRET, "secret-key", "private", "base64"):
            assert private not in text


def test_a_refused_websocket_has_its_status_in_the_log(tiny, caplog):
    caplog.set_level(logging.INFO, "sensorium.server.access_log")
    for path, status in ("/v1/realtime", 400), ("/none", 404):
        with pytest.raises(InvalidStatus) as refused, connect(f"{tiny[0]}{path}".replace("http", "ws")):
            pass
        assert refused.value.response.status_code == status

        def lines(path=path):
            noted = [getattr(record, FIELDS, {}) for record in caplog.records]
            return [fields for fields in noted if fields.get("path") == path]

        wait_until(lines)
        (fields,) = lines()
        assert (fields["path"], fields["status"], fields["outcome"]) == (path, status, "error")
        assert refused.value.response.headers["x-request-id"] == fields["request_id"]


def test_a_refused_websocket_is_no_error_of_the_server(tiny, http, monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with logging_to_stderr(ServerConfig()):
        with pytest.raises(InvalidStatus), connect(f"{tiny[0]}/none".replace("http", "ws")):
            pass
        http.get("/after")
        wait_until(lambda: "path=/after" in stderr.getvalue())
    assert "path=/none" in stderr.getvalue()
    assert "ERROR" not in stderr.getvalue()


def test_http_metrics_have_paths_of_endpoints_only(http):
    http.get("/v1/models/none")
    http.request("FOO", "/x/y/z")
    text = http.get("/metrics").text
    assert (
        'sensorium_http_requests_total{method="GET",model_name="tiny-vl",path="/v1/models/{name}",status="404"}'
        in text.replace("{name:path}", "{name}")
    )
    assert 'method="other",model_name="tiny-vl",path="none"' in text
    assert "/x/y/z" not in text
    assert 'sensorium_engine_deaths_total{model_name="tiny-vl"} 0.0' in text


@pytest.mark.parametrize("exits", [True, False])
def test_a_server_that_does_not_start_ends_with_an_error(tiny, monkeypatch, exits):
    """Versions of uvicorn differ: some exit with their own code, some return as after a signal."""

    async def startup(http, sockets):
        await http.lifespan.startup()
        http.should_exit = http.lifespan.should_exit

    if not exits:
        monkeypatch.setattr("uvicorn.Server.startup", startup)
    monkeypatch.setattr(Server, "warn_about_reasoning", lambda self: 1 / 0)
    server = Server(tiny[1].llm, ServerConfig(), "tiny-vl")
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(SensoriumError, match="did not start"):
        asyncio.run(_run(server.services, listener, None))


def test_request_ids_of_clients_are_plain():
    assert request_id(b"req-1") == "req-1"
    for bad in (None, b"", b"a b", b"a" * 129, b"\xff", b"a\nb"):
        assert len(request_id(bad)) == 32


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_the_last_line_of_a_log_in_json_is_json(how, monkeypatch, capsys, tmp_path):
    words = ["serve", str(TINY), "--uds", str(tmp_path / "none" / "x")]
    if how == "flag":
        words += ["--log-format", "json"]
    else:
        monkeypatch.setenv("SENSORIUM_LOG_FORMAT", "json")
    assert main(words) == 2
    entry = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert (entry["level"], "--uds" in entry["message"], "Errno" in entry["message"]) == ("error", True, False)


@pytest.mark.parametrize("option", ["max_models_bytes", "model_idle_seconds", "model_wait_seconds", "model_queue"])
def test_options_of_several_models_are_refused_with_one(option):
    with pytest.raises(ConfigError) as caught:
        serve({"model": str(TINY), option: 5})
    assert caught.value.info.param == option


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_traceback_is_in_the_servers_log(kind, capsys):
    logger = logging.getLogger("sensorium.engine.errors")
    with logging_to_stderr(ServerConfig(log_format=kind, log_level="warning")):
        logger.info("unseen")
        logger.error("a step failed", exc_info=IndexError("gone"))
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        logger.warning("fields", extra={FIELDS: RequestRecord("1", "GET", "/").fields})
    text = capsys.readouterr().err
    assert "unseen" not in text
    assert "Invalid" not in text
    if kind == "json":
        first, second = map(json.loads, text.splitlines())
        assert (first["level"], first["message"]) == ("error", "a step failed")
        assert first["exception"].endswith("IndexError: gone")
        assert (second["path"], second["request_id"]) == ("/", "1")
    else:
        lines = text.splitlines()
        assert lines[0].endswith("Z ERROR sensorium.engine.errors: a step failed".removeprefix("Z"))
        assert lines[1] == "IndexError: gone"
        assert "request_id=1 method=GET path=/" in lines[2]


@pytest.mark.parametrize(("path", "started"), [("/v1/chat/completions", True), ("/v1/messages", True), ("/v1/messages", False)])
def test_the_time_limit_of_the_shutdown_is_told_in_the_form_of_the_api(path, started):
    draining, sent = Draining(), []

    async def endless(scope, receive, send):
        if started:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        draining.expire()
        await asyncio.sleep(LONG)

    async def keep(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": []}
    record = RequestRecord("1", "POST", path, status=200 if started else 503)
    context = copy_context()
    context.run(current_record.set, record)
    context.run(asyncio.run, Drain(endless, draining)(scope, None, keep))
    assert record.outcome == "error"
    text = sent[-1]["body"].decode()
    assert text.startswith("event: error\ndata: ") is (started and path == "/v1/messages")
    body = json.loads(text.partition("data: ")[2] if started else text)
    assert body["error"]["code"] == "shutting_down"
    assert body.get("type") == ("error" if path == "/v1/messages" else None)


def test_paths_forge_no_fields_of_the_log():
    assert _printable("/x status=200\nb") == "/x%20status=200\\nb"


def test_a_signal_stops_a_server_whose_stderr_nobody_reads(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    numbers = []
    _stop(SimpleNamespace(should_exit=False, handle_exit=lambda number, frame: numbers.append(number)), 15, ServerConfig())
    assert numbers == [15]
