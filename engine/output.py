"""Token outputs to text and RequestOutput: incremental detokenisation, stop strings, log probabilities. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..mm.types import ItemPlan
from ..processors.text import StreamDecoder, Tokenizer
from .sampling_params import SamplingParams
from .types import CompletionOutput, Logprob, RequestOutput, TokenOutput

Logprobs = dict[int, Logprob]


class Answer:
    """One completion as it grows. `text` may end in what could become a stop string; `shown` never does."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index, self.params, self._tokenizer = index, params, tokenizer
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self._text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._decoder = StreamDecoder(tokenizer, params.skip_special_tokens)
        self._undecoded: list[int] = []
        self._cut = False  # at a stop string
        self._searched = 0  # characters searched already: a stop string must end after them

    def add(self, output: TokenOutput) -> bool:
        """Take what a step made; True when a stop string ends the answer that the engine would go on with."""
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.token_ids += output.token_ids
        self.logprobs += [with_text(entry, self._tokenizer) for entry in output.logprobs or ()]
        self._undecoded += output.token_ids
        if output.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            self._undecoded.pop()  # the ending token is no text
        return self._stop() and output.finish_reason is None

    @property
    def text(self) -> str:
        """All text so far; decoding waits until somebody looks."""
        if not self._cut:
            self._text += self._decoder.push(self._undecoded)
            self._undecoded = []
            if self.finish_reason is not None:
                self._text += self._decoder.flush()
        return self._text

    def _stop(self) -> bool:
        if not self.params.stop_strings:
            return False
        text, searched = self.text, self._searched
        self._searched = len(text)
        if len(self.token_ids) <= self.params.min_tokens:
            return False
        found = find_stop(text, self.params.stop_strings, searched)
        if found is None:
            return False
        start, stop = found
        self._text = text[: start + len(stop) * self.params.include_stop_str_in_output]
        self._cut = True
        self.finish_reason, self.stop_reason = "stop", stop
        return True

    @property
    def shown(self) -> str:
        """The text that will not be taken back."""
        if self.finish_reason is not None:
            return self.text
        return self.text[: len(self.text) - held_back(self.text, self.params.stop_strings)]

    def output(self) -> CompletionOutput:
        logprobs = tuple(self.logprobs) if self.params.logprobs is not None else None
        total = sum(e[t].logprob for e, t in zip(self.logprobs, self.token_ids, strict=True)) if logprobs is not None else None
        ids = tuple(self.token_ids)
        return CompletionOutput(self.index, self.shown, ids, logprobs, total, self.finish_reason, self.stop_reason)


class Assembly:
    """Everything that comes back for one prompt: its answers, by engine request id."""

    def __init__(self, request_id: str, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.request_id, self.params, self._tokenizer = request_id, params, tokenizer
        self.answers = {f"{request_id}.{i}": Answer(i, params, tokenizer) for i in range(params.n)}
        self.open = set(self.answers)  # engine requests that still run
        self.prompt: str | None = None
        self.prompt_token_ids: tuple[int, ...] = ()
        self.prompt_logprobs: tuple[Logprobs | None, ...] | None = None
        self.error: str | None = None
        self.items: tuple[ItemPlan, ...] = ()
        self.timings: dict[str, float] = {}
        self.media_bytes = 0  # held for this prompt
        self.changed = False

    @property
    def finished(self) -> bool:
        return not self.open

    def add(self, output: TokenOutput) -> bool:
        """Take a step's output for one of the answers; True when the engine has to be told to stop it."""
        answer = self.answers[output.request_id]
        self.changed = self.changed or bool(output.token_ids or output.finish_reason)
        if output.prompt_logprobs is not None:
            texts = (None if e is None else with_text(e, self._tokenizer) for e in output.prompt_logprobs)
            self.prompt_logprobs = tuple(texts)
        stopped = answer.add(output)
        self.error = self.error or output.error
        for stage, seconds in output.timings.items():
            self.timings[stage] = max(self.timings.get(stage, 0.0), seconds)
        if answer.finish_reason is not None:
            self.open.discard(output.request_id)
        return stopped

    def fail(self, error: str) -> None:
        """Nothing more will come."""
        self.error, self.changed = error, True
        for answer in self.answers.values():
            answer.finish_reason = answer.finish_reason or "error"
        self.open.clear()

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            tuple(answer.output() for answer in self.answers.values()),
            self.prompt_logprobs,
            self.finished,
            self.error,
            self.items,
            dict(self.timings),
        )


def find_stop(text: str, stops: Sequence[str], searched: int) -> tuple[int, str] | None:
    """The earliest stop string that ends after the first `searched` characters, and where it starts."""
    hits = ((text.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in stops)
    return min(((at, stop) for at, stop in hits if at >= 0), default=None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that a stop string begins with: "abc" and stop "cd" give 1."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


def with_text(entry: Mapping[int, Logprob], tokenizer: Tokenizer) -> Logprobs:
    """Log probabilities with their tokens' texts."""
    return {
        token: replace(value, decoded_token=tokenizer.decode([token], skip_special_tokens=False))
        for token, value in entry.items()
    }
