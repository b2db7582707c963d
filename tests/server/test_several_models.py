"""Several models in one server: each request gets its own, whatever is loaded."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from batch_files import BATCH, ended, line, results, upload
from http_server import TINY, error, openai_client, serving_models
from sensorium.callers.errors import ConfigError, EngineDeadError
from sensorium.engine.setup.doctor import plan_of
from sensorium.server.config import ServerConfig
from sensorium.server.endpoints import realtime
from sensorium.server.loader import EngineLoader, make_services
from waiting import LONG, wait_until

ASR = TINY.parent / "tiny-asr"
SOUND = min((TINY.parent / "speech").glob("*.flac"))
TEMPLATE = "{% for message in messages %}WORD {{ message.content }}{% endfor %}"
MODELS = [
    {"name": ["one", "first"], "path": str(TINY), "options": {"chat_template": TEMPLATE.replace("WORD", "a b")}},
    {"name": "two", "path": str(TINY), "options": {"chat-template": TEMPLATE.replace("WORD", "c d e f"), "max-model-len": 128}},
    {"name": "ear", "path": str(ASR), "options": {"max_model_len": None}},
]
OPTIONS = {"max_num_seqs": 4, "max_model_len": 256}
SIZE = max(plan_of(TINY, OPTIONS).total, plan_of(ASR, {"max_num_seqs": 4}).total)
ADMIN = {"Authorization": "Bearer admin"}


def chat(url, model, text="g h", **fields):
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 6, "ignore_eos": True, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=LONG)


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def transcript(url, model="ear", **fields):
    files = {"file": ("a.flac", SOUND.read_bytes())}
    return httpx.post(f"{url}/v1/audio/transcriptions", files=files, data={"model": model, **fields}, timeout=LONG)


def states(url):
    return {card["id"]: card["state"] for card in httpx.get(f"{url}/v1/models").json()["data"]}


@pytest.fixture(scope="module")
def expected():
    """Answers of servers of one model each."""
    found = {}
    for entry in MODELS:
        with serving_models(ServerConfig(models=[entry])) as (url, _):
            name = entry["name"] if isinstance(entry["name"], str) else entry["name"][0]
            found[name] = transcript(url).text if name == "ear" else [text_of(chat(url, name, f"{n}")) for n in range(4)]
    assert found["one"] != found["two"]
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with room for two of the three models."""
    folder = tmp_path_factory.mktemp("data")
    config = ServerConfig(models=MODELS, max_models_bytes=2 * SIZE, data_dir=str(folder), admin_key="admin")
    with serving_models(config) as (url, services):
        yield url, services


def test_concurrent_requests_to_more_models_than_fit(served, expected):
    url = served[0]
    calls = [(name, n) for n in range(4) for name in ("one", "two", "ear")]

    def ask(call):
        name, n = call
        return transcript(url).text if name == "ear" else text_of(chat(url, name, f"{n}"))

    with ThreadPoolExecutor(len(calls)) as threads:
        answers = list(threads.map(ask, calls))
    for (name, n), answer in zip(calls, answers, strict=True):
        assert answer == (expected[name] if name == "ear" else expected[name][n]), name
    assert sum(state == "loaded" for state in {id(one): one.state for one in served[1].pool.models}.values()) <= 2
    wait_until(lambda: all(one.leases == one.waiting == 0 for one in served[1].pool.models))


