"""Faults of a server on purpose: what is logged, counted and answered, and in how many seconds it serves again.

python -m benchmarks.drills            # prints the table
python -m benchmarks.drills --write    # and puts it into benchmarks/README.md

The drill with a full disk mounts a tmpfs in a namespace of its own, which needs root or user namespaces (Linux). That with an
expired certificate needs the command openssl.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import resource
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from PIL import Image

from .expired_certificate import Files, make_certificate
from .throughput import ROOT, machine

MODEL = ROOT / "assets" / "tiny-vl"
IMAGE = ROOT / "assets" / "media" / "receipt1.png"
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- drills -->\n", "<!-- /drills -->\n"
CHAT = "/v1/chat/completions"
WAIT = 240.0  # seconds until a drill counts as failed
_CLOCK = """
import os, sys, time
_read = time.time
def _jumped():
    with open(os.environ["DRILL_CLOCK"]) as offset:
        return _read() + float(offset.read() or 0)
if any(word == "serve" or "core.server" in word for word in sys.orig_argv):  # workers may not open files
    time.time = _jumped
"""
"""Code of sitecustomize.py, which Python runs in the server's processes: the time jumps by the number in a file."""


@dataclass(frozen=True)
class Report:
    """The result of a drill: a row of the table."""

    drill: str
    answered: str
    logged: str
    counted: str
    noticed: float | None = None
    served_again: float | None = None

    @property
    def row(self) -> str:
        seconds = ("-" if value is None else f"{value:.2f} s" for value in (self.noticed, self.served_again))
        return f"| {' | '.join((self.drill, self.answered, self.logged, self.counted, *seconds))} |\n"


class Drilled:
    """A server in another process, with the lines of its log and when each came."""

    def __init__(self, run: subprocess.Popen[str]) -> None:
        assert run.stderr is not None
        self.run, self.lines = run, list[tuple[float, dict[str, str]]]()
        self.url = json.loads(run.stderr.readline())["message"].split()[-1]
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.run.stderr is not None
        for line in self.run.stderr:
            if line.startswith("{"):
                self.lines.append((time.monotonic(), json.loads(line)))

    def wait_for_line(self, text: str) -> tuple[float, str]:
        """Return when a line with this text came, and its message."""
        wait_until(lambda: any(text in line["message"] for _, line in self.lines))
        return next((at, line["message"]) for at, line in self.lines if text in line["message"])

    def chat(self, max_tokens: int = 3, stream: bool = False, image: str | None = None) -> httpx.Response:
        return httpx.post(f"{self.url}{CHAT}", json=chat_body(max_tokens, stream, image), timeout=WAIT)

    def counted(self, *names: str) -> str:
        text = httpx.get(f"{self.url}/metrics", timeout=WAIT).text
        return ", ".join(line for line in text.splitlines() if line.startswith(names))

    @property
    def deaths(self) -> str:
        return self.counted("sensorium_engine_deaths_total", "sensorium_engine_restarts_total")

    @property
    def engine(self) -> int:
        """The engine's process."""
        children = [
            int(pid) for path in Path(f"/proc/{self.run.pid}/task").glob("*/children") for pid in path.read_text().split()
        ]
        engines = [pid for pid in children if b"core.server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return min(engines)  # one in reserve is younger

    def kill_engine(self) -> float:
        os.kill(self.engine, signal.SIGKILL)
        return time.monotonic()


@contextmanager
def serving(*options: str, before: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Iterator[Drilled]:
    """Serve the shipped model. `before`: a command that runs the server's command."""
    words = [sys.executable, "-m", "sensorium", "serve", str(MODEL), "--port", "0", "--max-model-len", "2048", *options]
    words = [*before, *words, "--log-format", "json"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}) as run:
        try:
            drilled = Drilled(run)
            drilled.chat()
            yield drilled
        finally:
            run.kill()


def chat_body(max_tokens: int, stream: bool = False, image: str | None = None) -> dict[str, Any]:
    """Return a request of chat. `image`: the URL of an image in it."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "a"}]
    if image is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": image}})
    return {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }


def wait_until(true: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT
    while not true():
        if time.monotonic() > end:
            raise TimeoutError("the drill has failed")
        time.sleep(0.02)


def kill(busy: bool) -> Report:
    """Kill the engine while it is idle, or while it answers a stream and a plain request."""
    answers: list[str] = []
    with serving() as server:
        callers = _callers(server, 1800, answers)
        for caller in callers if busy else ():
            caller.start()
        if busy:
            wait_until(lambda: "} 2.0" in server.counted("sensorium_requests_running"))
        killed = server.kill_engine()
        noticed, message = server.wait_for_line("SIGKILL")
        after = _outcome(server.chat())
        served = time.monotonic()
        for caller in callers if busy else ():
            caller.join()
        counted = server.deaths
    answered = "; ".join([*sorted(answers), f"next request: {after}"])
    return Report(f"kill {'busy' if busy else 'idle'} engine", answered, message, counted, noticed - killed, served - killed)


def kill_too_often() -> Report:
    """Kill the engine once more than it is restarted."""
    with serving("--engine-restarts", "0") as server:
        killed = server.kill_engine()
        noticed, message = server.wait_for_line("SIGKILL")
        code = server.run.wait(WAIT)
    return Report("kill engine after the last restart", f"exit code {code}", message, "-", noticed - killed)


def drain() -> Report:
    """End the server while it answers a stream and a plain request that outlast drain_seconds."""
    answers: list[str] = []
    with serving("--drain-seconds", "0.5") as server:
        callers = _callers(server, 1800, answers)
        for caller in callers:
            caller.start()
        wait_until(lambda: "} 2.0" in server.counted("sensorium_requests_running"))
        server.run.terminate()
        for caller in callers:
            caller.join()
        code = server.run.wait(WAIT)
        _, message = server.wait_for_line("time limit")
    return Report("drain", "; ".join([*sorted(answers), f"exit code {code}"]), message, "-")


def slow_reader() -> Report:
    """Read nothing of a long stream, until the server closes the connection."""
    with serving("--send-seconds", "1") as server:
        url, body = httpx.URL(server.url), {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1800}
        body |= {"ignore_eos": True, "stream": True, "n": 64, "logprobs": True, "top_logprobs": 20}
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((url.host, url.port))
            client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            wait_until(lambda: any(line.get("bytes_in") == len(data) for _, line in server.lines))
        line = next(line for _, line in server.lines if line.get("bytes_in") == len(data))
        after = _outcome(server.chat())
    return Report("slow reader", f"disconnected; next request: {after}", f"outcome {line['outcome']}", "-")


def out_of_memory() -> Report:
    """Limit the engine's memory to little more than it has, and send a request that needs more."""
    data = io.BytesIO()
    Image.frombytes("RGB", (1344, 1344), random.Random(0).randbytes(3 * 1344 * 1344)).save(data, "PNG")
    image = _data_url(data.getvalue())
    with serving() as server:
        pid = server.engine
        taken = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (taken, resource.RLIM_INFINITY))
        refused = _outcome(server.chat(image=image))
        at, alive = time.monotonic(), _outcome(httpx.get(f"{server.url}/health", timeout=WAIT))
        if Path(f"/proc/{pid}").exists():
            resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        after = _outcome(server.chat(image=image))
        served = time.monotonic()
        faults = [line["message"] for _, line in server.lines if line["level"] in ("error", "warning")]
        counted = server.deaths
    answered = f"{refused}; /health: {alive}; next request: {after}"
    return Report("out of memory in the engine", answered, "; ".join(faults), counted, served_again=served - at)


