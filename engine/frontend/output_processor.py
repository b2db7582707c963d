"""The output processor: turns TokenOutputs into RequestOutputs (detokenisation, stop strings, log probabilities)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...callers.errors import ErrorInfo, InputError
from ...mm.types import EncodedItem
from ...processors.elements.marked_text import MarkedText
from ...processors.text.tokenizer import StreamDecoder, Tokenizer
from ..errors import error_text
from ..outputs import CompletionOutput, RequestOutput
from ..sampling_params import SamplingParams
from ..stats import SequenceStats, add_stats
from ..types import Logprob, TokenOutput
from .processed_prompt import ProcessedPrompt, named_item

Logprobs = dict[int, Logprob]


class CompletionBuilder:
    """Collects one answer. `text` is all of it; `stable_text` leaves out what a stop string or repair may still remove."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index, self.params, self._tokenizer = index, params, tokenizer
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._cumulative_logprob = 0.0
        self.answer_format: MarkedText | None = None
        self.cut = False  # the text ends at a stop string and is final
        self._searched = 0  # characters that were searched for stop strings
        self._sent = (0, 0)  # tokens and characters of the last delta output
        self._stable = 0  # tokens that no repair can remove any more
        self._stable_decoder = StreamDecoder(tokenizer, params.skip_special_tokens)
        self._stable_length = 0  # characters of their text
        self._repairs = 0
        self._text = ""
        self._undecoded: list[int] = []
        self._decoder = StreamDecoder(tokenizer, params.skip_special_tokens)

    def add(self, output: TokenOutput) -> bool:
        """Add a step's output. Return True if a stop string ends the answer, and the core has more tokens or computes them.

        Tokens after a stop string are dropped.
        """
        parts = _one_by_one(output) if len(output.token_ids) > 1 and self.params.stop_strings else [output]
        for number, part in enumerate(parts, start=1):
            self._add(part)
            if self.cut:
                return number < len(parts) or output.finish_reason is None
        return False

    def _add(self, output: TokenOutput) -> None:
        if output.num_removed:
            self._remove(output.num_removed)
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.token_ids += output.token_ids
        if output.logprobs:
            self.logprobs += [with_text(entry, self._tokenizer) for entry in output.logprobs]
            self._cumulative_logprob += sum(e[t].logprob for e, t in zip(output.logprobs, output.token_ids, strict=True))
        self._undecoded += output.token_ids
        if output.finish_reason == "stop" and not self.params.include_stop_str_in_output:
            self._undecoded.pop()  # the stop token is not part of the text
        self._check_stop_strings()

    @property
    def text(self) -> str:
        """All text so far, decoded on access. Raises InputError if the tokens cannot be decoded."""
        if self.cut or not self.params.detokenize:
            return self._text
        try:
            self._text += self._decoder.push(self._undecoded)
            self._undecoded = []
            if self.finish_reason is not None:
                self._text += self._decoder.flush()
        except Exception as error:  # tokenizers raise exceptions of many types
            raise InputError(f"detokenising failed: {error_text(error)}; token_ids hold the answer") from None
        return self._text

    @property
    def stable_text(self) -> str:
        """The text that neither a stop string nor a repair can remove any more."""
        text = self.text
        if self.finish_reason is not None:
            return text
        length = len(text) - partial_stop_length(text, self.params.stop_strings)
        return text[: min(length, self._find_stable()[1])]

    @property
    def is_sent(self) -> bool:
        """True if a delta output has held a part of the answer."""
        return self._sent != (0, 0)

    def output(self, delta: bool = False) -> CompletionOutput:
        """Return the stable part of the answer; with `delta`, only what is new since the last output."""
        text, num_tokens, start = self.stable_text, self._find_stable()[0], (0, 0)
        if delta:
            start, self._sent = self._sent, (num_tokens, len(text))
        has_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            self.index,
            text[start[1] :],
            self.token_ids[start[0] : num_tokens],
            self.logprobs[start[0] : num_tokens] if has_logprobs else None,
            self._cumulative_logprob if has_logprobs else None,
            self.finish_reason,
            self.stop_reason,
            self._marked_text(),
        )

    def _marked_text(self) -> MarkedText | None:
        """Return the finished answer with its special tokens, if the model names elements in it. Nothing is decoded yet."""
        marks = self.answer_format
        if marks is None or len(marks.images) != 1 or not self.params.detokenize or self.finish_reason in (None, "error"):
            return None
        if not self.params.skip_special_tokens:
            return replace(marks, source=self.text)
        stop = self.stop_reason if self.cut and isinstance(self.stop_reason, str) else None
        return replace(marks, source=partial(_decode_specials, self._tokenizer, self.token_ids, stop))

    def _find_stable(self) -> tuple[int, int]:
        """Return how many tokens and characters no repair can remove any more."""
        detection = self.params.repetition_detection
        may_repair = detection is not None and detection.repair and self._repairs < detection.max_repairs
        if self.finish_reason is not None or detection is None or not may_repair:
            return len(self.token_ids), len(self.text)
        stable = max(self._stable, num_stable_tokens(self.token_ids, detection.max_cycle))
        self._stable_length += len(self._stable_decoder.push(self.token_ids[self._stable : stable]))
        self._stable = stable
        return stable, self._stable_length

    def _remove(self, count: int) -> None:
        self._repairs += 1
        del self.token_ids[-count:], self.logprobs[len(self.token_ids) :]
        self._cumulative_logprob = sum(e[t].logprob for e, t in zip(self.logprobs, self.token_ids, strict=False))
        self._text, self._undecoded = "", list(self.token_ids)  # decode again from the start
        self._decoder = StreamDecoder(self._tokenizer, self.params.skip_special_tokens)
        self._searched = min(self._searched, len(self.text))

    def _check_stop_strings(self) -> None:
        """Search the new text for stop strings. If one is found, cut the text there."""
        if not self.params.stop_strings:
            return
        text, searched = self.text, self._searched
        self._searched = len(text)
        if len(self.token_ids) <= self.params.min_tokens:
            return
        match = find_stop(text, self.params.stop_strings, searched)
        if match is None:
            return
        start, stop = match
        self._text = text[: start + len(stop) * self.params.include_stop_str_in_output]
        self.cut = True
        self.finish_reason, self.stop_reason = "stop", stop


