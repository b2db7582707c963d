"""Run one part after another in a child process that may crash, and supervise it."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from .machine import Bench, card, versions
from .parts import SECTIONS, START, Made, Part, find
from .record import Figure, Journal, Lacks, show

ROOT = Path(__file__).parents[2]
_POLL = 0.2
_GRACE = 3.0  # seconds after which a part that does not check the clock is stopped
_FATAL = ("CUDA error", "device-side assert", "illegal memory access", "CUBLAS_STATUS", "CUDNN_STATUS")
"""Texts of errors after which nothing runs on the device in this process."""


def work(section: str, names: Sequence[str], device: torch.device, tiny: bool, stem: Path, until: float) -> None:
    """Run the named parts in turn until `until` (Unix time)."""
    journal, bench = Journal(stem), Bench(device, tiny)
    for name in names:
        part = find(section, name)
        if time.time() + (0 if tiny else part.seconds) > until:
            _left_out(journal, section, name)
        elif not _run(journal, section, part, bench, until):
            return
        journal.render()
        gc.collect()
        if bench.cuda:
            torch.cuda.empty_cache()


def _run(journal: Journal, section: str, part: Part, bench: Bench, until: float) -> bool:
    """Run one part; return False if the device is lost to this process."""
    here: dict[str, Any] = {"section": section, "part": part.name}
    journal.write("begin", **here)
    print(f"{section}: {part.name}", flush=True)
    start, fine = time.time(), True
    last = min(until, start + part.limit)
    with _noting(journal, here) as whole:
        for made in part.load()(bench):
            with _noting(journal, here) as one:
                for figure in _figures(made):
                    journal.figure(section, part.name, figure)
                    print(f"  {show(figure)}", flush=True)
            fine = not one
            if not fine:
                break
            if time.time() > last:
                journal.write("left out", **here, note="the rest: no time was left")
                break
    journal.write("end", **here, seconds=round(time.time() - start, 1))
    return fine and not whole


def _figures(made: Made) -> Iterator[Figure]:
    found = made() if callable(made) else made
    if isinstance(found, Figure):
        yield found
    else:
        yield from found


@contextmanager
def _noting(journal: Journal, here: dict[str, Any]) -> Iterator[list[str]]:
    """Record any exception as a failure; return the reason if the device is lost."""
    lost: list[str] = []
    try:
        yield lost
    except Lacks as missing:
        journal.write("lacks", **here, note=str(missing))
        print(f"  lacks {missing}", flush=True)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:400]
        traceback.print_exc(file=sys.stdout)
        journal.write("failure", **here, note=f"{reason} ({_where(error)})")
        print(f"  FAILURE {reason}", flush=True)
        lost += [reason for word in _FATAL if word in reason]


def _where(error: BaseException) -> str:
    """Return file and line of the innermost frame outside site-packages."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"


def _left_out(journal: Journal, section: str, name: str) -> None:
    journal.write("left out", section=section, part=name, note="no time was left")
    print(f"{section}: {name} is skipped: no time left", flush=True)


def supervise(sections: Sequence[str], device: torch.device, tiny: bool, stem: Path, seconds: float) -> int:
    """Run the sections within their time limits; return 1 if anything failed."""
    journal = Journal(stem)
    note = "Tiny shapes, to try the script: these numbers mean nothing." if tiny else ""
    journal.write("machine", card=card(device), date=time.strftime("%Y-%m-%d"), versions=versions(device), note=note)
    started = time.time()
    for section in sections:
        _section(journal, section, device, tiny, seconds)
        journal.render()
    print(f"written to {journal.table}", flush=True)
    return int(any(_bad(line) for line in journal.read(started)))


def _bad(line: dict[str, Any]) -> bool:
    return line["kind"] == "failure" or line.get("verdict") == "WRONG"


def _section(journal: Journal, section: str, device: torch.device, tiny: bool, seconds: float) -> None:
    left, until = [part.name for part in SECTIONS[section]], time.time() + seconds
    while left and time.time() < until:
        started = time.time()
        command = [sys.executable, "-m", "benchmarks.gpu", "--only", section, "--device", str(device), "--stem"]
        command += [str(journal.lines.with_suffix("")), "--until", str(until), *(["--tiny"] if tiny else []), "--worker", *left]
        with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(command, cwd=ROOT, stderr=errors) as process:
            stopped = _watch(process, journal, section, started, until)
            said = _tail(errors)
        known = _parts(journal, section, started)
        broken = [name for name, kind in known.items() if kind == "begin"]
        for name in broken or ([] if known else left[:1]):
            reason = stopped or f"its process ended with {process.returncode}: {said}"
            journal.write("failure", section=section, part=name, note=reason)
            print(f"  FAILURE {name}: {reason}", flush=True)
        left = [name for name in left if name not in known] if known else left[1:]
    for name in left:
        _left_out(journal, section, name)


def _watch(process: subprocess.Popen[bytes], journal: Journal, section: str, started: float, until: float) -> str:
    """Wait for the process; return why it was stopped, or an empty string."""
    while process.poll() is None:
        time.sleep(_POLL)
        now, begun = time.time(), [line for line in journal.read(started) if line["kind"] == "begin"]
        limit = find(section, begun[-1]["part"]).limit if begun else START
        since = begun[-1]["time"] if begun else started
        if now > min(since + limit, until) + _GRACE:
            process.kill()
            process.wait()
            return f"stopped after {now - since:.0f} s"
    return ""


def _parts(journal: Journal, section: str, since: float) -> dict[str, str]:
    """Return part -> its last state: "begin" if it did not end."""
    return {line["part"]: line["kind"] for line in journal.read(since) if line.get("section") == section and _marks(line)}


def _marks(line: dict[str, Any]) -> bool:
    return line["kind"] in ("begin", "end") or (line["kind"] == "left out" and "rest" not in line["note"])


def _tail(errors: IO[str]) -> str:
    """Return the last line of a process's stderr and print the rest."""
    errors.seek(0)
    text = errors.read().strip()
    if text:
        print(text, file=sys.stderr, flush=True)
    return text.splitlines()[-1][:300] if text else "it said nothing"
