"""Reports the end of a process as soon as it ends, also between calls, and ends processes that a signal has stopped."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CHECK_SECONDS = 0.5
STOPPED_CHECKS = 4  # checks in a row that see a stopped process before it is taken for dead


def watch(pid: int, on_end: Callable[[], object]) -> None:
    """Call `on_end` in a thread of its own when this child of ours has ended. Its status stays for `Popen.wait` to take."""

    def wait() -> None:
        with suppress(ChildProcessError):  # its status was taken already
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        on_end()

    threading.Thread(target=wait, name="sensorium-death-watch", daemon=True).start()


def kill_when_stopped(pid: int) -> None:
    """Start a thread that kills a process if a signal has stopped it for 2 s. The thread ends with the process."""
    process = os.pidfd_open(pid)  # the number may be another process's after this one has ended

    def check() -> None:
        ended, stopped = select.poll(), 0
        ended.register(process, select.POLLIN)
        while not ended.poll(1000 * CHECK_SECONDS) and stopped < STOPPED_CHECKS:
            stopped = stopped + 1 if state_of(pid) in "tT" else 0
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)

    threading.Thread(target=check, name="sensorium-stop-watch", daemon=True).start()


def state_of(pid: int) -> str:
    """Return the state of a process as in proc(5); "X" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"
