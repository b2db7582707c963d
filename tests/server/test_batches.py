"""Files and batches: OpenAI's wire format, owners, limits, expiry and cancellation, and a server that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import httpx
import openai
import pytest
from fastapi import Request
from http_server import TINY, listening
from sensorium.mm.errors import ConfigError
from sensorium.server import batch_runner
from sensorium.server.batch_runner import BatchRunner, _check_line
from sensorium.server.config import ServerConfig
from sensorium.server.endpoints import batches
from sensorium.server.errors import HttpError
from sensorium.server.guard import TENANT
from sensorium.server.large_json import member
from sensorium.server.state import Server
from sensorium.server.store import KEPT_SECONDS, WINDOW_SECONDS, CheckedLines, Store
from waiting import LONG, wait_until

CHAT = "/v1/chat/completions"
BATCH = {"endpoint": CHAT, "completion_window": "24h"}


def line(custom_id, url=CHAT, **body):
    default = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2} if url == CHAT else {}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {**default, **body}}).encode()


def upload(client, *lines):
    return client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")


def ended(client, batch):
    def done():
        return client.batches.retrieve(batch.id).status not in ("validating", "in_progress", "finalizing", "cancelling")

    wait_until(done)
    return client.batches.retrieve(batch.id)


def results(client, file_id):
    return [json.loads(one) for one in client.files.content(file_id).content.splitlines()]


@pytest.fixture(scope="module")
def stored(tiny, tmp_path_factory):
    """Two clients with different keys of a server with a folder."""
    config = ServerConfig(data_dir=str(tmp_path_factory.mktemp("data")), api_key=["one", "two"], max_file_bytes=100_000)
    with closing(Store(config)) as store:
        server = Server(tiny[1].engine, config, "tiny-vl", store=store)
        with listening(server) as url:
            options = {"base_url": f"{url}/v1", "max_retries": 0, "timeout": LONG}
            with openai.OpenAI(api_key="one", **options) as one, openai.OpenAI(api_key="two", **options) as two:
                yield one, two


def test_a_batch_is_answered(stored):
    client = stored[0]
    lines = [line("b"), line("a", max_tokens=-1), line("c", seed=1, temperature=1.0), b"", line("d", model="other")]
    file = upload(client, *lines)
    assert (file.purpose, file.filename, file.bytes) == ("batch", "in.jsonl", len(b"\n".join(lines)))
    assert client.files.content(file.id).content == b"\n".join(lines)
    batch = client.batches.create(input_file_id=file.id, metadata={"k": "v"}, **BATCH)
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, {"k": "v"})
    batch = ended(client, batch)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 4, 2, 2)
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at
    answers = results(client, batch.output_file_id)
    assert [one["custom_id"] for one in answers] == ["b", "c"]
    assert {one["response"]["status_code"] for one in answers} == {200}
    assert answers[0]["response"]["body"]["object"] == "chat.completion"
    failed = results(client, batch.error_file_id)
    assert [(one["custom_id"], one["response"]["status_code"]) for one in failed] == [("a", 400), ("d", 404)]
    assert failed[0]["response"]["body"]["error"]["param"] == "max_tokens"
    assert len({one["id"] for one in answers + failed}) == 4
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"


@pytest.mark.parametrize(
    ("url", "body"),
    [("/v1/completions", {"prompt": "a"}), ("/v1/embeddings", {"input": "a"}), ("/v1/responses", {"input": "a"})],
)
def test_other_endpoints(stored, url, body):
    client = stored[0]
    file = upload(client, line("a", url, **body))
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h"))
    (found,) = results(client, batch.output_file_id or batch.error_file_id)
    with httpx.Client(base_url=str(client.base_url).removesuffix("/v1/"), timeout=LONG) as http:
        same = http.post(url, json=body, headers={"Authorization": "Bearer one"})
    assert found["response"]["status_code"] == same.status_code
    assert found["response"]["body"].keys() == same.json().keys()


def test_lists_have_pages(stored):
    client = stored[0]
    made = [upload(client, line("a")).id for _ in range(3)]
    assert [one.id for one in client.files.list(limit=2)][:3] == made[::-1]
    assert [one.id for one in client.files.list(order="asc", after=made[0])][:2] == made[1:]
    assert {one.purpose for one in client.files.list(purpose="batch_output")} <= {"batch_output"}
    batches = [client.batches.create(input_file_id=made[0], **BATCH).id for _ in range(3)]
    assert [one.id for one in client.batches.list(limit=1)][:3] == batches[::-1]
    for one in batches:
        ended(client, client.batches.retrieve(one))
    assert client.files.delete(made[0]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made[0])
    with pytest.raises(openai.NotFoundError, match="after"):
        client.files.list(after=made[0])


def test_files_belong_to_a_key(stored):
    client, other = stored
    file = upload(client, line("a"))
    batch = client.batches.create(input_file_id=file.id, **BATCH)
    assert not {file.id, batch.id} & {one.id for one in (*other.files.list(), *other.batches.list())}
    calls = [other.files.retrieve, other.files.content, other.files.delete, other.batches.retrieve, other.batches.cancel]
    for call, name in zip(calls, [file.id] * 3 + [batch.id] * 2, strict=True):
        with pytest.raises(openai.NotFoundError):
            call(name)
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=file.id, **BATCH)
    ended(client, batch)


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), line("a")], "duplicate_custom_id", 2), ([line("")], "invalid_custom_id", 1),
        ([line("\ud800")], "invalid_custom_id", 1), ([line("x" * 513)], "invalid_custom_id", 1),
        ([line("a"), b"{"], "invalid_json_line", 2), ([b"[" * 10**4], "invalid_json_line", 1),
        ([line("a", x=0).replace(b": 0", b": " + b"[" * 127 + b"]" * 127)], "invalid_json_line", 1),
        ([b"[]"], "invalid_request", 1), ([line("a", "/v1/embeddings")], "mismatched_endpoint", 1),
        ([line("a", stream=True)], "invalid_request", 1),
        ([line("a").replace(b"POST", b"GET")], "invalid_method", 1), ([b" ", b""], "empty_file", None),
    ],
)  # fmt: skip
def test_wrong_lines_fail_a_batch(stored, lines, code, number):
    client = stored[0]
    batch = ended(client, client.batches.create(input_file_id=upload(client, *lines).id, **BATCH))
    assert batch.status == "failed"
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
    assert batch.output_file_id is batch.error_file_id is None
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_wrong_requests(stored):
    client = stored[0]
    file = upload(client, line("a"))
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"x", purpose="vision")
    with pytest.raises(openai.BadRequestError, match="seconds"):
        client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 1})
    with pytest.raises(openai.APIStatusError, match="max_file_bytes"):
        upload(client, b"x" * 100_001)
    with pytest.raises(openai.APIStatusError, match="lines"):
        upload(client, b"\n" * 50_001)
    for wrong in (
        {"endpoint": "/score"},
        {"completion_window": "1h"},
        {"metadata": {"k": "v" * 513}},
    ):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.batches.create(**{"input_file_id": file.id, **BATCH, **wrong})
    wrong = json.dumps({**BATCH, "input_file_id": "\ud800"})
    headers = {"Authorization": "Bearer one", "Content-Type": "application/json"}
    response = httpx.post(f"{client.base_url}batches", content=wrong, headers=headers, timeout=LONG)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input_file_id")
    kept = client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert kept.expires_at - kept.created_at == 3600


def test_without_a_folder_the_option_is_named(client):
    with pytest.raises(openai.NotFoundError, match="--data-dir"):
        client.files.list()
    with pytest.raises(openai.NotFoundError, match="--data-dir"):
        client.batches.create(input_file_id="file-1", **BATCH)


class Held:
    """An application whose endpoints answer when a test says so."""

    def __init__(self):
        self.started, self.most, self.statuses, self.go_on = list[str](), 0, dict[str, list[int]](), asyncio.Event()
        self._running, self.asked, self.ready, self.codes = 0, 0, list[int](), dict[str, list[str]]()

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/ready":
            self.asked += 1
            await self.reply(send, self.ready.pop(0) if self.ready else 200, b"{}")
            return
        body = json.loads((await receive())["body"])
        name = body["messages"]
        assert scope[TENANT] is None
        self.started.append(name)
        self._running += 1
        self.most = max(self.most, self._running)
        try:
            await self.go_on.wait()
            status = self.statuses[name].pop(0) if self.statuses.get(name) else 200
            codes = self.codes.get(name)
            if codes:
                await self.reply(send, 503, json.dumps({"error": {"code": codes.pop(0)}}).encode())
            else:
                await self.reply(send, status, b"{}")
        finally:
            self._running -= 1

    @staticmethod
    async def reply(send, status, body):
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})


async def until(true):
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


def held(tmp_path, names, scenario, **options):
    """Run a scenario with a batch whose lines have these names."""

    async def run():
        clock = [time.time()]
        config = ServerConfig(data_dir=str(tmp_path), **options)
        with closing(Store(config, lambda: clock[0])) as store:
            app = Held()
            runner = BatchRunner(store, config, app)
            file = store.add_file("", "in", [line(name, messages=name) + b"\n" for name in names], KEPT_SECONDS)
            batch = store.add_batch("", {**BATCH, "input_file_id": file["id"]}, KEPT_SECONDS)["id"]

            async def end():
                runner.start("", batch)
                await asyncio.wait_for(runner._tasks[batch], LONG)

            await scenario(store, runner, app, batch, clock, end)
            return store.batch("", batch)

    return asyncio.run(run())


def test_few_lines_are_in_progress(tmp_path):
    async def scenario(store, runner, app, batch, clock, end):
        async with runner.running():
            await until(lambda: len(app.started) == 3)
            app.go_on.set()
            await until(lambda: not runner._tasks)

        assert app.started == [*"abcdefgh"]
        assert app.most == 3

    assert held(tmp_path, "abcdefgh", scenario, batch_requests=3)["request_counts"]["completed"] == 8


def test_a_cancelled_batch_keeps_its_results(tmp_path):
    async def scenario(store, runner, app, batch, clock, end):
        async with runner.running():
            app.go_on.set()
            await until(lambda: store.batch("", batch)["request_counts"]["completed"] >= 2)
            app.go_on.clear()
            with pytest.raises(HttpError, match="cancel it first"):
                store.delete_file("", store.batch("", batch)["input_file_id"])
            await store.call(store.cancel, "", batch)
            await end()

    found = held(tmp_path, map(str, range(1000)), scenario, batch_requests=2)
    assert (found["status"], found["request_counts"]["total"]) == ("cancelled", 1000)
    with closing(Store(ServerConfig(data_dir=str(tmp_path)))) as store:
        lines = [json.loads(one) for one in read(store, found["error_file_id"])]
        done = [json.loads(one) for one in read(store, found["output_file_id"])]
    assert {one["error"]["code"] for one in lines} == {"batch_cancelled"}
    assert [len(done), len(lines)] == [found["request_counts"]["completed"], found["request_counts"]["failed"]]
    assert {one["custom_id"] for one in lines + done} == {str(number) for number in range(1000)}


def read(store, file):
    found, after = store.content(file, -1)
    while part := store.content(file, after)[0]:
        found, after = found + part, store.content(file, after)[1]
    return found.splitlines()


def test_expiry(tmp_path):
    async def scenario(store, runner, app, batch, clock, end):
        app.go_on.set()
        clock[0] += WINDOW_SECONDS
        await end()

    found = held(tmp_path, "ab", scenario)
    assert found["status"] == "expired"
    assert found["request_counts"]["failed"] == found["request_counts"]["total"]
    later = found["created_at"] + WINDOW_SECONDS + 2 * KEPT_SECONDS
    with closing(Store(ServerConfig(data_dir=str(tmp_path)), lambda: later)) as store:
        with pytest.raises(HttpError, match="no file"):
            store.file("", found["input_file_id"])
        store.remove_expired()
        assert store._rows("SELECT count(*) FROM pieces") == [(0,)]
        assert store.batches("", None, 1) == []


def test_lines_expire_while_they_run(tmp_path, monkeypatch):
    async def scenario(store, runner, app, batch, clock, end):
        reached = asyncio.Event()
        monkeypatch.setattr(asyncio, "timeout", lambda seconds: Ending(reached))
        run = asyncio.ensure_future(end())
        await until(lambda: len(app.started) == 2)
        reached.set()
        await run

    found = held(tmp_path, "ab", scenario)
    assert (found["status"], found["request_counts"]) == ("expired", {"total": 2, "completed": 0, "failed": 2})


class Ending:
    """`asyncio.timeout` that ends with an event."""

    def __init__(self, event):
        self.event = event

    async def __aenter__(self):
        task = asyncio.current_task()
        self.waiter = asyncio.ensure_future(self.event.wait())
        self.waiter.add_done_callback(lambda _: task.cancel())

    async def __aexit__(self, *_):
        raise TimeoutError


def test_a_busy_engine_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("sensorium.server.batch_runner._RETRY_SECONDS", 0.001)

    async def scenario(store, runner, app, batch, clock, end):
        app.statuses = {"a": [429, 503], "b": [503] * 9}
        app.go_on.set()
        await end()
        assert app.started.count("a") == 3

    assert held(tmp_path, "ab", scenario)["request_counts"] == {"total": 2, "completed": 1, "failed": 1}


def test_a_line_that_kills_the_engine_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("sensorium.server.batch_runner._RETRY_SECONDS", 0.001)

    async def scenario(store, runner, app, batch, clock, end):
        app.codes = {"a": ["engine_dead"] * 9, "b": ["engine_dead"], "c": ["interrupted"] * 9}
        app.go_on.set()
        await end()
        assert [app.started.count(name) for name in "abc"] == [2, 2, 2]

    assert held(tmp_path, "abc", scenario)["request_counts"] == {"total": 3, "completed": 1, "failed": 2}


@pytest.mark.parametrize("code", ["engine_dead", "engine_closed", "engine_asleep"])
def test_a_batch_waits_for_the_engine(tmp_path, monkeypatch, code):
    monkeypatch.setattr("sensorium.server.batch_runner._RETRY_SECONDS", 0.001)

    async def scenario(store, runner, app, batch, clock, end):
        app.codes, app.ready = {"a": [code] * 9}, [503, 200] * 9
        app.go_on.set()
        await end()
        assert (app.started.count("a"), app.asked) == (10, 18)

    assert held(tmp_path, "a", scenario)["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


def test_any_exception_is_the_result_of_its_line(tmp_path, monkeypatch):
    def wrong(body, name, member=batch_runner.member):
        if b'"a"' in body:
            raise RecursionError
        return member(body, name)

    monkeypatch.setattr(batch_runner, "member", wrong)

    async def scenario(store, runner, app, batch, clock, end):
        app.go_on.set()
        await end()
        assert app.started == ["b"]

    assert held(tmp_path, "ab", scenario)["request_counts"] == {"total": 2, "completed": 1, "failed": 1}


def test_a_batch_that_waits_reads_no_line(tmp_path):
    async def scenario(store, runner, app, batch, clock, end):
        read, line_of = [], store.line
        store.line = lambda *args: read.append(args) or line_of(*args)
        other = store.add_batch("", {**BATCH, "input_file_id": store.files("", None, 1, True, None)[0]["id"]}, KEPT_SECONDS)
        runner.start("", batch)
        await until(lambda: len(app.started) == 2)
        runner.start("", other["id"])
        await until(lambda: store.batch("", other["id"])["status"] == "in_progress")
        assert len(read) == 2
        app.go_on.set()
        await until(lambda: not runner._tasks)

    assert held(tmp_path, "abc", scenario, batch_requests=2)["request_counts"]["completed"] == 3


def test_a_failed_sibling_frees_every_place(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_runner, "_RETRY_SECONDS", 0.001)
    create, left = asyncio.TaskGroup.create_task, [1] * 3

    def create_task(self, run):
        if not left:
            return create(self, run)
        left.pop()
        run.close()
        raise RuntimeError("the group is shutting down")

    monkeypatch.setattr(asyncio.TaskGroup, "create_task", create_task)

    async def scenario(store, runner, app, batch, clock, end):
        app.go_on.set()
        await end()

    assert held(tmp_path, "abcd", scenario, batch_requests=2)["request_counts"]["completed"] == 4


@pytest.mark.parametrize("value", ['{"b": [1, "\\u00e9}"], "c": {}}', '"' + "x" * (2 << 20) + '"', "1e5", "[]"])
def test_member_copies_json(value):
    body = f' {{ "body" : 1, "a": [{{"body": 2}}] ,\t"body" :{value} , "z": "\\"" }}\n'.encode()
    assert member(body, "body") == value.encode()
    assert json.loads(member(body, "body")) == json.loads(body)["body"]


def test_the_database_is_private(tmp_path):
    tmp_path.chmod(0o755)
    with closing(Store(ServerConfig(data_dir=str(tmp_path)))):
        assert {path.stat().st_mode & 0o77 for path in tmp_path.iterdir()} == {0}


def test_lines_are_checked_in_pages(tmp_path):
    async def scenario(store, runner, app, batch, clock, end):
        calls, check_lines = [], store.check_lines
        store.check_lines = lambda *args: calls.append(args) or check_lines(*args)
        await end()
        assert len(calls) == 3

    found = held(tmp_path, ["a" * (1 << 20), "b" * (1 << 20), "c"], scenario, max_body_bytes=1 << 20)
    assert (found["status"], [one["line"] for one in found["errors"]["data"]]) == ("failed", [1, 2])


def test_expired_files_are_removed_hourly(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_runner, "_CLEAN_SECONDS", 0.001)
    monkeypatch.setattr("sensorium.server.store._VACUUM_PAGES", 1)

    async def scenario(store, runner, app, batch, clock, end):
        app.go_on.set()
        async with runner.running():
            await until(lambda: not runner._tasks)
            store.add_file("", "large", [b"x" * 50_000], KEPT_SECONDS)
            clock[0] += 2 * KEPT_SECONDS
            await until(lambda: store._rows("SELECT count(*) FROM pieces") == [(0,)])
            await until(lambda: store._rows("PRAGMA freelist_count") == [(0,)])
        return

    with pytest.raises(HttpError, match="no batch"):
        held(tmp_path, "a", scenario)


def test_a_download_says_its_size(stored):
    client = stored[0]
    file = upload(client, line("a"), line("b"))
    with httpx.Client(headers={"Authorization": "Bearer one"}, timeout=LONG) as http:
        url = f"{client.base_url}files/{file.id}/content"
        for response in http.get(url), http.head(url):
            assert response.headers["content-length"] == str(file.bytes)


def test_a_file_that_is_removed_cuts_its_download(tmp_path):
    async def run(store):
        name = store.add_file("", "x", [b"1" * (1 << 20), b"2"], KEPT_SECONDS)["id"]
        server = SimpleNamespace(store=store)
        scope = {"type": "http", "method": "GET", "app": SimpleNamespace(state=SimpleNamespace(server=server)), TENANT: None}
        head = await batches.file_content(name, Request({**scope, "method": "HEAD"}))
        assert head.headers["content-length"] == str((1 << 20) + 1)
        parts = (await batches.file_content(name, Request(scope))).body_iterator
        assert len(await anext(parts)) == 1 << 20
        store.delete_file("", name)
        with pytest.raises(HttpError, match="removed"):
            await anext(parts)

    with closing(Store(ServerConfig(data_dir=str(tmp_path)))) as store:
        asyncio.run(run(store))


def test_limits_of_a_key(tmp_path):
    with closing(Store(ServerConfig(data_dir=str(tmp_path), max_files=2, max_stored_bytes=10))) as store:
        store.add_file("a", "x", [b"12345"], KEPT_SECONDS)
        with pytest.raises(HttpError, match="max_stored_bytes"):
            store.add_file("a", "x", [b"123456"], KEPT_SECONDS)
        store.add_file("a", "x", [b"12345"], KEPT_SECONDS)
        with pytest.raises(HttpError, match="max_files"):
            store.add_file("a", "x", [b""], KEPT_SECONDS)
        assert store.add_file("b", "x", [b"12345"], KEPT_SECONDS)["bytes"] == 5


def test_results_count_against_the_limit_of_a_key(tmp_path):
    names, room = [*"abcd"], 600

    async def scenario(store, runner, app, batch, clock, end):
        app.go_on.set()
        await end()
        with pytest.raises(HttpError, match="max_stored_bytes") as full:
            store.add_file("", "x", [b"x" * room], KEPT_SECONDS)
        assert (full.value.status, full.value.code) == (403, "storage_full")
        stored = sum(one["bytes"] for one in store.files("", None, 10, True, None))
        assert store._room("") == store._config.max_stored_bytes - stored > 0

    size = sum(len(line(name, messages=name)) + 1 for name in names)
    found = held(tmp_path, names, scenario, batch_requests=1, max_stored_bytes=size + room)
    assert (found["status"], found["errors"]["data"][0]["code"]) == ("failed", "storage_full")
    counts = found["request_counts"]
    assert counts["completed"] + counts["failed"] == 4
    assert 0 < counts["completed"] < 4
    with closing(Store(ServerConfig(data_dir=str(tmp_path)))) as store:
        assert len(read(store, found["output_file_id"])) == counts["completed"]


def test_errors_of_an_ended_batch_need_room(tmp_path):
    async def scenario(store, runner, app, batch, clock, end):
        store.start_batch(batch, CheckedLines({"a": 0}))
        store.end_batch(batch, "cancelled", lambda _: b"x" * 100)

    found = held(tmp_path, "a", scenario, max_stored_bytes=len(line("a", messages="a")) + 100)
    assert (found["status"], found["errors"]["data"][0]["code"]) == ("cancelled", "storage_full")
    assert (found["error_file_id"], found["request_counts"]["failed"]) == (None, 1)


def test_batches_that_have_ended_do_not_count(tmp_path):
    with closing(Store(ServerConfig(data_dir=str(tmp_path), max_files=3))) as store:
        request = {**BATCH, "input_file_id": store.add_file("", "x", [b"x"], KEPT_SECONDS)["id"]}
        made = []
        for _ in range(5):
            made.append(store.add_batch("", request, KEPT_SECONDS)["id"])
            with pytest.raises(HttpError, match="in progress"):
                store.add_batch("", request, KEPT_SECONDS)
            store.start_batch(made[-1], CheckedLines())
        assert [one["id"] for one in store.batches("", None, 10)] == made[:0:-1]


def test_a_database_of_the_first_version_is_opened(tmp_path):
    config = ServerConfig(data_dir=str(tmp_path))
    with closing(Store(config)) as store:
        store._database.executescript("ALTER TABLE batches DROP COLUMN bytes; PRAGMA user_version=1;")
    with closing(Store(config)) as store:
        request = {**BATCH, "input_file_id": store.add_file("", "x", [b"x"], KEPT_SECONDS)["id"]}
        assert store.add_batch("", request, KEPT_SECONDS)["status"] == "validating"


def test_one_server_uses_a_folder(tmp_path):
    config = ServerConfig(data_dir=str(tmp_path / "new"))
    with closing(Store(config)), pytest.raises(ConfigError, match="data_dir"):
        Store(config)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="data_dir"):
        Store(ServerConfig(data_dir=str(tmp_path / "file")))


def test_a_large_line_is_refused():
    with pytest.raises(HttpError, match="max_body_bytes"):
        _check_line(ServerConfig(max_body_bytes=10), line("a"), BATCH)


SERVER = """
import asyncio, json, os, sys
from sensorium.server.batch_runner import BatchRunner
from sensorium.server.config import ServerConfig
from sensorium.server.store import Store

