"""Streams whose first output comes late: their header and comments come before it."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from sensorium.callers.errors import InputError
from sensorium.server import streams
from waiting import LONG, assert_idle, wait_until

MESSAGES = {"messages": [{"role": "user", "content": "a"}], "stream": True}
STREAMS = {
    "/v1/chat/completions": {**MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "stream": True},
    "/v1/responses": {"input": "a", "max_output_tokens": 2, "stream": True},
    "/v1/messages": {**MESSAGES, "model": "tiny-vl", "max_tokens": 2},
}


@pytest.fixture
def held(tiny, monkeypatch):
    """Hold the engine's steps until the returned event is set."""
    go_on, core = threading.Event(), tiny[1].engine.loop.core

    def step(*args, work=core.step, **options):
        go_on.wait(LONG)
        return work(*args, **options)

    monkeypatch.setattr(core, "step", step)
    monkeypatch.setattr(streams, "WAIT_SECONDS", 0.05)
    yield go_on
    go_on.set()
    assert_idle(tiny[1].llm)


@pytest.mark.parametrize("path", STREAMS)
def test_comments_come_while_a_request_waits(http, held, path):
    whole = []
    with http.stream("POST", path, json=STREAMS[path]) as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        for line in response.iter_lines():
            whole.append(line)
            if whole.count(": waiting") == 3:
                held.set()
    begun = next(number for number, line in enumerate(whole) if line.startswith(("data: ", "event: ")))
    assert set(whole[:begun]) == {": waiting", ""}
    assert ": waiting" not in whole[begun:]
    last = [line for line in whole if line.startswith("data: ")][-1]
    ends = {"/v1/responses": '"response.completed"', "/v1/messages": '"message_stop"'}
    assert ends.get(path, "[DONE]") in last or '"response.incomplete"' in last


def test_the_openai_package_passes_comments_over(client, held):
    threading.Timer(0.5, held.set).start()
    stream = client.chat.completions.create(model="tiny-vl", **{**MESSAGES, "max_tokens": 2})
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("length", "stop")


@pytest.mark.parametrize("path", STREAMS)
def test_a_late_error_is_an_event(http, tiny, held, monkeypatch, path):
    async def late(*args, **options):
        while not held.is_set():
            await asyncio.sleep(0.01)
        raise InputError("it is wrong", param="prompt")
        yield

    monkeypatch.setattr(tiny[1].llm, "generate", late)
    data = []
    with http.stream("POST", path, json=STREAMS[path]) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            held.set()
            data += [json.loads(line.removeprefix("data: "))] if line.startswith("data: ") else []
    (error,) = data
    assert "it is wrong" in error["error"]["message"]
    assert error.get("type") == ("error" if path == "/v1/messages" else None)


def test_an_early_error_has_its_status(http):
    for path, body in STREAMS.items():
        response = http.post(path, json={**body, "model": "other"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found"), path


def test_a_client_that_leaves_during_comments_is_not_served_further(http, tiny, held):
    with http.stream("POST", "/v1/chat/completions", json={**MESSAGES, "max_tokens": 900, "ignore_eos": True}) as response:
        assert next(response.iter_lines()) == ": waiting"
    held.set()
    wait_until(lambda: not tiny[1].engine.loop._names)
