"""The interface of models and layers that draft tokens in the worker, after each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...models.interface import ForwardBatch, Model
from ..types import ScheduledRequest
from .sequence_state import SequenceState


@dataclass(frozen=True, eq=False)
class ComputedPart:
    """The part of one sequence that a step has computed.

    Args:
        states: `[task.num_tokens, width]`, its rows of `Predictor.states`.
    """

    sequence: SequenceState
    task: ScheduledRequest
    states: Tensor


class Predictor(Protocol):
    """Drafts tokens after a step, in a cache of its own. The scheduler proposes them for the next step."""

    def watch(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch of a step of the model, before it runs, with what is to be kept of it."""

    def states(self, hidden: Tensor) -> Tensor:
        """Return what is drafted from, `[rows, width]`, after the step. `hidden`: its hidden states."""

    def predict(self, model: Model, parts: Sequence[ComputedPart]) -> list[tuple[int, ...]]:
        """Return the tokens that are expected after those that each sequence has; none if nothing was sampled, or no room.

        Args:
            model: the one that drafts are for.
        """

    def free(self, request_id: str) -> None:
        """Drop what is kept for a sequence, if there is anything."""

    def load(self, model: Model) -> None:
        """Read the weights, if it has its own. The caches are allocated already. `model`: as in `predict`."""

    def sleep(self) -> None:
        """Free all memory, and drop what is kept for sequences and of the model."""

    def wake_up(self, model: Model) -> None:
        """Allocate it again, and read the weights. `model`: as in `predict`."""
