"""Token outputs to text and RequestOutput: incremental detokenisation, stop strings, log probabilities. Knows no scheduler."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ..mm.errors import InputError
from ..processors.text import StreamDecoder, Tokenizer
from .failures import describe
from .input import Prepared
from .sampling_params import SamplingParams
from .trace import Clock, RequestTrace
from .types import CompletionOutput, Logprob, RequestOutput, SequenceStats, TokenOutput

Logprobs = dict[int, Logprob]


class Answer:
    """One completion as it grows. `text` may end in what could become a stop string; `shown` never does."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index, self.params, self._tokenizer = index, params, tokenizer
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._total = 0.0  # log probability of all tokens
        self.cut = False  # at a stop string
        self._searched = 0  # characters searched already: a stop string must end after them
        self._told = (0, 0)  # tokens and characters that the last output ended with
        self._settled = 0  # tokens that no repair of a loop can take back any more
        self._settled_text = StreamDecoder(tokenizer, params.skip_special_tokens)
        self._settled_length = 0  # characters of their text
        self._repairs = 0
        self._text = ""
        self._undecoded: list[int] = []
        self._decoder = StreamDecoder(tokenizer, params.skip_special_tokens)

    def add(self, output: TokenOutput) -> bool:
        """Take what a step made; True when a stop string ends the answer that the engine would go on with."""
        if output.num_removed:
            self._take_back(output.num_removed)
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.token_ids += output.token_ids
        if output.logprobs:
            self.logprobs += [with_text(entry, self._tokenizer) for entry in output.logprobs]
            self._total += sum(e[t].logprob for e, t in zip(output.logprobs, output.token_ids, strict=True))
        self._undecoded += output.token_ids
        if output.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            self._undecoded.pop()  # the ending token is no text
        return self._stop() and output.finish_reason is None

    @property
    def text(self) -> str:
        """All text so far; decoding waits until somebody looks. InputError for what cannot be decoded."""
        if self.cut:
            return self._text
        try:
            self._text += self._decoder.push(self._undecoded)
            self._undecoded = []
            if self.finish_reason is not None:
                self._text += self._decoder.flush()
        except Exception as error:  # whatever a tokenizer raises
            raise InputError(f"detokenising failed: {describe(error)}; token_ids hold the answer") from None
        return self._text

    @property
    def shown(self) -> str:
        """The text that neither a stop string nor the repair of a loop will take back."""
        text = self.text
        if self.finish_reason is not None:
            return text
        length = len(text) - held_back(text, self.params.stop_strings)
        return text[: min(length, self._settle()[1])]

    def output(self, delta: bool = False) -> CompletionOutput:
        """All of it that will not be taken back, or what is new of that since the last output."""
        text, tokens, start = self.shown, self._settle()[0], (0, 0)
        if delta:
            start, self._told = self._told, (tokens, len(text))
        scored = self.params.logprobs is not None
        return CompletionOutput(
            self.index,
            text[start[1] :],
            tuple(self.token_ids[start[0] : tokens]),
            tuple(self.logprobs[start[0] : tokens]) if scored else None,
            self._total if scored else None,
            self.finish_reason,
            self.stop_reason,
        )

    def _settle(self) -> tuple[int, int]:
        """Tokens and characters that no repair can take back any more."""
        detection = self.params.repetition_detection
        repairs = detection is not None and detection.repair and self._repairs < detection.max_repairs
        if self.finish_reason is not None or detection is None or not repairs:
            return len(self.token_ids), len(self.text)
        settled = max(self._settled, settled_tokens(self.token_ids, detection.max_cycle))
        self._settled_length += len(self._settled_text.push(self.token_ids[self._settled : settled]))
        self._settled = settled
        return settled, self._settled_length

    def _take_back(self, count: int) -> None:
        self._repairs += 1
        del self.token_ids[-count:], self.logprobs[len(self.token_ids) :]
        self._total = sum(e[t].logprob for e, t in zip(self.logprobs, self.token_ids, strict=False))
        self._text, self._undecoded = "", list(self.token_ids)  # decoded anew from the start
        self._decoder = StreamDecoder(self._tokenizer, self.params.skip_special_tokens)
        self._searched = min(self._searched, len(self.text))

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
        self.cut = True
        self.finish_reason, self.stop_reason = "stop", stop
        return True