class OutputBuilder:
    """Collects the output of one request: its answers, by the id of their EngineRequest."""

    def __init__(self, request_id: str, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.request_id, self.params, self._tokenizer = request_id, params, tokenizer
        self.answers = {f"{request_id}.{i}": CompletionBuilder(i, params, tokenizer) for i in range(params.n)}
        self.finished = False  # True: no output follows
        self.prepared = ProcessedPrompt(None, ())
        self._prompt_token_ids: list[int] = []
        self.prompt_logprobs: list[Logprobs | None] | None = None
        self.error: ErrorInfo | None = None
        self.timings: dict[str, float] = {}
        self.stats: dict[str, SequenceStats] = {}
        self.pooled: Tensor | None = None
        self.encoded: tuple[EncodedItem, ...] = ()
        self.changed = False

    def num_tokens(self, name: str) -> int:
        """Return the number of tokens of an answer's sequence, including the prompt."""
        return len(self.prepared.token_ids) + len(self.answers[name].token_ids)

    def start(self, prepared: ProcessedPrompt) -> None:
        """Set the prompt."""
        self.prepared, self._prompt_token_ids = prepared, list(prepared.token_ids)
        self.timings.update(prepared.timings)
        for answer in self.answers.values():
            answer.answer_format = prepared.answer_format

    def add(self, output: TokenOutput) -> bool:
        """Add a step's output to its answer. Return as `CompletionBuilder.add` does."""
        answer, stopped = self.answers[output.request_id], False
        if output.stats is not None:
            self.stats[output.request_id] = output.stats
        for stage, seconds in output.timings.items():
            self.timings[stage] = max(self.timings.get(stage, 0.0), seconds)
        if answer.cut:
            return False
        self.changed = self.changed or bool(output.token_ids or output.finish_reason or output.num_removed)
        if output.prompt_logprobs is not None:
            entries = output.prompt_logprobs
            self.prompt_logprobs = [None if entry is None else with_text(entry, self._tokenizer) for entry in entries]
        stopped = answer.add(output)
        self.error = self.error or self._with_item(output.error)
        self.pooled = output.pooled
        if output.encoder_rows:
            self.encoded = tuple(self._encoded_item(i, output.encoder_rows) for i in range(len(self.prepared.items)))
        return stopped

    def close(self, reason: str, error: ErrorInfo | None = None) -> None:
        """End the request. Answers without a finish reason get this one."""
        self.error, self.changed, self.finished = self._with_item(error) or self.error, True, True
        for answer in self.answers.values():
            answer.finish_reason = answer.finish_reason or reason

    def output(self, delta: bool = False) -> RequestOutput:
        """Return the output; with `delta`, the answers hold only what is new since the last output."""
        return self._output([answer.output(delta) for answer in self.answers.values()])

    def summary(self) -> RequestOutput:
        """Return the output with tokens and finish reasons of its answers. No text is decoded."""
        return self._output(
            [
                CompletionOutput(answer.index, "", list(answer.token_ids), finish_reason=answer.finish_reason)
                for answer in self.answers.values()
            ]
        )

    def _output(self, answers: list[CompletionOutput]) -> RequestOutput:
        first = self.stats.get(next(iter(self.answers)), SequenceStats())
        return RequestOutput(
            self.request_id,
            self.prepared.prompt,
            self._prompt_token_ids,
            answers,
            self.prompt_logprobs,
            self.finished,
            self.error,
            self.prepared.items,
            dict(self.timings),
            tuple(replace(item, encoder=self._encoder(i)) for i, item in enumerate(self.prepared.trace)),
            first.cached_tokens,
            sum(stats.preemptions for stats in self.stats.values()),
            self.pooled,
            self.encoded,
            self.prepared.truncated,
            add_stats(stats.drafts for stats in self.stats.values()),
        )

    def _encoded_item(self, index: int, rows: Sequence[Tensor]) -> EncodedItem:
        """Return the item with the rows of its pieces."""
        plan, prepared = self.prepared.items[index], self.prepared
        pieces = [i for i, owner in enumerate(prepared.item_of) if owner == index]
        features = [prepared.features[i] for i in pieces]
        grids, key = tuple(feature.geometry for feature in features), features[0].hash.partition(".")[0]
        return EncodedItem(plan.modality, torch.cat([rows[i] for i in pieces]), grids, key, plan.size, plan.frames)

    def freeze(self) -> None:
        """Stop decoding after an error, and keep the text decoded so far."""
        for answer in self.answers.values():
            answer.cut, answer.finish_reason = True, "error"

    def _with_item(self, error: ErrorInfo | None) -> ErrorInfo | None:
        """Replace the index of a feature, as the core counts, by the caller's index of its item, and name the item's place."""
        if error is None:
            return None
        prepared = self.prepared
        features = [i for i, feature in enumerate(prepared.features) if feature.modality == error.modality]
        if prepared.item_of and error.index is not None and error.index < len(features):
            item = prepared.items[prepared.item_of[features[error.index]]]
            error = error.without_item().for_item(item.modality, item.index)
        return error if prepared.places is None else named_item(error, prepared.places)

    def _encoder(self, item: int) -> str:
        """Return how an item's encoder rows were obtained, as in SequenceStats; the costliest way if it has several pieces."""
        pieces = [i for i, owner in enumerate(self.prepared.item_of) if owner == item]
        ways = {stats.items[i] for stats in self.stats.values() for i in pieces if i < len(stats.items)}
        return next((way for way in ("encoded", "disk", "cache", "prefix") if way in ways), "")


def _one_by_one(output: TokenOutput) -> list[TokenOutput]:
    """Return an output with several tokens as outputs with one token each. The last one has everything else."""
    *before, last = (
        replace(output, token_ids=(token,), logprobs=output.logprobs and output.logprobs[i : i + 1])
        for i, token in enumerate(output.token_ids)
    )
    return [*(replace(part, finish_reason=None, stop_reason=None) for part in before), last]


def _decode_specials(tokenizer: Tokenizer, token_ids: Sequence[int], stop: str | None) -> str:
    """Return the text before a stop string, special tokens included."""
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    return text if stop is None else text.partition(stop)[0]


def find_stop(text: str, stops: Sequence[str], searched: int) -> tuple[int, str] | None:
    """Return start and text of the earliest stop string that ends after the first `searched` characters."""
    hits = ((text.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in stops)
    return min(((at, stop) for at, stop in hits if at >= 0), default=None)


def num_stable_tokens(token_ids: Sequence[int], max_cycle: int) -> int:
    """Return how many tokens cannot be part of a loop that is found later; see `repetition.find_loop`.

    The last `max_cycle` tokens may be the first occurrence of a cycle. If they repeat an earlier one, the loop may start there.
    """
    end = len(token_ids)
    stable = max(0, end - max_cycle)
    for size in range(1, min(max_cycle, end - 1) + 1):
        first = end - size
        while first > 0 and token_ids[first - 1] == token_ids[first - 1 + size]:
            first -= 1
        stable = min(stable, first)
    return stable


def partial_stop_length(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix of the text that is a proper prefix of a stop string: 1 for "abc" and "cd"."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


def with_text(entry: Mapping[int, Logprob], tokenizer: Tokenizer) -> Logprobs:
    """Add the tokens' texts to log probabilities."""
    return {
        token: replace(value, decoded_token=tokenizer.decode([token], skip_special_tokens=False))
        for token, value in entry.items()
    }
