"""Outputs of the sequences of a step: tokens, pooled results, and errors."""

from __future__ import annotations

import logging
from dataclasses import replace
from operator import attrgetter

from torch import Tensor

from ...callers.errors import ErrorInfo, InputError, is_out_of_memory
from ..errors import error_text
from ..types import TokenOutput
from .pooling import as_result
from .sampler import NOT_FINITE, SampledToken
from .sequence_state import SequenceState

_GET_TOKEN, _GET_LOGPROBS = attrgetter("token"), attrgetter("logprobs")
_log = logging.getLogger(__name__)


def token_output(sequence: SequenceState, result: list[SampledToken] | Exception) -> TokenOutput:
    """Return the output of a sequence: its tokens, which the sequence has already, or why there are none."""
    name = sequence.request_id
    if isinstance(result, Exception):
        explained = isinstance(result, InputError) and result.__cause__ is None
        _log.warning("sampling failed", exc_info=None if explained else result)
        return TokenOutput(name, (), error=_sampling_error(result))
    logprobs = None if result[0].logprobs is None else tuple(map(_GET_LOGPROBS, result))
    return TokenOutput(name, tuple(map(_GET_TOKEN, result)), logprobs)


def pooled_output(name: str, rows: Tensor | Exception) -> TokenOutput:
    """Return the output of a sequence that is pooled: its result, or why there is none."""
    if isinstance(rows, Exception):
        return TokenOutput(name, (), error=_sampling_error(rows))
    if not rows.isfinite().all():
        return TokenOutput(name, (), error=NOT_FINITE)
    return TokenOutput(name, (), pooled=as_result(rows) if rows.is_inference() else rows)


def _sampling_error(error: Exception) -> ErrorInfo:
    if isinstance(error, InputError):
        info = error.info
    else:
        info = ErrorInfo("out_of_memory" if is_out_of_memory(error) else "internal", error_text(error))
    if info.code == "not_finite":
        return info
    return replace(info, text=f"sampling failed: {info.text}; send the request again with other parameters")
