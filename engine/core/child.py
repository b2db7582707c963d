"""Starts and ends the child process of a core, and keeps one in reserve."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe

from .channel import Activity, Channel, pack

_CLOSE_SECONDS = 10.0  # how long `end` waits for the child to end before it is killed


@dataclass(frozen=True)
class Child:
    """A process that runs `server` or `rank_server`, its channel, and the memory where `server` names items that it encodes."""

    process: subprocess.Popen[bytes]
    channel: Channel
    activity: Activity

    def ask_to_end(self) -> None:
        """Ask the child to end. It may be asked twice, and may have ended."""
        with suppress(OSError):
            self.channel.send(*pack(("close", ())))

    def end(self) -> None:
        """Ask the child to end and wait for it. It is killed if that takes longer than 10 s."""
        try:
            self.ask_to_end()
            self.process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.disconnect()

    def kill(self) -> int:
        """Kill and reap the child, and return its status. The activity stays open, to be read."""
        self.process.kill()
        status = self.process.wait()
        self.channel.close()
        return status

    def discard(self) -> None:
        """Kill a child that has served nothing."""
        self.kill()
        self.activity.close()

    def disconnect(self) -> None:
        """Close this process's side."""
        self.channel.close()
        self.activity.close()


def start_child(bodies: Sequence[str] = (), program: str = "server") -> Child:
    """Start a child, in a session of its own so that Ctrl-C in a terminal reaches this process only.

    Args:
        bodies: as in `CoreInfo`, of the child that this one replaces, so that answers have the same bits. Empty: it chooses.
        program: the module of this package that it runs.
    """
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)  # the child imports from the same places
    options = [part for option in sys.warnoptions for part in ("-W", option)]
    connection, child_end = Pipe()
    activity = Activity()
    shared = child_end.fileno(), activity.fileno
    command = [sys.executable, "-P", *options, "-m", f"{__package__}.{program}", *map(str, shared)]
    with child_end:
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": paths} | _bodies_setting(bodies),
            pass_fds=shared,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return Child(process, Channel(connection), activity)


def _bodies_setting(bodies: Sequence[str]) -> dict[str, str]:
    """Return SENSORIUM_CPU with these bodies. A setting that is an instruction set stays; one of single ops is among them."""
    setting = os.environ.get("SENSORIUM_CPU", "")
    return {} if not bodies or (setting and "=" not in setting) else {"SENSORIUM_CPU": ",".join(bodies)}


class Standby:
    """A child that has imported its modules and waits for a model to load, which saves the imports' seconds at a restart."""

    def __init__(self) -> None:
        self._child: Child | None = None

    def renew(self, bodies: Sequence[str]) -> None:
        """Start a child if there is none. `bodies`: see `start_child`."""
        self._child = self._child or start_child(bodies)

    def take(self, bodies: Sequence[str]) -> Child:
        """Return the child in reserve, or a new one. `bodies`: see `start_child`."""
        child, self._child = self._child, None
        if child is not None and child.process.poll() is not None:  # somebody has killed it
            child.discard()
            child = None
        return child or start_child(bodies)

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.discard()

    def disconnect(self) -> None:
        """Leave the child to its parent, of which this process is a fork."""
        child, self._child = self._child, None
        if child is not None:
            child.disconnect()