def test_names_and_states(served):
    url, services = served
    assert [*states(url)] == ["one", "first", "two", "ear"]
    body = chat(url, "first").json()
    assert body["model"] == "one"
    assert states(url)["first"] == states(url)["one"] == "loaded"
    assert chat(url, None).json()["model"] == "one"
    unknown = error(chat(url, "three"), 404)
    assert unknown["code"] == "model_not_found"
    assert "'one', 'first', 'two', 'ear'" in unknown["message"]
    card = httpx.get(f"{url}/v1/models/two").json()
    assert card["id"] == "two"
    assert httpx.get(f"{url}/v1/models/three").status_code == 404
    with openai_client(url) as client:
        assert [model.id for model in client.models.list()] == ["one", "first", "two", "ear"]
    page = httpx.get(f"{url}/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (page["first_id"], page["last_id"]) == ("one", "ear")
    assert services.pool.find("one").names == ["one", "first"]


def test_every_endpoint_goes_to_the_model_that_is_named(served, expected):
    url = served[0]
    message = {"role": "user", "content": "2"}
    more = {"ignore_eos": True}
    answer = httpx.post(
        f"{url}/v1/messages", json={"model": "two", "max_tokens": 6, "messages": [message], **more}, timeout=LONG
    ).json()
    assert answer["content"][0]["text"] == expected["two"][2]
    fields = {"model": "two", "max_output_tokens": 6, "input": "2", **more}
    answer = httpx.post(f"{url}/v1/responses", json=fields, timeout=LONG).json()
    assert (answer["model"], answer["output"][0]["content"][0]["text"]) == ("two", expected["two"][2])
    options = {"num_predict": 6}
    for tag in "", ":latest":
        body = {"model": f"two{tag}", "messages": [message], "options": options, "stream": False}
        assert httpx.post(f"{url}/api/chat", json=body, timeout=LONG).json()["prompt_eval_count"] == count(url, "two", "2")
    assert count(url, "one", "2") != count(url, "two", "2")
    assert httpx.post(f"{url}/v1/embeddings", json={"model": "two", "input": "a"}, timeout=LONG).json()["model"] == "two"
    assert error(httpx.post(f"{url}/v1/embeddings", json={"model": "x", "input": "a"}), 404)["code"] == "model_not_found"
    assert error(chat(url, "ear"))["code"] == "unsupported"
    assert error(transcript(url, "one"), 400)["code"] == "invalid_config"
    streamed = transcript(url, stream="true")
    last = streamed.text.strip().splitlines()[-1].removeprefix("data: ")
    assert json.loads(last)["text"] == json.loads(expected["ear"])["text"]


def count(url, model, text):
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return httpx.post(f"{url}/tokenize", json=body, timeout=LONG).json()["count"]


def test_ollama_lists_the_models(served):
    url = served[0]
    text_of(chat(url, "two"))
    tags = httpx.get(f"{url}/api/tags").json()["models"]
    assert [one["name"] for one in tags] == ["one", "two", "ear"]
    assert len({one["digest"] for one in tags}) == 3
    running = [one["name"] for one in httpx.get(f"{url}/api/ps").json()["models"]]
    assert "two" in running
    assert len(running) <= 2
    shown = httpx.post(f"{url}/api/show", json={"model": "two:latest"}).json()
    assert shown["model_info"][f"{shown['details']['family']}.context_length"] == 128
    assert shown["template"] == TEMPLATE.replace("WORD", "c d e f")


def test_metrics_have_the_name_of_each_model(served):
    url = served[0]
    text_of(chat(url, "one"))
    text_of(chat(url, "two"))
    text = httpx.get(f"{url}/metrics").text
    for name in "one", "two":
        assert f'sensorium_generated_tokens_total{{model_name="{name}"}}' in text
        labels = f'method="POST",model_name="{name}",path="/v1/chat/completions",status="200"'
        assert f"sensorium_http_requests_total{{{labels}}}" in text
        assert f'sensorium_engine_sleep_state{{model_name="{name}"}} 0.0' in text
    assert text.count("# TYPE sensorium_generated_tokens_total counter") == 1
    assert text.count("# TYPE vllm:generation_tokens_total counter") == 1


def test_batches_and_background_responses_load_their_models(served, expected):
    url = served[0]
    with openai_client(url) as client:
        lines = [
            line(f"{name}-{n}", model=name, messages=[{"role": "user", "content": f"{n}"}], max_tokens=6, ignore_eos=True)
            for n in range(4)
            for name in ("one", "two")
        ]
        lines.append(line("none", model="three"))
        batch = ended(client, client.batches.create(input_file_id=upload(client, *lines).id, **BATCH))
        answers = {one["custom_id"]: one["response"]["body"] for one in results(client, batch.output_file_id)}
        for name in "one", "two":
            texts = [answers[f"{name}-{n}"]["choices"][0]["message"]["content"] for n in range(4)]
            assert texts == expected[name]
        (failed,) = results(client, batch.error_file_id)
        assert failed["response"]["body"]["error"]["code"] == "model_not_found"
        recording = client.files.create(file=(SOUND.name, SOUND.read_bytes()), purpose="user_data")
        sound = "/v1/audio/transcriptions"
        batch = client.batches.create(
            **{**BATCH, "endpoint": sound}, input_file_id=upload(client, line("a", sound, file_id=recording.id, model="ear")).id
        )
        (heard,) = results(client, ended(client, batch).output_file_id)
        assert heard["response"]["body"]["text"] == json.loads(expected["ear"])["text"]
        body = {"ignore_eos": True}
        response = client.responses.create(model="two", input="1", max_output_tokens=6, background=True, extra_body=body)
        wait_until(lambda: client.responses.retrieve(response.id).status not in ("queued", "in_progress"))
        assert client.responses.retrieve(response.id).output_text == expected["two"][1]
    wait_until(lambda: not any(one.leases for one in served[1].pool.models))


def test_realtime_sessions_keep_their_model(served):
    connect = pytest.importorskip("websockets.sync.client").connect
    from websockets.exceptions import InvalidStatus

    url, services = served
    address = f"{url.replace('http', 'ws')}/v1/realtime"
    with connect(f"{address}?model=ear") as session:
        assert json.loads(session.recv(LONG))["session"]["audio"]["input"]["transcription"]["model"] == "ear"
        assert services.pool.find("ear").leases == 1
        settings = {"type": "transcription", "audio": {"input": {"transcription": {"model": "one"}}}}
        session.send(json.dumps({"type": "session.update", "session": settings}))
        assert json.loads(session.recv(LONG))["type"] == "error"
    wait_until(lambda: services.pool.find("ear").leases == 0)
    for name in "one", "three":
        with pytest.raises(InvalidStatus), connect(f"{address}?model={name}"):
            pass
    wait_until(lambda: services.realtime_sessions == 0)
    wait_until(lambda: not any(one.leases for one in services.pool.models))


def test_administrators_name_a_model(served, expected):
    url = served[0]
    assert text_of(chat(url, "two", "0")) == expected["two"][0]

    def admin(method, path, model, status=200):
        response = httpx.request(method, f"{url}/{path}", params={"model": model}, headers=ADMIN, timeout=LONG)
        assert response.status_code == status
        return response

    admin("POST", "sleep", "two")
    assert states(url)["two"] == "asleep"
    assert admin("GET", "is_sleeping", "two").json() == {"is_sleeping": True}
    assert "two" not in [one["name"] for one in httpx.get(f"{url}/api/ps").json()["models"]]
    assert 'sensorium_engine_sleep_state{model_name="two"} 1.0' in httpx.get(f"{url}/metrics").text
    assert httpx.get(f"{url}/ready").status_code == 200
    assert text_of(chat(url, "two", "1")) == expected["two"][1]
    admin("POST", "sleep", "two")
    admin("POST", "wake_up", "two")
    assert admin("GET", "is_sleeping", "two").json() == {"is_sleeping": False}
    admin("POST", "wake_up", "ear")
    assert states(url)["ear"] == "loaded"
    assert admin("POST", "reset_prefix_cache", "ear").json() == {"success": True}
    admin("POST", "reset_mm_cache", "one")
    admin("POST", "sleep", "three", 404)


def test_what_is_left_of_an_unloaded_model_is_collected():
    class Engine:
        def __init__(self):
            self.itself = self

        def close(self):
            pass

    model = SimpleNamespace(engine=Engine())
    engine = weakref.ref(model.engine)
    gc.freeze()  # as the server does when it begins
    EngineLoader(ServerConfig(), {}).close(model)
    del model
    gc.collect()
    assert engine() is None


@pytest.fixture
def held(served, monkeypatch):
    """Make loads wait: (URL, Services, event that lets them go on). The model "two" is not loaded."""
    url, services = served
    text_of(chat(url, "one"))
    assert transcript(url).status_code == 200
    assert states(url)["two"] == "not_loaded"
    go_on, load, loads = threading.Event(), EngineLoader.load, []

    def held_load(self, name):
        loads.append(name)
        assert go_on.wait(LONG)
        return load(self, name)

    monkeypatch.setattr(EngineLoader, "load", held_load)
    yield url, services, go_on, loads
    go_on.set()
    wait_until(lambda: not any(one.task for one in services.pool.models))


def test_a_stream_gets_comments_while_its_model_is_loaded(held, expected, monkeypatch):
    url, _, go_on, loads = held
    for module in "streams", "events":
        monkeypatch.setattr(f"sensorium.server.{module}.WAIT_SECONDS", 0.05)
    body = {"model": "two", "messages": [{"role": "user", "content": "0"}], "max_tokens": 6, "ignore_eos": True}
    bodies = {"/v1/chat/completions": body, "/v1/messages": body}

    def follow(path):
        with httpx.stream("POST", f"{url}{path}", json={**body, "stream": True}, timeout=LONG) as response:
            assert response.status_code == 200
            lines = []
            for one in response.iter_lines():
                lines.append(one)
                if lines.count(": waiting") == 3:
                    go_on.set()
        return lines

    with ThreadPoolExecutor(2) as threads:
        chats, messages = threads.map(follow, bodies)
    events = [json.loads(one.removeprefix("data: ")) for one in chats if one.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])
    assert text == expected["two"][0]
    assert chats[-2] == "data: [DONE]"
    assert ": waiting" in messages
    assert json.loads([one for one in messages if one][-1].removeprefix("data: ")) == {"type": "message_stop"}
    assert loads == ["two"]


