"""Runs `sensorium read` in processes of its own: one after the other, each killed at a random point, or two at once.

`python interrupted_reads.py SEED KILLS STEPS FOLDER OUTPUTS` prints the attempts of each page, the exit code of each run, and
how many pages were in work at each kill. `STEPS`: number of the first steps of a run at which it may be killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sensorium.cli.main import main
from sensorium.mm.media import pdf
from sensorium.mm.media.isolate import run_inline
from sensorium.pipelines.documents import inputs, output, read
from sensorium.pipelines.documents.manifest import NAME, Manifest


def run(words: list[str], kill_at: int | None) -> int:
    """Run a command in a child, and return its process number. `kill_at`: number of the step at which it kills itself."""
    child = os.fork()
    if not child:
        sys.stdout = sys.stderr
        if kill_at is not None:
            kill_after(kill_at)
        os._exit(main(words))
    return child


def kill_after(steps: int) -> None:
    """Kill this process at one of its steps: before, in and after transactions, and between the parts of an output."""
    left = steps

    def step() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    transaction, project = Manifest._transaction, output.project

    @contextmanager
    def in_transaction(self: Manifest) -> Iterator[None]:
        step()
        with transaction(self):
            yield
            step()
        step()

    def parts(*args: object) -> Iterator[str]:
        for part in project(*args):  # type: ignore[arg-type]
            step()
            yield part

    Manifest._transaction, output.project = in_transaction, parts  # type: ignore[method-assign, assignment]


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def num_in_work(manifest: Path, child: int) -> int:
    """Return how many pages a process that was killed has leased."""
    if not manifest.exists():
        return 0
    with closing(sqlite3.connect(manifest)) as base:
        if base.execute("SELECT 1 FROM sqlite_master WHERE name='pages'").fetchone() is None:
            return 0
        owners = base.execute("SELECT owner FROM pages WHERE owner IS NOT NULL AND record IS NULL").fetchall()
    return sum(f":{child}:" in owner for (owner,) in owners)


def run_all(seed: int, kills: int, steps: int, folder: str, outputs: str) -> None:
    read.CHUNK = 3
    pdf.run_isolated = inputs.run_isolated = lambda *args, **_: run_inline(*args)  # a codec worker starts in a second
    words = ["read", folder, "--output-dir", outputs, "--resume", "--jobs", "1"]  # PDFium is for one thread of a process
    random_steps, path = random.Random(seed), Path(outputs) / NAME
    codes, in_work = list[int](), list[int]()
    for _ in range(kills):
        child = run(words, random_steps.randrange(steps))
        codes.append(exit_code(child))
        in_work.append(num_in_work(path, child))
    last = [run(words, None) for _ in range(1 if kills else 2)]
    codes += [exit_code(child) for child in last]
    with Manifest(path) as manifest:
        attempts = list(manifest.attempts().values())
    print(json.dumps({"codes": codes, "attempts": attempts, "in_work": in_work}))


if __name__ == "__main__":
    run_all(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
