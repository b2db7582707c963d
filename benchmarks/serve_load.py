"""Load on `sensorium serve`: fairness and memory, a killed engine, malformed requests, and /health while the engine is busy.

    python -m benchmarks.serve_load --minutes 10 --write

Each part starts the command with tiny-vl and asks it over HTTP. The exit status is 1 if a
target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from .throughput import ROOT, machine, put

MODEL = ROOT / "assets" / "tiny-vl"
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
KINDS = ("values", "json", "type", "image", "path", "fields")


@dataclass
class Part:
    """A row of the table. `holds`: each target, and whether it was reached."""

    name: str
    result: str
    holds: dict[str, bool] = field(default_factory=dict)


@contextmanager
def serving(*options: str, model: Path = MODEL) -> Iterator[tuple[str, int]]:
    """Serve a model by the command, and yield (URL, process id)."""
    length = ["--max-model-len", "1024"] if model == MODEL else []
    words = [sys.executable, "-m", "sensorium", "serve", str(model), "--port", "0", *length, *options]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        try:
            line = run.stderr.readline()
            assert "is served on" in line, line
            # a server whose log nobody reads stops once the pipe is full
            reader = threading.Thread(target=deque, args=(run.stderr, 0), daemon=True)
            reader.start()
            yield line.split()[-1], run.pid
            run.terminate()
            reader.join()  # it must not read the pipe once that is closed
        finally:
            run.terminate()


def image_body(seed: int, max_tokens: int = 16) -> bytes:
    """Return a chat request about an image that no other seed has."""
    data = io.BytesIO()
    Image.frombytes("RGB", (64, 64), random.Random(seed).randbytes(64 * 64 * 3)).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": max_tokens, "ignore_eos": True}).encode()


@dataclass
class Load:
    """Clients that each send one request after another, with distinct images, until `end`."""

    url: str
    clients: int
    end: float
    served: Counter[int] = field(default_factory=Counter)
    failed: list[tuple[float, float, int, str]] = field(default_factory=list)  # sent, answered, status, body
    answered: list[tuple[float, float]] = field(default_factory=list)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as http:
            await asyncio.gather(*(self._client(http, index) for index in range(self.clients)))

    async def _client(self, http: httpx.AsyncClient, index: int) -> None:
        for number in itertools.count():
            sent = time.monotonic()
            if sent >= self.end:
                return
            try:
                response = await http.post(CHAT, content=image_body(index + self.clients * number), headers=JSON)
                status, text = response.status_code, response.text
            except httpx.TransportError as error:
                status, text = 0, repr(error)
            now = time.monotonic()
            if status == 200:
                self.served[index] += 1
                self.answered.append((sent, now))
            else:
                self.failed.append((sent, now, status, text))
                await asyncio.sleep(0.05)

    @property
    def fairness(self) -> float:
        """Answered requests of the most served client, divided by those of the least served one."""
        return max(self.served.values(), default=0) / max(min(self.served[index] for index in range(self.clients)), 1)


async def fair(seconds: float, clients: int = 64) -> Part:
    """Serve clients with distinct images, and watch the memory of all processes.

    The caches of processed items and of encoder rows are small, so that they are full early. An image of 64x64 pixels adds
    8 KiB of encoder rows, so the default 128 MiB would be full only after 16,000 images.
    """
    with serving("--mm-processor-cache-bytes", str(16 << 20), "--encoder-cache-bytes", str(4 << 20)) as (url, pid):
        load = Load(url, clients, time.monotonic() + seconds)
        memory: list[float] = []

        async def watch() -> None:
            while True:
                memory.append(sum(map(memory_mb, tree(pid))))
                await asyncio.sleep(min(1.0, seconds / 20))

        watcher = asyncio.ensure_future(watch())
        await load.run()
        watcher.cancel()
    fourth = len(memory) // 4 or 1
    early, late = statistics.median(memory[fourth : 2 * fourth] or memory), statistics.median(memory[-fourth:])
    served = sum(load.served.values())
    result = f"{served} served, {len(load.failed)} errors, max/min {load.fairness:.2f}, {early:.0f} MB to {late:.0f} MB"
    holds = {"no errors": not load.failed, "max/min <= 1.5": load.fairness <= 1.5, "flat memory": late <= 1.05 * early + 20}
    for *_, status, text in load.failed[:5]:
        print(f"error: {status} {text}", file=sys.stderr)
    return Part(f"{clients} clients with distinct images, {seconds / 60:.3g} min", result, holds)


async def killed(seconds: float, clients: int = 16) -> Part:
    """Kill the engine's process in the middle of the load."""
    with serving() as (url, pid):
        load = Load(url, clients, time.monotonic() + seconds)
        running = asyncio.ensure_future(load.run())
        await asyncio.sleep(seconds / 3)
        engine = engine_of(pid)
        kill = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        await running
    again = min((now for sent, now in load.answered if sent > kill), default=float("inf")) - kill
    noticed = min((answered for _, answered, *_ in load.failed), default=kill)  # some ms later, when its pipe is closed
    in_flight = sum(1 for sent, *_ in load.failed if sent <= noticed)
    late = [entry for entry in load.failed if entry[0] > noticed]
    typed = all(status == 503 and "error" in json.loads(text) for _, _, status, text in load.failed)
    result = f"served again after {again:.1f} s, {in_flight} requests in flight failed, {len(late)} later ones"
    holds = {"served again": again < float("inf"), "served again in 5 s": again < 5}
    holds |= {"only those in flight failed": not late, "some were in flight": in_flight > 0, "each with an error": typed}
    return Part(f"engine killed under {clients} clients", result, holds)


