"""Signs that a text read or heard by a model is probably wrong: low log probabilities, and repetition."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import ClassVar

from ..callers.repr_mixin import ReprMixin
from ..engine.outputs import RequestOutput
from ..engine.sampling_params import SamplingParams


class TextResult(ReprMixin):
    """Base of `Page` and `Transcript`. Subclasses set the thresholds of `doubt`."""

    text: str
    output: RequestOutput
    min_avg_logprob: ClassVar[float]
    max_compression_ratio: ClassVar[float] = float("inf")

    @property
    def finish_reason(self) -> str | None:
        """The answer's finish reason; "length" if the text was cut off at the token limit."""
        return self.output.outputs[0].finish_reason

    @property
    def avg_logprob(self) -> float | None:
        """The mean log probability of the answer's tokens, or None if there are none."""
        answer = self.output.outputs[0]
        if answer.cumulative_logprob is None or not answer.token_ids:
            return None
        return answer.cumulative_logprob / len(answer.token_ids)

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text per byte after zlib compression. Repetitive text has a large ratio."""
        return compression_ratio(self.text)

    @property
    def doubt(self) -> str | None:
        """Why the text is probably wrong, or None."""
        if self.avg_logprob is not None and self.avg_logprob < self.min_avg_logprob:
            return f"the mean log probability of its tokens is {self.avg_logprob:.2f}, below {self.min_avg_logprob:g}"
        if self.compression_ratio > self.max_compression_ratio:
            ratio, limit = self.compression_ratio, self.max_compression_ratio
            return f"it repeats itself: its compression ratio is {ratio:.1f}, above {limit:g}"
        return None


def compression_ratio(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def with_logprobs(params: SamplingParams) -> SamplingParams:
    """Return the parameters with the log probability of each token, which `avg_logprob` needs."""
    return replace(params, logprobs=0) if params.logprobs is None else params