def _data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def full_disk() -> Report:
    """Fill the disk of `data_dir` during a batch, and free it again."""
    with TemporaryDirectory() as folder, serving(*_with_data(folder), before=_mounted(folder, "3m")) as server:
        ballast = Path(f"/proc/{server.run.pid}/root{folder}/ballast")
        upload = partial(_upload, server.url)
        batch = {"input_file_id": upload(20).json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        path = f"{server.url}/v1/batches/{httpx.post(f'{server.url}/v1/batches', json=batch, timeout=WAIT).json()['id']}"
        wait_until(lambda: httpx.get(path).json()["request_counts"]["completed"])
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            for size in 1 << 20, 4096, 1:
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass
        filled = time.monotonic()
        refused = _outcome(upload(2000))
        noticed, message = server.wait_for_line("interrupted")
        errors = httpx.get(path).json()["errors"]["data"][0]["code"]
        chats = _outcome(server.chat())
        ballast.unlink()
        freed = time.monotonic()
        wait_until(lambda: upload(2000).status_code == 200)
        served = time.monotonic()
        wait_until(lambda: httpx.get(path).json()["status"] == "completed")
        counts = httpx.get(path).json()["request_counts"]
        counted = server.counted('sensorium_http_requests_total{method="POST",model_name="tiny-vl",path="/v1/files"')
    lines = f"the batch's errors: {errors}, then completed with {counts['completed']} of {counts['total']} lines"
    answered = f"upload: {refused}; {lines}; chat meanwhile: {chats}"
    return Report("full disk", answered, message, counted, noticed - filled, served - freed)


def _with_data(folder: str) -> list[str]:
    return ["--data-dir", f"{folder}/data", "--batch-requests", "1"]


def _mounted(folder: str, size: str) -> list[str]:
    """Return a command that runs another one with a small tmpfs on a folder, which no other process sees."""
    user_flags = [] if os.getuid() == 0 else ["--map-root-user"]
    script = f'mount -t tmpfs -o size={size} none {shlex.quote(folder)} && exec "$@"'
    return ["unshare", *user_flags, "--mount", "sh", "-c", script, "sh"]


def _upload(url: str, num_lines: int) -> httpx.Response:
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": chat_body(20)})
        for number in range(num_lines)
    ]
    files = {"file": ("in.jsonl", "\n".join(lines).encode())}
    return httpx.post(f"{url}/v1/files", files=files, data={"purpose": "batch"}, timeout=WAIT)