async def kills(seconds: float, clients: int = 64, num_kills: int = 9) -> Part:
    """Kill the engine's process again and again in the load: requests answered and lost, and seconds until an answer."""
    with serving("--engine-restarts", str(num_kills)) as (url, pid):
        load = Load(url, clients, time.monotonic() + seconds)
        running, pauses = asyncio.ensure_future(load.run()), []
        for _ in range(num_kills):
            await asyncio.sleep(seconds / (num_kills + 1))
            os.kill(engine_of(pid), signal.SIGKILL)
            killed_at = time.monotonic()
            while not any(sent > killed_at for sent, _ in load.answered):
                await asyncio.sleep(0.05)
            pauses.append(time.monotonic() - killed_at)
        await running
    times = statistics.quantiles([now - sent for sent, now in load.answered], n=100)
    typed = all(status == 503 and "error" in json.loads(text) for _, _, status, text in load.failed)
    result = f"{len(load.answered)} answered, {len(load.failed)} lost, p50 {times[49]:.1f} s, p99 {times[98]:.1f} s, "
    result += f"served again after at most {max(pauses):.1f} s"
    holds = {"at most one lost per client and kill": len(load.failed) <= clients * num_kills, "each with an error": typed}
    return Part(f"engine killed {num_kills} times under {clients} clients, {seconds / 60:.3g} min", result, holds)


def malformed(seed: int) -> tuple[str, dict[str, str], bytes]:
    """Return path, headers and body of a request that must be refused."""
    chance = random.Random(seed)
    body = json.loads(image_body(seed, 2))
    kind = KINDS[seed % len(KINDS)]
    if kind == "values":
        name = chance.choice(["max_tokens", "temperature", "n", "top_p", "messages", "stop", "seed", "logit_bias"])
        body[name] = chance.choice([{"a": []}, [[]], -(2**70), [None]])
    elif kind == "json":
        text = json.dumps(body).encode()
        return CHAT, JSON, text[: chance.randrange(len(text))]
    elif kind == "type":
        return CHAT, {"Content-Type": "text/plain"}, json.dumps(body).encode()
    elif kind == "image":
        garbage = base64.b64encode(b"\x89PNG\r\n\x1a\n" + chance.randbytes(200)).decode()
        body["messages"][0]["content"][0]["image_url"]["url"] = f"data:image/png;base64,{garbage}"
    elif kind == "path":
        return chance.choice(["/v1/nothing", "/v1/chat", "/%00", "/v1/models/../../etc"]), JSON, b"{}"
    else:
        body[chance.choice(["unknown", "priority", "chat_template", "max_token"])] = chance.choice([1, "x", []])
    return CHAT, JSON, json.dumps(body).encode()


