"""Names the process that holds a lease. From the name, other processes of the same machine see whether it still runs."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path


def new_owner() -> str:
    """Return "machine:pid:start:token": boot and PID namespace, the process, its start in clock ticks, and a random token."""
    return f"{_machine()}:{os.getpid()}:{_start_of(os.getpid())}:{os.urandom(4).hex()}"


def has_ended(owner: str) -> bool:
    """Return whether the process of an owner has certainly ended: it was one of this machine and PID namespace.

    A process of another machine or container may be alive; its leases expire.
    """
    machine, pid, start, *_ = [*owner.split(":"), "", "", ""]
    return machine == _machine() and pid.isdecimal() and _start_of(int(pid)) != start


def _start_of(pid: int) -> str:
    """Return the time at which a process started, in clock ticks after boot (proc_pid_stat(5)); "" if there is none."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


@cache
def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{boot}-{namespace}"
