"""The text of models without a decoder.

With CTC, each encoder row names a token, and runs of equal tokens are one. A transducer returns the tokens with their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import exp
from statistics import fmean
from typing import TYPE_CHECKING

from torch import Tensor

from ...engine.builtin_logits_processors import BOOST_PHRASES
from ...engine.frontend.processed_prompt import ProcessedPrompt
from ...engine.frontend.request import RequestInput
from ...engine.frontend.request_handle import RequestHandle
from ...engine.outputs import CompletionOutput, RequestOutput
from ...engine.pooling_params import PoolingParams
from ...engine.sampling_params import SamplingParams
from ...mm.speech import FrameRule, SpeechRequest
from ...mm.types import MultiModalFeature
from ..pooling import pooling_request
from ..run import answer
from .boost import Boosted, boosted_output
from .segments import Segment, WindowText, Word
from .words import merge_punctuation, split_tokens

if TYPE_CHECKING:
    from ...engine.engine import Engine


_DECODED = 4  # columns


@dataclass(frozen=True)
class FrameToken:
    """A token of the rows from `start` up to `end`, and its log probability; with CTC its mean over these rows."""

    token: int
    start: int
    end: int
    logprob: float


def frame_tokens(rows: Tensor, rule: FrameRule) -> Iterator[FrameToken]:
    """Yield the tokens of float32 `[rows, 2]`: in each row the likeliest token and its log probability.

    Rows that the model has decoded are `[tokens, 4]`: token, row, duration in rows, log probability.
    """
    if rows.shape[1] == _DECODED:
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


async def read_frames(
    engine: Engine, item: object, request: SpeechRequest, rule: FrameRule, cache_salt: str | None, boost: Boosted = None
) -> RequestOutput:
    """Return the output of a window with its tokens as the answer. `pooled` holds the rows."""

    async def read(arguments: Boosted, drafted: Sequence[int]) -> RequestOutput:
        params = SamplingParams(max_tokens=1, logits_processors={} if arguments is None else {BOOST_PHRASES: arguments})
        output = await answer(_rows_request(engine, item, request, cache_salt, params))
        if output.error or output.pooled is None:
            return output
        emitted = list(frame_tokens(output.pooled, rule))
        tokens, total = [entry.token for entry in emitted], sum(entry.logprob for entry in emitted)
        # with a stop reason, since the last token is not an end token
        completion = CompletionOutput(0, "", tokens, cumulative_logprob=total, finish_reason="stop", stop_reason=rule.blank)
        return replace(output, outputs=[completion])

    return await boosted_output(await read(None, ()), boost, read)


def _rows_request(
    engine: Engine, item: object, request: SpeechRequest, cache_salt: str | None, params: SamplingParams
) -> RequestHandle:
    """Return the request for the rows of an item, or of the open window of a stream, which is processed already."""
    pooling = PoolingParams(pooling="tokens")
    if not isinstance(item, MultiModalFeature):
        prompt = {"prompt": request.prompt, "multi_modal_data": {"audio": [item]}, "cache_salt": cache_salt}
        return pooling_request(engine, prompt, pooling, {}, params)
    assert engine.speech is not None
    ids = (engine.speech.placeholder_ids["audio"],) * item.geometry.num_embeds
    made = ProcessedPrompt(None, ids, (item,), salt=cache_salt or "")
    return RequestHandle(RequestInput(lambda: made, params, pooling=pooling.request(engine.info.pooling)))


class FrameAligner:
    """Adds the times of words, from the rows that name their tokens. It makes no request."""

    def __init__(self, rule: FrameRule) -> None:
        self._rule = rule

    async def __call__(
        self, engine: Engine, item: object, text: WindowText, request: SpeechRequest, language: str | None, rate: int
    ) -> WindowText:
        assert text.output.pooled is not None
        emitted, step = list(frame_tokens(text.output.pooled, self._rule)), self._rule.step
        words, at = [], 0
        for word, count in split_tokens([entry.token for entry in emitted], engine.tokenizer.decode, language):
            run = emitted[at : at + count]
            words.append(Word(run[0].start * step, run[-1].end * step, word, fmean(exp(entry.logprob) for entry in run)))
            at += count
        tokens, logprob = tuple(entry.token for entry in emitted), fmean(entry.logprob for entry in emitted)
        segment = Segment(0.0, None, text.result.text, 1, tokens, logprob, words=tuple(merge_punctuation(words)))
        return replace(text, segments=(segment,))
