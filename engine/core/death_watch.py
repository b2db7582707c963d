"""Reports the end of a process as soon as it ends, also while nobody asks it anything."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress


def watch(pid: int, on_end: Callable[[], object]) -> None:
    """Call `on_end` in a thread of its own when this child of ours has ended. Its status stays for `Popen.wait` to take."""

    def wait() -> None:
        with suppress(ChildProcessError):  # its status was taken already
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        on_end()

    threading.Thread(target=wait, name="sensorium-death-watch", daemon=True).start()