async def mixed(count: int, clients: int = 32) -> Part:
    """Send good and malformed requests in turn."""
    statuses: Counter[tuple[str, int]] = Counter()
    numbers = iter(range(count))
    with serving() as (url, pid):
        engine = engine_of(pid)
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:

            async def client() -> None:
                for number in numbers:
                    good = number % 2 == 0
                    path, headers, body = (CHAT, JSON, image_body(number, 4)) if good else malformed(number // 2)
                    try:
                        status = (await http.post(path, content=body, headers=headers)).status_code
                    except httpx.TransportError:
                        status = 0
                    statuses["good" if good else KINDS[number // 2 % len(KINDS)], status] += 1

            await asyncio.gather(*(client() for _ in range(clients)))
            alive = (await http.get("/health")).status_code == 200
        restarted = not alive or engine_of(pid) != engine
    failed = sum(times for (kind, status), times in statuses.items() if kind == "good" and status != 200)
    wrong = {key: times for key, times in statuses.items() if key[0] != "good" and not 400 <= key[1] < 500}
    result = f"{failed} good ones failed, {int(restarted)} restarts, {sum(wrong.values())} malformed ones without a 4xx"
    holds = {
        "no good one failed": not failed,
        "no restart": not restarted,
        "malformed ones refused": not wrong,
    }
    return Part(f"{count} requests, every second one malformed", result, holds)


async def health(seconds: float, clients: int = 64) -> Part:
    """Measure /health while the engine is saturated."""
    times: list[float] = []
    with serving() as (url, _):
        load = Load(url, clients, time.monotonic() + seconds)
        running = asyncio.ensure_future(load.run())
        script = (sys.executable, "-c", _PROBE, f"{url}/health", str(seconds * 0.8))
        await asyncio.sleep(seconds / 10)
        probe = await asyncio.create_subprocess_exec(*script, stdout=subprocess.PIPE)
        times = json.loads((await probe.communicate())[0])
        await running
    centiles = statistics.quantiles(times, n=100)
    result = f"p50 {1e3 * centiles[49]:.1f} ms, p99 {1e3 * centiles[98]:.1f} ms, max {1e3 * max(times):.1f} ms of {len(times)}"
    return Part(f"/health under {clients} clients", result, {"p99 < 50 ms": centiles[98] < 0.05})


_PROBE = """
import http.client, json, sys, time
from urllib.parse import urlparse
where, times = urlparse(sys.argv[1]), []
connection, end = http.client.HTTPConnection(where.netloc), time.monotonic() + float(sys.argv[2])
while time.monotonic() < end or len(times) < 20:
    start = time.monotonic()
    connection.request("GET", where.path)
    response = connection.getresponse()
    response.read()
    assert response.status == 200
    times.append(time.monotonic() - start)
    time.sleep(0.02)
print(json.dumps(times))
"""
"""Code of the probe, which runs in its own process so that the clients of the load do not delay its clock."""


def tree(pid: int) -> list[int]:
    """Return a process and its children (Linux)."""
    found = [pid]
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return found


def engine_of(pid: int) -> int:
    """Return the engine's process of a server. One in reserve is younger."""
    return min(one for one in tree(pid) if b"engine.core.server" in Path(f"/proc/{one}/cmdline").read_bytes())


def memory_mb(pid: int) -> float:
    """Return the memory of a process without pages of files, whose share depends on what else runs the same libraries.

    A page that n processes share counts 1/n.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) / 1024


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Load on sensorium serve.")
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of the parts fair and kills")
    parser.add_argument("--requests", type=int, default=10_000, help="requests of the part with malformed requests")
    parser.add_argument("--part", choices=["fair", "killed", "kills", "mixed", "health"], action="append")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args(words)
    parts: dict[str, Callable[[], Awaitable[Part]]] = {
        "fair": lambda: fair(60 * args.minutes),
        "killed": lambda: killed(30),
        "kills": lambda: kills(60 * args.minutes),
        "mixed": lambda: mixed(args.requests),
        "health": lambda: health(60),
    }
    rows, ok = [], True
    for name in args.part or parts:
        part: Any = asyncio.run(parts[name]())  # type: ignore[arg-type]
        wrong = [claim for claim, holds in part.holds.items() if not holds]
        ok = ok and not wrong
        rows.append(f"| {part.name} | {part.result} | {', '.join(part.holds)} | {', '.join(wrong) or 'none'} |")
        print(rows[-1], flush=True)
    if args.write:
        head = ["| load | result | targets | missed |", "|---|---|---|---|"]
        put("Load on the server", "\n".join([machine(), "", *head, *rows]))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
