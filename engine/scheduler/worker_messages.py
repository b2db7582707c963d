"""The messages about sequences that workers get with the next step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..types import SchedulerOutput

_NO_MESSAGES = SchedulerOutput(step=0, scheduled=())


def is_empty(output: SchedulerOutput) -> bool:
    """Return whether a step has neither work nor messages."""
    return output == replace(_NO_MESSAGES, step=output.step)


class WorkerMessages:
    """Collects messages until a step takes them."""

    def __init__(self) -> None:
        self._pending = _NO_MESSAGES

    def send(self, **messages: Any) -> None:
        """Send messages with the next step. `messages`: fields of SchedulerOutput."""
        self._pending = replace(self._pending, **{name: getattr(self._pending, name) + new for name, new in messages.items()})

    def end(self, request_id: str) -> None:
        """Say that a sequence has ended, and drop unsent messages about it."""
        self._pending = replace(
            self._pending,
            new_requests=tuple(request for request in self._pending.new_requests if request.request_id != request_id),
            updates=tuple(update for update in self._pending.updates if update.request_id != request_id),
            finished=(*self._pending.finished, request_id),
        )

    def take(self) -> SchedulerOutput:
        """Return the messages as a step without sequences, and forget them."""
        messages, self._pending = self._pending, _NO_MESSAGES
        return messages

    def requeue(self, output: SchedulerOutput) -> None:
        """Send the messages of a failed step again with the next one; receiving them twice is harmless."""
        names = ("new_requests", "updates", "finished", "zero_blocks")
        self._pending = replace(self._pending, **{name: getattr(output, name) + getattr(self._pending, name) for name in names})

    @property
    def must_go_first(self) -> bool:
        """True if workers must get the messages before they compute any further token."""
        return bool(self._pending.new_requests or self._pending.updates or self._pending.zero_blocks)