def expired_certificate() -> Report:
    """Name an image at a host whose certificate has expired, and then has a new one."""
    with TemporaryDirectory() as folder:
        expired, valid = (make_certificate(Path(folder) / name, years) for name, years in (("old", (-2, -1)), ("new", (-1, 1))))
        trusted = Path(folder) / "trusted.pem"
        trusted.write_text(expired.certificate.read_text() + valid.certificate.read_text())
        media = json.dumps({"allow_private_hosts": True, "allowed_media_ports": None})
        with serving("--media", media, env={"SSL_CERT_FILE": str(trusted)}) as server:
            server.chat(image=_data_url(IMAGE.read_bytes()))  # starts the process that decodes
            with _https(expired) as url:
                first = server.chat(image=url)
                refused = f"{_outcome(first)} ({first.json()['error']['message']})"
            line = next(line for _, line in server.lines if line["message"] == "request" and line.get("status") == 400)
            with _https(valid) as url:
                start = time.monotonic()
                after = _outcome(server.chat(image=url))
                served = time.monotonic()
            counted = server.counted('sensorium_http_requests_total{method="POST",model_name="tiny-vl",path="/v1/chat')
    answered = f"{refused}; next request, with a new certificate: {after}"
    return Report("expired certificate of a media host", answered, f"outcome {line['outcome']}", counted, None, served - start)


@contextmanager
def _https(files: Files) -> Iterator[str]:
    """Serve an image with a certificate, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = IMAGE.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.socket = context.wrap_socket(http.socket, server_side=True)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"https://localhost:{http.server_port}/image.png"
        http.shutdown()


def clock_jump() -> Report:
    """Let the clock jump a day ahead and two days back while the server answers a stream and a plain request."""
    answers: list[str] = []
    with TemporaryDirectory() as folder:
        clock = Path(folder) / "offset"
        clock.write_text("0")
        Path(folder, "sitecustomize.py").write_text(_CLOCK)
        with serving(env={"PYTHONPATH": folder, "DRILL_CLOCK": str(clock)}) as server:
            callers = _callers(server, 300, answers)
            for caller in callers:
                caller.start()
            wait_until(lambda: "} 2.0" in server.counted("sensorium_requests_running"))
            jumped = time.monotonic()
            for days in 1, -1:
                clock.write_text(str(days * 86_400))
                answers.append(f"during the jump: {_outcome(server.chat())}")
            served = time.monotonic()
            for caller in callers:
                caller.join()
            lines = [line for _, line in server.lines[1:] if line["message"] != "request"]
            counted = server.deaths
    logged = "; ".join(line["message"] for line in lines) or "nothing but requests"
    return Report("clock jump", "; ".join(sorted(answers)), logged, counted, None, served - jumped)


def _callers(server: Drilled, max_tokens: int, answers: list[str]) -> list[threading.Thread]:
    """Return threads that send a plain request and one with a stream, and append their outcomes to `answers`."""
    return [
        threading.Thread(target=lambda stream=stream: answers.append(_outcome(server.chat(max_tokens, stream))))
        for stream in (False, True)
    ]


def _outcome(response: httpx.Response) -> str:
    """Return the status of a response, and the code of its error."""
    lines = [line for line in response.text.splitlines() if line]
    last = lines[-1].removeprefix("data: ")
    error = json.loads(last).get("error") if last.startswith("{") else None
    kind = "stream" if len(lines) > 1 else "plain"
    return f"{kind} {response.status_code}" + (f" {error['code']}" if error else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--drill", choices=DRILLS, action="append", help="only this one; may be repeated")
    args = parser.parse_args()
    table = "| drill | answered | logged | counted | noticed after | served again after |\n|---|---|---|---|---|---|\n"
    for name in args.drill or DRILLS:
        report = DRILLS[name]()
        print(report.row, end="", flush=True)
        table += report.row
    if args.write:
        text = README.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        README.write_text(f"{before}{BEGIN}{machine()}\n\n{table}{END}{after}")


DRILLS: dict[str, Callable[[], Report]] = {
    "idle": lambda: kill(False),
    "busy": lambda: kill(True),
    "last": kill_too_often,
    "memory": out_of_memory,
    "disk": full_disk,
    "certificate": expired_certificate,
    "drain": drain,
    "reader": slow_reader,
    "clock": clock_jump,
}

if __name__ == "__main__":
    main()
