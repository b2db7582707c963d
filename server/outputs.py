"""Parts of responses that chat and completions share: usage, log probabilities, finish reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..engine.types import CompletionOutput, Logprob, RequestOutput

_FINISH_REASONS = {"repetition": "stop", "abort": "stop"}
"""Our finish reasons that OpenAI does not have; the others have the same names."""
_LEAST = -9999.0  # log probability of a token that cannot be drawn: JSON has no infinity


def usage(output: RequestOutput, completion_tokens: int) -> dict[str, Any]:
    """Return OpenAI's usage object of a request."""
    return total_usage([output], completion_tokens)


def total_usage(outputs: Sequence[RequestOutput], completion_tokens: int) -> dict[str, Any]:
    """Return OpenAI's usage object of several requests, with the prompt tokens of each modality."""
    media: dict[str, int] = {}
    for item in (item for output in outputs for item in output.items):
        media[f"{item.modality}_tokens"] = media.get(f"{item.modality}_tokens", 0) + item.num_tokens
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached, **media},
    }


def finish_reason(answer: CompletionOutput) -> str | None:
    reason = answer.finish_reason
    return reason if reason is None else _FINISH_REASONS.get(reason, reason)


def chat_logprobs(answer: CompletionOutput, count: int, token_bytes: Callable[[int], bytes]) -> list[dict[str, Any]]:
    """Return the entries of `logprobs.content`, with the `count` likeliest tokens each."""

    def describe(token: int, one: Logprob) -> dict[str, Any]:
        return {"token": _text(one), "logprob": _clamped(one), "bytes": list(token_bytes(token))}

    found = []
    for token, entry in zip(answer.token_ids, answer.logprobs or (), strict=False):
        ranked = sorted(entry.items(), key=lambda pair: -pair[1].logprob)
        likeliest = [describe(other, one) for other, one in ranked if one.rank is not None and one.rank <= count]
        found.append({**describe(token, entry[token]), "top_logprobs": likeliest})
    return found


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob] | None],
    count: int,
    decode: Callable[[int], str],
    start: int,
) -> dict[str, Any]:
    """Return the logprobs object of /v1/completions: the first token of a prompt has none. `start`: characters before."""
    texts, offsets = [], []
    for token in token_ids:
        texts.append(decode(token))
        offsets.append(start)
        start += len(texts[-1])
    top = [None if one is None else {_text(value): _clamped(value) for value in _ranked(one)[:count]} for one in entries]
    return {
        "tokens": texts,
        "token_logprobs": [
            None if entry is None else _clamped(entry[token]) for token, entry in zip(token_ids, entries, strict=True)
        ],
        "top_logprobs": top if count else None,
        "text_offset": offsets,
    }


def _text(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _ranked(entry: Mapping[int, Logprob]) -> list[Logprob]:
    return sorted(entry.values(), key=lambda one: -one.logprob)


def _clamped(entry: Logprob) -> float:
    return max(entry.logprob, _LEAST)
