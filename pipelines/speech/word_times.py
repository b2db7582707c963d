"""Adds the times of words to the text of a window, from the cross-attention of the model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, exp
from statistics import fmean
from typing import TYPE_CHECKING

from ...engine.outputs import RequestOutput
from ...engine.pooling_params import PoolingParams
from ...mm.speech import AlignmentRule, SpeechRequest
from ..pooling import pooling_request
from ..run import answer
from .alignment import token_starts
from .decode import answer_tokens
from .segments import Segment, WindowText, Word
from .words import end_at_pauses, merge_punctuation, shorten_long_words, split_tokens

if TYPE_CHECKING:
    from ...engine.engine import Engine


class AttentionAligner:
    """Finds the times of words by one more pass of the decoder over the finished text.

    Args:
        rule: the heads whose cross-attention is read.
        make_request: returns the request for a language and a context, without timestamps.
        cache_salt: of all requests.
    """

    def __init__(
        self, rule: AlignmentRule, make_request: Callable[[str | None, str], SpeechRequest], cache_salt: str | None
    ) -> None:
        self._rule, self._make_request, self._cache_salt = rule, make_request, cache_salt

    async def __call__(
        self, engine: Engine, item: object, text: WindowText, request: SpeechRequest, language: str | None, rate: int
    ) -> WindowText:
        parts = text.segments
        if parts is None:  # the model writes no timestamps
            parts = (Segment(0.0, None, text.result.text, 1, tuple(answer_tokens(text.output.outputs[0]))),)
        tokens = [token for part in parts for token in part.tokens]
        seconds = None if text.window is None else len(text.window.samples) / rate
        starts = await self.token_times(engine, item, tokens, language, seconds)
        if isinstance(starts, RequestOutput):
            return replace(text, output=starts)
        completion, first = text.output.outputs[0], None if request.times is None else request.times.first
        pairs = zip(completion.token_ids, completion.logprobs or (), strict=False)
        logprobs = [entry[token].logprob for token, entry in pairs if first is None or token < first]
        times = [*starts, *starts[-1:] * len(tokens)]  # of the tokens for which the prompt had no room, too
        pauses = [] if text.window is None else text.window.pause_times(rate)
        timed = _with_words(parts, times, logprobs, engine.tokenizer.decode, language, pauses)
        return replace(text, segments=timed, token_times=starts)

    async def token_times(
        self, engine: Engine, item: object, tokens: Sequence[int], language: str | None, seconds: float | None
    ) -> list[float] | RequestOutput:
        """Return the start of each token and the end of the last one in seconds, or the output of a request that failed.

        `seconds`: length of the audio; None: the model's window.
        """
        prefix = engine.tokenizer.encode(self._make_request(language, "").prompt, add_special_tokens=False)
        tokens = tokens[: engine.max_model_len - len(prefix) - 3]  # the family may add a token to the prefix
        if not tokens:
            return [0.0]
        ids = [*prefix, *tokens, engine.eos_token_ids[0]]
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"audio": [item]}, "cache_salt": self._cache_salt}
        output = await answer(pooling_request(engine, prompt, PoolingParams(cross_attention=self._rule.heads), {}))
        if output.error or output.pooled is None:
            return output
        rows = output.pooled.shape[-1]
        frames = rows if seconds is None else min(rows, ceil(seconds / self._rule.step))
        before = len(output.prompt_token_ids) - len(tokens) - 1  # the family may have added tokens to the prefix
        starts: list[float] = (token_starts(output.pooled, before, frames) * self._rule.step).tolist()
        return starts


def _with_words(
    parts: Sequence[Segment],
    times: Sequence[float],
    logprobs: Sequence[float],
    decode: Callable[[Sequence[int]], str],
    language: str | None,
    pauses: Sequence[tuple[float, float]],
) -> tuple[Segment, ...]:
    """Return the segments with their words. `times`: start of each token; logprobs: of each token; pauses: in seconds."""
    at, merged = 0, []
    for part in parts:
        words = []
        for word, count in split_tokens(part.tokens, decode, language):
            probability = fmean(map(exp, logprobs[at : at + count] or [0.0]))
            words.append(Word(times[at], times[at + count], word, probability))
            at += count
        merged.append(merge_punctuation(words))
    shortened = iter(shorten_long_words(end_at_pauses([word for words in merged for word in words], pauses)))
    return tuple(replace(part, words=tuple(next(shortened) for _ in words)) for part, words in zip(parts, merged, strict=True))
