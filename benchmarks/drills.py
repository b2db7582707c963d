"""Kills the engine of a server, drains it and reads from it slowly, and reports what was logged, counted and answered.

python -m benchmarks.drills            # prints the table
python -m benchmarks.drills --write    # and puts it into benchmarks/README.md
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

MODEL = Path(__file__).parents[1] / "assets" / "tiny-vl"
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- drills -->\n", "<!-- /drills -->\n"
WAIT = 240.0  # seconds until a drill counts as failed


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

    def chat(self, max_tokens: int = 3, stream: bool = False) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=WAIT)

    def counted(self, *names: str) -> str:
        text = httpx.get(f"{self.url}/metrics", timeout=WAIT).text
        return ", ".join(line for line in text.splitlines() if line.startswith(names))

    def kill_engine(self) -> float:
        children = [
            int(pid) for path in Path(f"/proc/{self.run.pid}/task").glob("*/children") for pid in path.read_text().split()
        ]
        engines = [pid for pid in children if b"core.server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(min(engines), signal.SIGKILL)  # one in reserve is younger
        return time.monotonic()


@contextmanager
def serving(*options: str) -> Iterator[Drilled]:
    words = [sys.executable, "-m", "sensorium", "serve", str(MODEL), "--port", "0", "--max-model-len", "2048", *options]
    with subprocess.Popen([*words, "--log-format", "json"], stderr=subprocess.PIPE, text=True) as run:
        try:
            drilled = Drilled(run)
            drilled.chat()
            yield drilled
        finally:
            run.kill()


def wait_until(true: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT
    while not true():
        if time.monotonic() > end:
            raise TimeoutError("the drill has failed")
        time.sleep(0.005)


def kill(busy: bool) -> Report:
    """Kill the engine while it is idle, or while it answers a stream and a plain request."""
    answers: list[str] = []
    with serving() as server:
        callers = [threading.Thread(target=lambda one=one: answers.append(_outcome(server.chat(1800, one)))) for one in (0, 1)]
        for caller in callers if busy else ():
            caller.start()
        if busy:
            wait_until(lambda: "running 2.0" in server.counted("sensorium_requests_running"))
        killed = server.kill_engine()
        noticed, message = server.wait_for_line("SIGKILL")
        after = _outcome(server.chat())
        served = time.monotonic()
        for caller in callers if busy else ():
            caller.join()
        counted = server.counted("sensorium_engine_deaths_total", "sensorium_engine_restarts_total")
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
        callers = [threading.Thread(target=lambda one=one: answers.append(_outcome(server.chat(1800, one)))) for one in (0, 1)]
        for caller in callers:
            caller.start()
        wait_until(lambda: "running 2.0" in server.counted("sensorium_requests_running"))
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
            wait_until(lambda: any(line.get("bytes_out", 0) and line["message"] == "request" for _, line in server.lines[1:]))
        line = next(line for _, line in server.lines[1:] if line["message"] == "request")
        after = _outcome(server.chat())
    return Report("slow reader", f"disconnected; next request: {after}", f"outcome {line['outcome']}", "-")


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
    args = parser.parse_args()
    table = "| drill | answered | logged | counted | noticed after | served again after |\n|---|---|---|---|---|---|\n"
    for drill in (lambda: kill(False), lambda: kill(True), kill_too_often, drain, slow_reader):
        report = drill()
        print(report.row, end="", flush=True)
        table += report.row
    if args.write:
        text = README.read_text()
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        README.write_text(f"{before}{BEGIN}{table}{END}{after}")


if __name__ == "__main__":
    main()
