"""Attack one engine while it serves eight honest streams: `python -m benchmarks.attack --write`.

Each case runs while the streams go on. The table gives what became of it (refused by a typed error, or served), the longest
time that an honest stream waited for its next token, and the growth of memory of the process and all processes below it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sensorium.mm.media.policy import MediaPolicy

from ..throughput import ROOT, machine, put
from .api_cases import API_CASES
from .cases import CASES, Case, Target

STREAMS = 8
MAX_PAUSE = 0.5  # seconds
MAX_MEMORY = 2 * MediaPolicy().max_decoded_bytes / 2**20  # MB: what two media workers may hold for the items they decode
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "limit_mm_per_prompt": {"image": 64},
    # the slow server is on this machine
    "media": {
        "allow_private_hosts": True,
        "allowed_media_ports": None,
        "timeout": 3.0,
        "max_seconds": 5.0,
        "worker_seconds": 20.0,
    },
}


class Streams:
    """Honest streams in a thread and event loop of their own.

    `pause` is the longest wait since `reset` for the next token of an answer that has begun. A request that waits for its turn
    behind others does not count.
    """

    def __init__(self, llm: Any) -> None:
        from sensorium import AsyncLLM

        self._llm = AsyncLLM(llm)
        self._last, self._pause = dict[int, float](), 0.0  # time of the last token of each answer that has begun
        self._stop, self.failed = threading.Event(), []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def reset(self) -> None:
        self._pause, now = 0.0, time.perf_counter()
        self._last = dict.fromkeys(self._last, now)

    @property
    def pause(self) -> float:
        now = time.perf_counter()
        return max(self._pause, now - min(self._last.values(), default=now))

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)

    async def _run(self) -> None:
        await asyncio.gather(*map(self._stream, range(STREAMS)))

    async def _stream(self, number: int) -> None:
        from sensorium import SamplingParams

        round_ = 0
        while not self._stop.is_set():
            round_ += 1
            params = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True)
            async for output in self._llm.generate(f"user: stream {number}, round {round_}", params):
                now = time.perf_counter()
                self._pause, self._last[number] = max(self._pause, now - self._last.get(number, now)), now
                if output.error is not None:
                    self.failed.append(str(output.error))
            self._last.pop(number, None)


class Memory:
    """Samples the resident memory of this process and all processes below it, in MB. `peak` is since `reset`."""

    def __init__(self) -> None:
        self._stop, self.peak = threading.Event(), 0.0
        threading.Thread(target=self._sample, daemon=True).start()

    def reset(self) -> float:
        self.peak = resident()
        return self.peak

    def _sample(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, resident())

    def close(self) -> None:
        self._stop.set()


def resident() -> float:
    """Return the memory of this process and of all processes below it, in MB."""
    return sum(map(_resident, processes(str(os.getpid())))) / 2**20


def processes(pid: str) -> Iterator[str]:
    """Yield the id of a process and those of its children, grandchildren and so on. Any thread may have started a child."""
    yield pid
    with suppress(OSError):  # it has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                for child in (thread / "children").read_text().split():
                    yield from processes(child)


def _resident(pid: str) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def attack(case: Case, target: Target) -> str:
    """Run a case; return "refused: code" or "served". Any other end is an untyped error."""
    from sensorium.callers.errors import SensoriumError

    try:
        outputs = case.run(target)
    except SensoriumError as error:
        return _refused(error.info.code)
    except Exception as error:
        return f"UNTYPED {type(error).__name__}: {str(error)[:120]}"
    if isinstance(outputs, str):
        return outputs
    codes = sorted({output.error.code for output in outputs if output.error is not None})
    return _refused(", ".join(codes)) if codes else "served"


def _refused(code: str) -> str:
    return f"UNTYPED {code}" if code in ("internal", "engine_dead") else f"refused: {code}"


_NOTHING = Case("", "none, for 3 s", lambda _: time.sleep(3) or "-")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attack", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name or area holds this")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    cases = [case for case in (_NOTHING, *CASES, *API_CASES) if args.only in f"{case.area} {case.name}"]
    if not cases:
        areas = ", ".join(sorted({case.area for case in (*CASES, *API_CASES)}))
        parser.error(f"no case's name or area holds {args.only!r}; areas are {areas}")
    from sensorium import LLM
    from waiting import assert_idle  # from tests/helpers, which .fuzz makes importable

    rows, bad, refused, pauses, peaks = [], 0, 0, [], []
    with tempfile.TemporaryDirectory() as folder, LLM(ROOT / "assets" / "tiny-vl", **OPTIONS) as llm:
        target, memory = Target(llm, Path(folder)), Memory()
        streams = Streams(llm)
        time.sleep(3)
        for case in cases:
            case.prepare()
            streams.reset()
            before, start = memory.reset(), time.perf_counter()
            result = attack(case, target)
            seconds, pause, grown = time.perf_counter() - start, streams.pause, memory.peak - before
            bad += result.startswith("UNTYPED") or pause > MAX_PAUSE or grown > MAX_MEMORY or bool(streams.failed)
            refused += "refused" in result
            pauses.append(pause)
            peaks.append(grown)
            rows.append(f"| {case.area} | {case.name} | {result} | {seconds:.1f} | {pause:.2f} | {grown:.0f} |")
            print(rows[-1], *streams.failed, flush=True)
            streams.failed.clear()
        streams.close()
        memory.close()
        assert_idle(llm)
    rows.append(f"| all | {len(rows)} cases, {bad} bad | {refused} refused | | {max(pauses):.2f} | {max(peaks):.0f} |")
    head = ["| area | attack | result | s | longest pause of a stream, s | memory, MB |", "|---|---|---|---|---|---|"]
    table = "\n".join([machine(), "", *head, *rows])
    if args.write:
        put("Attacks on an engine that serves 8 streams", table)
    print(rows[-1], f"bad: untyped, a failed stream, a pause over {MAX_PAUSE} s, or more than {MAX_MEMORY:.0f} MB", sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