class Assembly:
    """Everything that comes back for one prompt: its answers, by engine request id."""

    def __init__(self, request_id: str, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.request_id, self.params, self._tokenizer = request_id, params, tokenizer
        self.answers = {f"{request_id}.{i}": Answer(i, params, tokenizer) for i in range(params.n)}
        self.open = set(self.answers)  # engine requests that still run
        self.prepared = Prepared(None, ())
        self.prompt_logprobs: tuple[Logprobs | None, ...] | None = None
        self.error: str | None = None
        self.timings: dict[str, float] = {}
        self.stats: dict[str, SequenceStats] = {}
        self.pooled: Tensor | None = None
        self.changed = False

    @property
    def finished(self) -> bool:
        return not self.open

    @property
    def num_tokens(self) -> int:
        """Of the sequence of the first answer."""
        return len(self.prepared.token_ids) + len(next(iter(self.answers.values())).token_ids)

    def start(self, prepared: Prepared) -> None:
        """The prompt is known."""
        self.prepared = prepared
        self.timings.update(prepared.timings)

    def add(self, output: TokenOutput) -> bool:
        """Take a step's output for one of the answers; True when the engine has to be told to stop it."""
        answer = self.answers[output.request_id]
        self.changed = self.changed or bool(output.token_ids or output.finish_reason or output.num_removed)
        if output.prompt_logprobs is not None:
            texts = (None if e is None else with_text(e, self._tokenizer) for e in output.prompt_logprobs)
            self.prompt_logprobs = tuple(texts)
        stopped = answer.add(output)
        self.error = self.error or output.error
        self.pooled = output.pooled
        if output.stats is not None:
            self.stats[output.request_id] = output.stats
        for stage, seconds in output.timings.items():
            self.timings[stage] = max(self.timings.get(stage, 0.0), seconds)
        if answer.finish_reason is not None:
            self.open.discard(output.request_id)
        return stopped

    def end(self, reason: str, error: str | None = None) -> None:
        """Nothing more will come."""
        self.error, self.changed = error or self.error, True
        for answer in self.answers.values():
            answer.finish_reason = answer.finish_reason or reason
        self.open.clear()

    def output(self, delta: bool = False) -> RequestOutput:
        """All of it, or of each answer what is new since the last output."""
        return replace(self.summary(), outputs=tuple(answer.output(delta) for answer in self.answers.values()))

    def summary(self) -> RequestOutput:
        """All but the answers."""
        first = self.stats.get(next(iter(self.answers)), SequenceStats())
        return RequestOutput(
            self.request_id,
            self.prepared.prompt,
            self.prepared.token_ids,
            (),
            self.prompt_logprobs,
            self.finished,
            self.error,
            self.prepared.items,
            dict(self.timings),
            tuple(replace(item, encoder=self._encoder(i)) for i, item in enumerate(self.prepared.trace)),
            first.cached_tokens,
            sum(stats.preemptions for stats in self.stats.values()),
            self.pooled,
        )

    def trace(self, clock: Clock) -> RequestTrace:
        """What became of it, in numbers; no text is decoded for it."""
        output = self.summary()
        return RequestTrace(
            output.request_id,
            clock.started,
            time.perf_counter() - clock.arrival,
            None if clock.first is None else clock.first - clock.arrival,
            tuple(clock.gaps),
            tuple(answer.finish_reason or "" for answer in self.answers.values()),
            len(output.prompt_token_ids),
            sum(len(answer.token_ids) for answer in self.answers.values()),
            output.num_cached_tokens,
            output.num_preemptions,
            output.timings,
            output.trace,
            output.error,
        )

    def freeze(self) -> None:
        """Text that cannot be decoded stays as far as it is."""
        for answer in self.answers.values():
            answer.cut, answer.finish_reason = True, "error"

    def _encoder(self, item: int) -> str:
        """How the rows of an item came to be, in words of SequenceStats: the costliest way of its pieces and answers."""
        pieces = [place for place, owner in enumerate(self.prepared.item_of) if owner == item]
        ways = {stats.items[place] for stats in self.stats.values() for place in pieces if place < len(stats.items)}
        return next((way for way in ("encoded", "disk", "cache", "prefix") if way in ways), "")


def find_stop(text: str, stops: Sequence[str], searched: int) -> tuple[int, str] | None:
    """The earliest stop string that ends after the first `searched` characters, and where it starts."""
    hits = ((text.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in stops)
    return min(((at, stop) for at, stop in hits if at >= 0), default=None)


def settled_tokens(token_ids: Sequence[int], max_cycle: int) -> int:
    """How many tokens cannot be part of a loop that is found later, see `repetition.find_loop`.

    The last `max_cycle` may be the first time a cycle is said; before them, those of a cycle that is being said again.
    """
    end = len(token_ids)
    settled = max(0, end - max_cycle)
    for size in range(1, min(max_cycle, end - 1) + 1):
        first = end - size
        while first > 0 and token_ids[first - 1] == token_ids[first - 1 + size]:
            first -= 1
        settled = min(settled, first)
    return settled


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
