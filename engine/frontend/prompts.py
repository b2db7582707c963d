"""Every form a prompt may take, read into one. Knows no tokenizer, no media and no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from ..mm.errors import InputError, hint, typed

_KEYS = (
    "prompt",
    "prompt_token_ids",
    "multi_modal_data",
    "multi_modal_uuids",
    "mm_processor_kwargs",
    "cache_salt",
    "fit",
)
_BOTH = ("encoder_prompt", "decoder_prompt")


@dataclass(frozen=True)
class Prompt:
    """A prompt for one decoder, or for an encoder: exactly one of `text` and `token_ids` is given.

    Args:
        media: `multi_modal_data`, by modality.
        uuids: `multi_modal_uuids`, by modality.
        options: `mm_processor_kwargs` of this request.
        salt: `cache_salt`; requests of different salts share no names and no caches.
        fit: None, or "context": media are made smaller until the prompt fits.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    media: Mapping[str, object] = field(default_factory=dict)
    uuids: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    salt: str | None = None
    fit: str | None = None


@dataclass(frozen=True)
class EncoderDecoderPrompt:
    """For an encoder-decoder model: input of its encoder, and what its decoder starts with (None: the model's own)."""

    encoder: Prompt
    decoder: Prompt | None = None


def normalise(prompt: object) -> Prompt | EncoderDecoderPrompt:
    """A prompt from a string, a list of token ids, `{"prompt" or "prompt_token_ids": ..., "multi_modal_data": ...}`, or
    `{"encoder_prompt": ..., "decoder_prompt": ...}` with these forms inside.

    Raises:
        InputError: any other form, with the nearest known key of an unknown one.
    """
    if not isinstance(prompt, Mapping) or not any(key in prompt for key in _BOTH):
        return _single(prompt)
    _check_keys(prompt, _BOTH)
    if prompt.get("encoder_prompt") is None:
        raise InputError('"encoder_prompt" is missing; give it, or "prompt" for a model without an encoder')
    decoder = prompt.get("decoder_prompt")
    return EncoderDecoderPrompt(_single(prompt["encoder_prompt"]), None if decoder is None else _single(decoder))


def _single(prompt: object) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(prompt)
    if isinstance(prompt, Sequence | np.ndarray | Tensor) and not isinstance(prompt, bytes):
        return Prompt(token_ids=read_token_ids(prompt))
    if not isinstance(prompt, Mapping):
        raise InputError(f'a prompt is a string, token ids or {{"prompt": ...}}, not {typed(prompt)}')
    _check_keys(prompt, _KEYS)
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if (text is None) == (ids is None):
        raise InputError('a prompt needs either "prompt" or "prompt_token_ids"')
    if text is not None and not isinstance(text, str):
        raise InputError(f'"prompt" is a string, not {typed(text)}')
    return Prompt(
        text,
        None if ids is None else read_token_ids(ids),
        _mapping(prompt, "multi_modal_data", 'maps modality to items, e.g. {"image": image}'),
        _mapping(prompt, "multi_modal_uuids", 'maps modality to names, e.g. {"image": ["my-cat"]}'),
        _mapping(prompt, "mm_processor_kwargs", 'maps options to values, e.g. {"max_pixels": 1003520}'),
        _text(prompt, "cache_salt"),
        _fit(prompt),
    )


def read_token_ids(ids: object) -> list[int]:
    """A list of integers from any sequence, array or tensor `[n]` of them; InputError otherwise. The range is not checked."""
    if isinstance(ids, np.ndarray | Tensor):
        ids = ids.tolist()  # of an array of any other shape, entries are no integers
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise InputError(f'"prompt_token_ids" is a list of integers, not {typed(ids)}')
    return [token if type(token) is int else _whole(token, place) for place, token in enumerate(ids)]


def _whole(token: object, place: int) -> int:
    """An integer of Python, numpy or torch, as a plain one."""
    value = token.item() if isinstance(token, np.generic) or (isinstance(token, Tensor) and token.ndim == 0) else token
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f'"prompt_token_ids" is a list of integers; number {place} is {str(token)[:40]!r}')
    return int(value)


def _check_keys(prompt: Mapping[Any, object], known: Sequence[str]) -> None:
    for key in prompt:
        if key not in known:
            raise InputError(f"unknown key {str(key)[:40]!r} in a prompt; {hint(key, known)}")


def _mapping(prompt: Mapping[Any, object], key: str, form: str) -> Mapping[str, Any]:
    value = prompt.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f'"{key}" {form}, not {typed(value)}')
    return value


def _text(prompt: Mapping[Any, object], key: str) -> str | None:
    value = prompt.get(key)
    if value is not None and not (isinstance(value, str) and value):
        raise InputError(f'"{key}" is a text that is not empty, not {str(value)[:40]!r}')
    return value


def _fit(prompt: Mapping[Any, object]) -> str | None:
    value = _text(prompt, "fit")
    if value not in (None, "context"):
        raise InputError(f'"fit" is "context" or missing, not {str(value)[:40]!r}')
    return value