def test_clients_that_leave_while_their_model_is_loaded(held, expected):
    url, services, go_on, loads = held
    for stream in False, True:
        body = {"model": "two", "messages": [{"role": "user", "content": "0"}], "stream": stream}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=0.3)
    wait_until(lambda: services.pool.find("two").waiting == 0)
    wait_until(lambda: not services.draining.tasks)
    assert services.body_bytes.count == 0
    go_on.set()
    assert text_of(chat(url, "two", "0")) == expected["two"][0]
    assert loads == ["two"]
    wait_until(lambda: services.pool.find("two").leases == 0)  # it ends after the response


def test_a_session_that_is_left_before_its_model_is_loaded(held):
    url, services, _, loads = held
    address = httpx.URL(url)
    words = f"GET /v1/realtime?model=two HTTP/1.1\r\nHost: {address.netloc.decode()}\r\nConnection: Upgrade\r\n"
    words += f"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {'A' * 22}==\r\n\r\n"
    with socket.create_connection((address.host, address.port), LONG) as client:
        client.sendall(words.encode())
        wait_until(lambda: services.pool.find("two").waiting == 1 and loads == ["two"])
    wait_until(lambda: services.pool.find("two").waiting == 0)
    wait_until(lambda: services.realtime_sessions == 0)
    assert loads == ["two"]


