"""The engine behind five verbs: add, append, truncate, abort, step. Knows no text, no media and no thread."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..mm.errors import InputError
from ..mm.types import MultiModalFeature
from .runner import ModelRunner, describe
from .scheduler import Scheduler
from .types import EngineRequest, ScheduledRequest, SchedulerOutput, TokenOutput

_log = logging.getLogger(__name__)


class EngineCore:
    """Every argument and result is plain data that `codec` turns into bytes. Not for use from several threads."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler, self.runner = scheduler, runner

    def add(self, request: EngineRequest) -> None:
        """Queue a sequence.

        Raises:
            InputError: a prompt that is empty or too long, a token outside the vocabulary, misplaced items.
        """
        params, words = request.params, [token for word in request.bad_word_ids for token in word]
        self._check_tokens("prompt_token_ids", request.prompt_token_ids)
        self._check_tokens("sampling parameters", (*params.stop_ids, *(params.logit_bias or {}), *words))
        self.scheduler.add(request)

    def append(self, request_id: str, token_ids: Sequence[int], features: Sequence[MultiModalFeature] = ()) -> None:
        """Continue a sequence with these tokens, items placed in its own token count; a new answer follows.

        Raises:
            InputError: an unknown sequence, one too long, a token outside the vocabulary, misplaced items.
        """
        self._check_tokens("token_ids", token_ids)
        self.scheduler.append(request_id, token_ids, features)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Roll a sequence back to its first `num_tokens` tokens, cache included; InputError if that cuts an item."""
        self.scheduler.truncate(request_id, num_tokens)

    def abort(self, request_id: str) -> None:
        """Forget a sequence and free all it holds; unknown ones are ignored. The worker frees its part with the next step."""
        self.scheduler.abort(request_id)

    def step(self) -> tuple[TokenOutput, ...]:
        """Compute one batch; what it added, by sequence. An exception ends the sequences of this step only."""
        output = self.scheduler.schedule()
        if not (output.scheduled or output.finished or output.free_encoder or output.new_requests or output.updates):
            return ()
        try:
            results: Iterable[TokenOutput] = self.runner.run(output)
        except KeyboardInterrupt:
            for encode in output.encode:
                self.scheduler.encoder.mark_failed(encode.hash)
            self.scheduler.redeliver(output)
            raise
        except Exception as error:
            self.scheduler.redeliver(output)
            _log.exception("a step failed")
            results = [TokenOutput(task.request_id, (), error=describe(error)) for task in output.scheduled]
        return tuple(self._book(task, result, output) for task, result in zip(output.scheduled, results, strict=True))

    def _book(self, task: ScheduledRequest, result: TokenOutput, output: SchedulerOutput) -> TokenOutput:
        request = self.scheduler.requests[task.request_id]
        if result.error is not None:
            for encode in output.encode:
                if encode.request_id == task.request_id:
                    self.scheduler.encoder.mark_failed(encode.hash)
            self.scheduler.abort(task.request_id)
            return replace(result, finish_reason="error", timings=request.timings())
        request.encode_seconds += result.timings.pop("encode", 0.0)
        finish = self.scheduler.advance(task, result.token_ids)
        if finish is None:
            return result
        return replace(result, finish_reason=finish[0], stop_reason=finish[1], timings=request.timings())

    def _check_tokens(self, what: str, token_ids: Iterable[int]) -> None:
        vocab = self.runner.model.vocab_size
        for token in token_ids:
            if not 0 <= token < vocab:
                raise InputError(f"{what} hold {token}; the vocabulary has the ids 0 to {vocab - 1}")
