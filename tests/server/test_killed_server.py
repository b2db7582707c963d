"""A server that is killed, and started again, neither loses nor repeats lines of its batches."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from contextlib import closing, contextmanager

import openai
import pytest
from batch_files import BATCH, ended, line, read, results, upload
from http_server import TINY
from sensorium.server.config import ServerConfig
from sensorium.server.store import KEPT_SECONDS, Store
from waiting import LONG, wait_until

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


@contextmanager
def killed_at_the_end(run):
    """Kill a process also if the test fails, which would wait for it otherwise."""
    try:
        yield
    finally:
        run.kill()
        run.wait()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4, 5))])
def test_the_command_is_killed(seed, tmp_path):
    """The same with the real command, whose engine is another process."""
    chance, count, batch, kills = random.Random(seed), 40, None, 0
    words = [sys.executable, "-m", "sensorium", "serve", str(TINY), "--port", "0", "--max-model-len", "256"]
    words += ["--access-log", "false"]  # nobody reads the pipe, which would be full after some hundred lines
    while True:
        run = subprocess.Popen([*words, "--data-dir", str(tmp_path)], stderr=subprocess.PIPE, text=True)
        with closing(run.stderr), killed_at_the_end(run):
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
        kills += 1
    assert kills > 1
    assert [one["custom_id"] for one in answers] == [str(n) for n in range(count)]
