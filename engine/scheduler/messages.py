"""Messages for the worker that travel beside the scheduled rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..types import EngineRequest, RequestUpdate, SchedulerOutput


class WorkerMessages:
    """Collects what the worker has to know before the next step, and sends each message once."""

    def __init__(self, num_groups: int) -> None:
        """`num_groups`: cache groups."""
        self._num_groups = num_groups
        self._clear()

    def _clear(self) -> None:
        self.new_requests: list[EngineRequest] = []
        self.updates: list[RequestUpdate] = []
        self.finished: list[str] = []
        self.zero_blocks: list[list[int]] = [[] for _ in range(self._num_groups)]

    @property
    def change_rows(self) -> bool:
        """Whether a message changes what running sequences compute next; `finished` alone does not."""
        return bool(self.new_requests or self.updates or any(self.zero_blocks))

    def zero(self, blocks: Sequence[Sequence[int]]) -> None:
        """Have these blocks, per cache group, zeroed. `()` for none."""
        for group, more in zip(self.zero_blocks, blocks, strict=False):
            group += more

    def finish(self, request_id: str) -> None:
        """Have the worker forget a sequence, and drop the messages about it."""
        self.new_requests = [message for message in self.new_requests if message.request_id != request_id]
        self.updates = [update for update in self.updates if update.request_id != request_id]
        self.finished.append(request_id)

    def send_with(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return the step with all messages added."""
        output = replace(
            output,
            new_requests=tuple(self.new_requests),
            updates=tuple(self.updates),
            finished=tuple(self.finished),
            zero_blocks=tuple(map(tuple, self.zero_blocks)) if any(self.zero_blocks) else (),
        )
        self._clear()
        return output

    def requeue(self, output: SchedulerOutput) -> None:
        """Send the messages of a failed step again with the next step; receiving them twice is harmless."""
        self.new_requests = [*output.new_requests, *self.new_requests]
        self.updates = [*output.updates, *self.updates]
        self.finished = [*output.finished, *self.finished]
        self.zero(output.zero_blocks)
