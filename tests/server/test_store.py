"""The database of files and batches: privacy, limits of a key, and versions."""

from __future__ import annotations

import asyncio
from contextlib import closing
from types import SimpleNamespace

import pytest
from batch_files import BATCH, held, line, read
from fastapi import Request
from sensorium.callers.errors import ConfigError
from sensorium.server.config import ServerConfig
from sensorium.server.endpoints import batches
from sensorium.server.errors import HttpError
from sensorium.server.guard import TENANT
from sensorium.server.store import KEPT_SECONDS, CheckedLines, Store


def test_the_database_is_private(tmp_path):
    tmp_path.chmod(0o755)
    with closing(Store(ServerConfig(data_dir=str(tmp_path)))):
        assert {path.stat().st_mode & 0o77 for path in tmp_path.iterdir()} == {0}


def test_a_file_that_is_removed_cuts_its_download(tmp_path):
    async def run(store):
        name = store.add_file("", "x", [b"1" * (1 << 20), b"2"], KEPT_SECONDS)["id"]
        services = SimpleNamespace(store=store)
        app = SimpleNamespace(state=SimpleNamespace(services=services))
        scope = {"type": "http", "method": "GET", "app": app, TENANT: None}
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
