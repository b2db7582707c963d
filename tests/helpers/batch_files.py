"""Lines of batch files, batches through a client, and a batch runner whose lines wait for the test."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing

from sensorium.server.batch_runner import BatchRunner
from sensorium.server.config import ServerConfig
from sensorium.server.guard import TENANT
from sensorium.server.store import KEPT_SECONDS, Store
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


def read(store, file):
    found, after = store.content(file, -1)
    while part := store.content(file, after)[0]:
        found, after = found + part, store.content(file, after)[1]
    return found.splitlines()
