"""The batch runner: which lines run when, retries, cancellation and expiry."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing

import pytest
from batch_files import BATCH, held, line, read, until
from sensorium.server import batch_runner
from sensorium.server.batch_runner import BatchRunner, _check_line
from sensorium.server.config import ServerConfig
from sensorium.server.errors import HttpError
from sensorium.server.guard import Guard
from sensorium.server.large_json import member
from sensorium.server.response_store import KEPT_SECONDS
from sensorium.server.store import WINDOW_SECONDS, Store
from waiting import LONG


def test_few_lines_are_in_progress(tmp_path):
    async def scenario(store, runner, app, batch, clock, end):
        async with runner.running():
            await until(lambda: len(app.started) == 3)
            app.go_on.set()
            await until(lambda: not runner._tasks)

        assert app.started == [*"abcdefgh"]
        assert app.most == 3

    assert held(tmp_path, "abcdefgh", scenario, batch_requests=3)["request_counts"]["completed"] == 8


@pytest.mark.parametrize(("limit", "most"), [(5, 2), (3, 1), (0.5, 1)])
def test_lines_count_as_bodies_while_they_are_held(tmp_path, monkeypatch, limit, most):
    """Lines take at most half of the bytes; further ones wait until there is room. One line always has room."""
    monkeypatch.setattr("sensorium.server.batch_runner._RETRY_SECONDS", 0.001)
    size = len(line("a", messages="a")) + 1

    async def scenario(store, runner, app, batch, clock, end):
        guard = Guard(app, ServerConfig(max_total_body_bytes=size * 4), body_bytes=runner._body_bytes)
        run = asyncio.ensure_future(end())
        await until(lambda: len(app.started) == most)
        await asyncio.sleep(0.05)
        assert runner._body_bytes.count == most * size
        with pytest.raises(HttpError, match="max_total_body_bytes"):
            guard.check_size(0, size * 4)
        app.go_on.set()
        await run
        assert app.most == most
        assert runner._body_bytes.count == 0

    found = held(tmp_path, "abcdef", scenario, max_total_body_bytes=int(limit * size))
    assert found["request_counts"]["completed"] == 6


@pytest.mark.parametrize(("limit", "most"), [(100_000, 2), (5_000, 1), (100, 1)])
def test_files_of_lines_count_until_their_response(tmp_path, monkeypatch, limit, most):
    """Like lines, they take at most half of the bytes, and wait; one line always has room, also for a large file."""
    monkeypatch.setattr("sensorium.server.batch_runner._RETRY_SECONDS", 0.001)
    size = 2_000

    async def scenario(store, runner, app, batch, clock, end):
        async def with_file(scope, receive, send):
            await runner.hold_files(scope, size)
            await app(scope, receive, send)

        runner._app = with_file
        run = asyncio.ensure_future(end())
        await until(lambda: len(app.started) == most)
        await asyncio.sleep(0.05)
        assert most * size <= runner._body_bytes.count <= most * size + 2 * 200
        app.go_on.set()
        await run
        assert (app.most, runner._body_bytes.count, runner._held_bytes, runner._with_files) == (most, 0, 0, 0)

    found = held(tmp_path, "abcd", scenario, max_total_body_bytes=limit, batch_requests=2)
    assert found["request_counts"]["completed"] == 4


def test_further_files_of_a_line_count_until_its_response(monkeypatch):
    """A line that has files waits for those of others, not for its own, and not for lines that wait for more as it does."""
    monkeypatch.setattr("sensorium.server.batch_runner._RETRY_SECONDS", 0.001)

    async def scenario():
        runner = BatchRunner(None, ServerConfig(max_total_body_bytes=1000), None)
        alone, first, second, third = {}, {}, {}, {}
        await runner.hold_files(alone, 400)
        await runner.hold_files(alone, 300)
        assert (runner._body_bytes.count, runner._with_files) == (700, 1)
        runner._release_files(alone)
        await runner.hold_files(first, 200)
        await runner.hold_files(second, 250)
        waits = asyncio.ensure_future(runner.hold_files(first, 300))
        new = asyncio.ensure_future(runner.hold_files(third, 300))
        await asyncio.sleep(0.01)
        assert not waits.done()
        await runner.hold_files(second, 250)
        await asyncio.sleep(0.01)
        assert not waits.done()
        runner._release_files(second)
        await waits
        assert not new.done()
        runner._release_files(first)
        await new
        runner._release_files(third)
        assert (runner._body_bytes.count, runner._held_bytes, runner._with_files, runner._for_more) == (0, 0, 0, 0)

    asyncio.run(asyncio.wait_for(scenario(), LONG))


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


@pytest.mark.parametrize("code", ["model_load_failed", "overloaded"])
def test_a_batch_waits_for_a_model_that_cannot_be_loaded_for_a_while(tmp_path, monkeypatch, code):
    monkeypatch.setattr("sensorium.server.batch_runner._RETRY_SECONDS", 0.001)

    async def scenario(store, runner, app, batch, clock, end):
        app.codes = {"a": [code] * 9}
        app.go_on.set()
        await end()
        assert app.started.count("a") == 10

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
    assert member(b" { } ", name="body") == b""
    assert member(body, "body") == value.encode()
    assert json.loads(member(body, "body")) == json.loads(body)["body"]


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
    monkeypatch.setattr("sensorium.server.database._VACUUM_PAGES", 1)

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


@pytest.mark.parametrize("name", ["stream", "background"])
def test_lines_without_a_complete_response_are_refused_by_name(name):
    assert _check_line(ServerConfig(), line("a", **{name: False}), BATCH) == "a"
    with pytest.raises(HttpError) as caught:
        _check_line(ServerConfig(), line("a", **{name: True}), BATCH)
    assert (caught.value.param, caught.value.code) == (f"body.{name}", "invalid_request")
    assert caught.value.param == f"body.{name}"


def test_a_large_line_is_refused():
    with pytest.raises(HttpError, match="max_body_bytes"):
        _check_line(ServerConfig(max_body_bytes=10), line("a"), BATCH)
