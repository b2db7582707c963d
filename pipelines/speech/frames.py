"""The text of models without a decoder.

With CTC, each encoder row names a token, and runs of equal tokens are one. A transducer returns the tokens with their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import exp
from statistics import fmean
from typing import TYPE_CHECKING

from torch import Tensor

from ...engine.pooling_params import PoolingParams
from ...engine.types import CompletionOutput, RequestOutput
from ...mm.speech import FrameRule, SpeechRequest
from ..pooling import pooling_request
from ..tasks import Task
from .results import Segment, Word
from .words import merge_punctuation, split_tokens

if TYPE_CHECKING:
    from ...engine.llm import LLM
    from .decode import WindowText


@dataclass(frozen=True)
class FrameToken:
    """A token of the rows from `start` up to `end`, and its log probability; with CTC its mean over these rows."""

    token: int
    start: int
    end: int
    logprob: float


def frame_tokens(rows: Tensor, rule: FrameRule) -> Iterator[FrameToken]:
    """Yield the tokens of float32 `[rows, 2]`: in each row the likeliest token and its log probability.

    If `rule.is_decoded`, `rows` are `[tokens, 4]`: token, row, duration in rows, log probability.
    """
    if rule.is_decoded:
        for token, first, duration, logprob in rows.tolist():
            if int(token) != rule.blank:
                yield FrameToken(int(token), int(first), int(first + duration), logprob)
        return
    start = 0
    for token, run in groupby(rows.tolist(), key=lambda row: int(row[0])):
        logprobs = [logprob for _, logprob in run]
        if token != rule.blank:
            yield FrameToken(token, start, start + len(logprobs), fmean(logprobs))
        start += len(logprobs)


def frames_task(llm: LLM, item: object, request: SpeechRequest, rule: FrameRule, cache_salt: str | None) -> Task[RequestOutput]:
    """Return the output of a window with its tokens as the answer. `pooled` holds the rows."""
    prompt = {"prompt": request.prompt, "multi_modal_data": {"audio": [item]}, "cache_salt": cache_salt}
    output = yield pooling_request(llm, prompt, PoolingParams(pooling="tokens"), {})
    if output.error or output.pooled is None:
        return output
    found = list(frame_tokens(output.pooled, rule))
    tokens, total = [one.token for one in found], sum(one.logprob for one in found)
    # with a stop reason, since the last token is not an end token
    answer = CompletionOutput(0, "", tokens, cumulative_logprob=total, finish_reason="stop", stop_reason=rule.blank)
    return replace(output, outputs=[answer])


class FrameAligner:
    """Adds the times of words, from the rows that name their tokens. It makes no request."""

    def __init__(self, rule: FrameRule) -> None:
        self._rule = rule

    def __call__(
        self, llm: LLM, item: object, text: WindowText, request: SpeechRequest, language: str | None, rate: int
    ) -> Task[WindowText]:
        assert text.output.pooled is not None
        found, step = list(frame_tokens(text.output.pooled, self._rule)), self._rule.step
        words, at = [], 0
        for word, count in split_tokens([one.token for one in found], llm.get_tokenizer().decode, language):
            own = found[at : at + count]
            words.append(Word(own[0].start * step, own[-1].end * step, word, fmean(exp(one.logprob) for one in own)))
            at += count
        tokens, logprob = tuple(one.token for one in found), fmean(one.logprob for one in found)
        segment = Segment(0.0, None, text.result.text, 1, tokens, logprob, words=tuple(merge_punctuation(words)))
        return replace(text, segments=(segment,))
        yield  # type: ignore[unreachable]  # a task, without requests
