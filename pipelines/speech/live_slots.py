"""Limits how many partial passes of live streams an engine runs at a time.

On a CPU, sixteen passes at once all end late. If two run at a time, each ends early, and the streams that wait lose nothing:
when a stream has its slot, its pass covers all audio that has arrived until then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...engine.engine import Engine

_CPU_SLOTS = 2  # with one, short passes leave threads idle; without a limit, 16 streams of whisper-tiny.en show words later
_lock = threading.Lock()
_slots: weakref.WeakKeyDictionary[Engine, PassSlots] = weakref.WeakKeyDictionary()


class PassSlots:
    """The slots of one engine's partial passes, and the streams that wait for one in the order in which they asked.

    Streams may run in several threads.

    Args:
        count: of the slots.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[StreamSlot, None] = {}  # in order
        self._taken: set[StreamSlot] = set()
        self._lock = threading.Lock()

    def acquire(self, stream: StreamSlot) -> bool:
        """Return whether the stream has a slot now. If not, it waits, and its `wake` is called when it has one."""
        with self._lock:
            if stream in self._taken:
                return True
            if self._free:
                self._free -= 1
                self._taken.add(stream)
                return True
            self._waiting.setdefault(stream)
            return False

    def release(self, stream: StreamSlot) -> None:
        """Give the slot of a stream to the one that waits longest, or let a waiting stream leave. Otherwise do nothing."""
        with self._lock:
            self._waiting.pop(stream, None)
            if stream not in self._taken:
                return
            self._taken.remove(stream)
            first = next(iter(self._waiting), None)
            if first is None:
                self._free += 1
                return
            del self._waiting[first]
            self._taken.add(first)
        first.wake()


class StreamSlot:
    """The slot of one stream: taken, waited for, or neither.

    Args:
        slots: of the engine; None: passes run as soon as they are due.
        wake: called, in any thread, when a stream that waited has its slot.
    """

    def __init__(self, slots: PassSlots | None, wake: Callable[[], None]) -> None:
        self._slots, self.wake = slots, wake

    def acquire(self) -> bool:
        """Return whether a partial pass may begin. If not, `wake` is called once it may."""
        return self._slots is None or self._slots.acquire(self)

    def release(self) -> None:
        """End the pass, or stop waiting."""
        if self._slots is not None:
            self._slots.release(self)


def slots_of(engine: Engine) -> PassSlots | None:
    """Return the slots of an engine, or None if its device computes many passes in the time of one."""
    if engine.config.torch_device.type != "cpu":
        return None
    with _lock:
        return _slots.setdefault(engine, PassSlots(_CPU_SLOTS))