async def app(scope, receive, send):
    name = json.loads((await receive())["body"])["messages"]
    await asyncio.sleep(0)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(name).encode()})

async def run():
    config = ServerConfig(data_dir=sys.argv[1], batch_requests=4)
    store = Store(config)
    runner = BatchRunner(store, config, app)
    finish = store.finish_line
    def counted(*args):
        finish(*args)
        print("line", flush=True)
    store.finish_line = counted
    async with runner.running():
        while runner._tasks:
            await asyncio.gather(*runner._tasks.values())
    print("end", flush=True)

asyncio.run(run())
"""


def test_a_killed_server_neither_loses_nor_repeats_lines(tmp_path):
    chance, count = random.Random(0), 150
    config = ServerConfig(data_dir=str(tmp_path))
    with closing(Store(config)) as store:
        file = store.add_file("", "in", [line(str(n), messages=str(n)) + b"\n" for n in range(count)], KEPT_SECONDS)
        batch = store.add_batch("", {**BATCH, "input_file_id": file["id"]}, KEPT_SECONDS)["id"]
    finished, kills = dict[int, bytes](), 0
    while True:
        with subprocess.Popen([sys.executable, "-c", SERVER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
            for _ in range(chance.randrange(40)):
                if run.stdout.readline() != "line\n":
                    break
            pause = threading.Event()
            pause.wait(chance.random() / 100)  # anywhere in a transaction
            run.kill()
        kills += 1
        with closing(Store(config)) as store:
            rows = store._rows(
                "SELECT pieces.number, data FROM pieces JOIN batches ON file = output WHERE batches.id = ?", batch
            )
            now = {number: bytes(data) for number, data in rows}
            assert finished.items() <= now.items()  # the same results, ids included
            finished = now
            left = {number for (number,) in store._rows("SELECT number FROM unfinished")}
            found = store.batch("", batch)
            if found["status"] == "completed":
                break
            if found["status"] == "in_progress":
                assert left | finished.keys() == set(range(count))
                assert not left & finished.keys()
                assert found["request_counts"]["completed"] == len(finished)
    assert kills > 1
    assert len(finished) == count
    with closing(Store(config)) as store:
        answers = [json.loads(one) for one in read(store, found["output_file_id"])]
    assert [(one["custom_id"], one["response"]["body"]) for one in answers] == [(str(n), str(n)) for n in range(count)]


@pytest.mark.full
def test_the_command_is_killed(tmp_path):
    """The same with the real command, whose engine is another process."""
    chance, count, batch, kills = random.Random(1), 40, None, 0
    words = [sys.executable, "-m", "sensorium", "serve", str(TINY), "--port", "0", "--max-model-len", "256"]
    while True:
        with subprocess.Popen([*words, "--data-dir", str(tmp_path)], stderr=subprocess.PIPE, text=True) as run:
            url = run.stderr.readline().split()[-1]
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LONG) as client:
                if batch is None:
                    file = upload(client, *[line(str(n), ignore_eos=True, max_tokens=30) for n in range(count)])
                    batch = client.batches.create(input_file_id=file.id, **BATCH)
                most = client.batches.retrieve(batch.id).request_counts.completed + chance.randrange(1, 15)
                wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= min(most, count))  # noqa: B023
                if client.batches.retrieve(batch.id).request_counts.completed == count:
                    answers = results(client, ended(client, batch).output_file_id)
                    run.terminate()
                    break
            os.kill(run.pid, signal.SIGKILL)
            kills += 1
    assert kills > 1
    assert [one["custom_id"] for one in answers] == [str(n) for n in range(count)]
