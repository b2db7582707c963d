"""Parts of responses that chat and completions share: usage, log probabilities, finish reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..engine.outputs import CompletionOutput, RequestOutput
from ..engine.types import Logprob

_FINISH_REASONS = {"repetition": "stop", "abort": "stop"}
"""Our finish reasons that OpenAI does not have; the others have the same names."""
_MIN_LOGPROB = -9999.0  # log probability of a token that cannot be drawn: JSON has no infinity


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
    drafts = draft_details(outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached, **media},
        **({"completion_tokens_details": drafts} if drafts else {}),
    }


def draft_details(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Return OpenAI's counts of drafted tokens, of all sources; {} if none were verified."""
    drafts = [stats for output in outputs for stats in output.drafts]
    drafted, accepted = sum(stats.num_drafted for stats in drafts), sum(stats.num_accepted for stats in drafts)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted} if drafts else {}


def with_reasoning(counts: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return a usage object with the tokens of reasoning."""
    details = counts.get("completion_tokens_details", {})
    return {**counts, "completion_tokens_details": {"reasoning_tokens": num_tokens, **details}}


def finish_reason(answer: CompletionOutput) -> str | None:
    reason = answer.finish_reason
    return reason if reason is None else _FINISH_REASONS.get(reason, reason)


def chat_logprobs(
    answer: CompletionOutput, count: int, token_bytes: Callable[[int], bytes], as_ids: bool = False
) -> list[dict[str, Any]]:
    """Return the entries of `logprobs.content`, with the `count` likeliest tokens each; `as_ids`: see `id_text`."""

    def describe(token: int, logprob: Logprob) -> dict[str, Any]:
        return {
            "token": id_text(token) if as_ids else _text(logprob),
            "logprob": _clamped(logprob),
            "bytes": list(token_bytes(token)),
        }

    entries = []
    for token, entry in zip(answer.token_ids, answer.logprobs or (), strict=False):
        ranked = sorted(entry.items(), key=lambda pair: -pair[1].logprob)
        likeliest = [
            describe(other, logprob) for other, logprob in ranked if logprob.rank is not None and logprob.rank <= count
        ]
        entries.append({**describe(token, entry[token]), "top_logprobs": likeliest})
    return entries


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob] | None],
    count: int,
    decode: Callable[[int], str],
    start: int,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Return the logprobs object of /v1/completions: the first token of a prompt has none.

    Args:
        start: characters before.
        as_ids: see `id_text`.
    """
    texts, offsets = [], []
    for token in token_ids:
        texts.append(decode(token))
        offsets.append(start)
        start += len(texts[-1])
    names = [*map(id_text, token_ids)] if as_ids else texts
    top = [
        None
        if entry is None
        else {id_text(token) if as_ids else _text(value): _clamped(value) for token, value in _ranked(entry)[:count]}
        for entry in entries
    ]
    return {
        "tokens": names,
        "token_logprobs": [
            None if entry is None else _clamped(entry[token]) for token, entry in zip(token_ids, entries, strict=True)
        ],
        "top_logprobs": top if count else None,
        "text_offset": offsets,
    }


def id_text(token: int) -> str:
    """Return vLLM's text of a token for `return_tokens_as_token_ids`, which tells tokens of half a character apart."""
    return f"token_id:{token}"


def _text(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _ranked(entry: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda pair: -pair[1].logprob)


def _clamped(entry: Logprob) -> float:
    return max(entry.logprob, _MIN_LOGPROB)