def test_a_session_that_is_cancelled_as_its_model_is_leased_keeps_no_lease(served, monkeypatch):
    connect = pytest.importorskip("websockets.sync.client").connect
    url, services = served
    acquire, handle, handlers, cancelled = services.pool.acquire, realtime.lease_model, [], []

    async def noted(websocket, name):
        handlers.append(asyncio.current_task())
        await handle(websocket, name)

    async def acquired(name):
        lease = await acquire(name)
        asyncio.get_running_loop().call_soon(lambda: cancelled.append(handlers[0].cancel()))  # before the handler resumes
        return lease

    monkeypatch.setattr(realtime, "lease_model", noted)
    monkeypatch.setattr(services.pool, "acquire", acquired)
    with pytest.raises(Exception), connect(f"{url.replace('http', 'ws')}/v1/realtime?model=ear"):  # noqa: B017, PT011
        pass
    wait_until(lambda: services.realtime_sessions == 0)
    assert cancelled == [True]
    assert services.pool.find("ear").leases == 0


def health(url):
    paths = "health", "ready", "ping"
    return [httpx.get(f"{url}/{path}", headers=ADMIN, timeout=LONG).status_code for path in paths]


def test_a_server_that_unloads_a_model_is_healthy(served, monkeypatch):
    url = served[0]
    text_of(chat(url, "one"))
    text_of(chat(url, "two"))
    go_on, closed = threading.Event(), threading.Event()

    def held_close(self, model):
        model.engine.close()
        closed.set()
        assert go_on.wait(LONG)

    monkeypatch.setattr(EngineLoader, "close", held_close)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(transcript, url)
        try:
            assert closed.wait(LONG)
            assert states(url)["one"] == "unloading"
            assert health(url) == [200] * 3
        finally:
            go_on.set()
        assert answer.result().status_code == 200


def test_a_dead_model_without_requests_leaves_the_server_healthy(served, monkeypatch):
    url, services = served
    text_of(chat(url, "one"))
    one = services.pool.find("one")

    async def check_health():
        raise EngineDeadError("the engine's process has died")

    monkeypatch.setattr(one.model.llm, "check_health", check_health)
    wait_until(lambda: not one.leases)
    assert health(url) == [200] * 3
    monkeypatch.setattr(one, "leases", 1)
    assert health(url) == [503] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_cannot_be_loaded(tmp_path, caplog, stream, monkeypatch):
    """Its files are broken for a while."""
    monkeypatch.setattr("sensorium.server.model_pool._BACKOFF_SECONDS", 0.2)
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    weights = max(folder.glob("*.safetensors"))
    content = weights.read_bytes()
    models = [MODELS[0], {"name": "broken", "path": str(folder)}]
    with serving_models(ServerConfig(models=models, max_models_bytes=4 * SIZE), device="cpu") as (url, _):
        weights.write_bytes(content[:1000])
        with caplog.at_level(logging.ERROR), ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(lambda _: chat(url, "broken", stream=stream), range(3)))
        for answer in answers:
            found = error(answer, 503)
            assert found["code"] == "model_load_failed"
            assert str(folder) not in found["message"]
            assert answer.headers["retry-after"] == "1"
        assert caplog.text.count("the model broken cannot be loaded") <= 2
        assert "Traceback" in caplog.text
        text_of(chat(url, "one"))
        weights.write_bytes(content)
        wait_until(lambda: chat(url, "broken").status_code == 200)
        assert states(url) == {"one": "loaded", "first": "loaded", "broken": "loaded"}


def test_what_is_told_of_a_model_does_not_change_when_it_is_loaded():
    with serving_models(ServerConfig(models=MODELS, max_models_bytes=SIZE)) as (url, services):
        for name in "two", "ear":
            shown = httpx.post(f"{url}/api/show", json={"model": name}).json()
            before, facts = httpx.get(f"{url}/v1/models/{name}").json(), services.pool.find(name).facts
            assert (before.pop("state"), before["root"]) == ("not_loaded", name)
            assert httpx.post(f"{url}/tokenize", json={"model": name, "prompt": "a"}, timeout=LONG).status_code == 200
            after = httpx.get(f"{url}/v1/models/{name}").json()
            assert after.pop("state") == "loaded"
            assert after == before
            assert httpx.post(f"{url}/api/show", json={"model": name}).json() == shown
            assert services.pool.find(name).model.facts == facts
        assert "transcribe" in before["capabilities"]["tasks"]
        assert httpx.get(f"{url}/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]["requestBody"]


def test_models_that_do_not_fit():
    with pytest.raises(ConfigError, match="'one'") as caught:
        make_services(ServerConfig(models=MODELS, max_models_bytes=1_000_000), OPTIONS)
    info = caught.value.info
    assert (info.code, info.param, info.limit) == ("invalid_config", "max_models_bytes", 1_000_000)
    eager = [{**entry, "preload": True} for entry in MODELS]
    with pytest.raises(ConfigError, match="all models with preload"):
        make_services(ServerConfig(models=eager, max_models_bytes=2 * SIZE), OPTIONS)
    with pytest.raises(ConfigError, match=r"the model 'one': .*max_model_len"):
        make_services(ServerConfig(models=[{**MODELS[0], "options": {"max_model_len": -5}}]), OPTIONS)


def children(pid):
    found = [int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split()]
    return found + [inner for child in found for inner in children(child)]


def test_the_command_unloads_without_a_trace(tmp_path):
    """With the real command, whose engines are processes: an unloaded model leaves no process, and a stopped server none."""
    config = tmp_path / "models.yaml"
    options = {"max_model_len": 256, "max_num_seqs": 4, "warm_up": False}
    config.write_text(json.dumps({"models": MODELS[:2], "max-models-bytes": SIZE, "admin_key": "admin", "port": 0, **options}))
    before = set(os.listdir("/dev/shm"))
    words = [sys.executable, "-m", "sensorium", "serve", "--config", str(config)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as run:
        try:
            line = run.stderr.readline()
            assert line.startswith("one, two are served on"), line
            url = line.split()[-1]
            threading.Thread(target=run.stderr.read, daemon=True).start()
            text_of(chat(url, "one"))
            first = set(children(run.pid))
            assert first
            text_of(chat(url, "two"))
            assert states(url) == {"one": "not_loaded", "first": "not_loaded", "two": "loaded"}
            wait_until(lambda: not first & set(children(run.pid)))
            assert len(children(run.pid)) <= len(first)
            run.terminate()
            assert run.wait(LONG) == 0
        finally:
            run.kill()
    assert set(os.listdir("/dev/shm")) <= before
