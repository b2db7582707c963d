"""Reads prompts, in any form that a caller may give, into `Prompt`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
from torch import Tensor

from ...callers.errors import InputError, check_utf8, hint, short_repr, typed
from ...callers.plain import builtin_copy
from ..param_checks import read_truncation

_MAX_NAME = 4096  # characters of a cache_salt
_PROMPT_KEYS = (
    "prompt",
    "prompt_token_ids",
    "prompt_embeds",
    "multi_modal_data",
    "multi_modal_uuids",
    "mm_processor_kwargs",
    "cache_salt",
    "fit",
    "truncate_prompt_tokens",
    "truncation_side",
)
_ENCODER_DECODER_KEYS = ("encoder_prompt", "decoder_prompt")


class _PromptOptions(TypedDict, total=False):
    multi_modal_data: Mapping[str, Any]
    multi_modal_uuids: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]
    cache_salt: str
    fit: str
    truncate_prompt_tokens: int
    truncation_side: str


class TextPrompt(_PromptOptions):
    """A prompt as text; `read_prompt` takes the mapping."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """A prompt as token ids; `read_prompt` takes the mapping."""

    prompt_token_ids: Sequence[int]


@dataclass(frozen=True)
class Prompt:
    """A prompt of a decoder or of an encoder. Exactly one of `text`, `token_ids` and `embeds` is not None.

    Args:
        media: `multi_modal_data`, by modality.
        uuids: `multi_modal_uuids`, by modality.
        options: `mm_processor_kwargs` of this request.
        salt: `cache_salt`; requests with different salts share no uuids and no caches.
        fit: None, or "context" to shrink media until the prompt fits.
        embeds: `prompt_embeds`, not checked yet.
        truncate_prompt_tokens: -1 cuts the prompt to the model's maximum, a number above 0 to that many tokens.
        truncation_side: see `Truncation`; None: the tokenizer's.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    media: Mapping[str, object] = field(default_factory=dict)
    uuids: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    salt: str | None = None
    fit: str | None = None
    embeds: object = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None


@dataclass(frozen=True)
class EncoderDecoderPrompt:
    """A prompt of an encoder-decoder model: the encoder's input and the decoder's first tokens (None for the model's own)."""

    encoder: Prompt
    decoder: Prompt | None = None


def read_prompt(prompt: object, max_model_len: float = math.inf, reserved_tokens: int = 1) -> Prompt | EncoderDecoderPrompt:
    """Read a prompt in any form.

    Args:
        prompt: a string, a list of token ids, `{"prompt" or "prompt_token_ids": ..., "multi_modal_data": ...}`,
            `{"prompt_embeds": ...}`, or `{"encoder_prompt": ..., "decoder_prompt": ...}` whose values have one of the other
            forms.
        reserved_tokens: tokens that a prompt leaves of `max_model_len`.

    Raises:
        InputError: any other form, or too many token ids. The error about an unknown key suggests a known one.
    """
    max_tokens = max_model_len - reserved_tokens
    if isinstance(prompt, Mapping) and dict(prompt).get("truncate_prompt_tokens") is not None:
        max_tokens = math.inf  # its caller cuts the prompt
    ids = dict(prompt).get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if isinstance(ids, list | tuple):  # before each of them is looked at
        _check_count(ids, max_tokens, reserved_tokens)
    prompt = builtin_copy(prompt, "prompt", "the prompt")
    if not isinstance(prompt, Mapping) or not any(key in prompt for key in _ENCODER_DECODER_KEYS):
        return _read_single(prompt, max_tokens, reserved_tokens)
    _check_keys(prompt, _ENCODER_DECODER_KEYS)
    if prompt.get("encoder_prompt") is None:
        reason = '"<<param>>" is missing; give it, or "prompt" for a model without an encoder'
        raise InputError(reason, param="encoder_prompt")
    encoder, decoder = (prompt.get(key) for key in _ENCODER_DECODER_KEYS)
    read_decoder = None if decoder is None else _read_single(decoder, max_tokens, reserved_tokens)
    return EncoderDecoderPrompt(_read_single(encoder, max_tokens, reserved_tokens), read_decoder)


def find_salt(prompt: object) -> str | None:
    """Return the `cache_salt` of a prompt that is not read yet. None if it has none, or one that `read_prompt` refuses."""
    fields = prompt.get("encoder_prompt", prompt) if isinstance(prompt, Mapping) else None
    salt = fields.get("cache_salt") if isinstance(fields, Mapping) else None
    return str.__str__(salt) if isinstance(salt, str) else None


def _read_single(prompt: object, max_tokens: float, reserved_tokens: int) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(prompt)
    messages = [prompt] if isinstance(prompt, Mapping) else prompt[:1024] if isinstance(prompt, list | tuple) else []
    if any(isinstance(message, Mapping) and "role" in message for message in messages):
        reason = "these are messages, which only `chat`, `stream`, `live` and `request` take"
        raise InputError(
            f'{reason}; give a prompt here: a string, token ids or {{"prompt": ...}}', code="invalid_value", param="prompt"
        )
    if isinstance(prompt, Sequence | np.ndarray | Tensor) and not isinstance(prompt, bytes):
        return Prompt(token_ids=read_token_ids(prompt, max_tokens, reserved_tokens))
    if not isinstance(prompt, Mapping):
        raise InputError(
            f'a prompt must be a string, token ids or {{"prompt": ...}}, not {typed(prompt)}',
            code="invalid_value",
            param="prompt",
        )
    _check_keys(prompt, _PROMPT_KEYS)
    text, ids, embeds = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("prompt_embeds")
    if embeds is not None:
        others = [key for key in prompt if key not in ("prompt_embeds", "cache_salt") and prompt[key] is not None]
        if others:
            raise InputError(f'"prompt_embeds" is a whole prompt; leave out {others[0]}', param=others[0])
    elif (text is None) == (ids is None):
        which = "neither" if text is None else "both"
        raise InputError(f'a prompt needs either "prompt" or "prompt_token_ids"; it has {which}', param="prompt")
    if text is not None and not isinstance(text, str):
        raise InputError(f'"prompt" must be a string, not {typed(text)}', code="invalid_value", param="prompt")
    return Prompt(
        text,
        None if ids is None else read_token_ids(ids, max_tokens, reserved_tokens),
        _read_mapping(prompt, "multi_modal_data", 'must map modalities to items, e.g. {"image": image}'),
        _read_mapping(prompt, "multi_modal_uuids", 'must map modalities to uuids, e.g. {"image": ["my-cat"]}'),
        _read_mapping(prompt, "mm_processor_kwargs", 'must map options to values, e.g. {"max_pixels": 1003520}'),
        _read_text(prompt, "cache_salt"),
        _read_fit(prompt),
        embeds,
        *read_truncation(prompt.get("truncate_prompt_tokens"), prompt.get("truncation_side")),
    )


def read_token_ids(ids: object, max_tokens: float = math.inf, reserved_tokens: int = 1) -> list[int]:
    """Return token ids `[n]` as a list. Raise InputError for other forms; the range of the ids is not checked."""
    values: Any = ids.item() if isinstance(ids, np.ndarray | Tensor) and not ids.ndim else ids
    if not isinstance(values, Sequence | np.ndarray | Tensor) or isinstance(values, str | bytes):
        raise InputError(
            f'"<<param>>" must be a list of integers, not {typed(values)}', code="invalid_value", param="prompt_token_ids"
        )
    _check_count(values, max_tokens, reserved_tokens)
    if not isinstance(values, Sequence):
        values = values.tolist()  # an array of more axes gives lists, which are refused below
    return [token if type(token) is int else _read_integer(token, index) for index, token in enumerate(values)]


def _check_count(ids: Sized, max_tokens: float, reserved_tokens: int) -> None:
    if len(ids) > max_tokens:
        reason = f"the prompt takes {len(ids)} tokens, but <<max_model_len>> is {max_tokens + reserved_tokens}; shorten it"
        raise InputError(reason, code="too_long", limit=max_tokens, value=len(ids))


def _read_integer(token: object, index: int) -> int:
    """Return an integer of Python, numpy or torch as an int."""
    value = token.item() if isinstance(token, np.generic) or (isinstance(token, Tensor) and token.ndim == 0) else token
    if not isinstance(value, int) or isinstance(value, bool):
        reason = f'"<<param>>" must be a list of integers, but entry {index} is {short_repr(token, 40)}'
        raise InputError(reason, code="invalid_value", param="prompt_token_ids")
    return int(value)


def _check_keys(prompt: Mapping[Any, object], allowed: Sequence[str]) -> None:
    for key in prompt:
        if key not in allowed:
            raise InputError(
                f"unknown key {short_repr(key, 40)} in a prompt; {hint(key, allowed)}",
                code="unknown_name",
                value=key,
                param=str(key)[:40],
            )


def _read_mapping(prompt: Mapping[Any, object], key: str, expected: str) -> Mapping[str, Any]:
    value = prompt.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f'"<<param>>" {expected}, not {typed(value)}', param=key)
    return value


def _read_text(prompt: Mapping[Any, object], key: str) -> str | None:
    value = prompt.get(key)
    if value is not None and not (isinstance(value, str) and value):
        raise InputError(
            f'"<<param>>" must be a non-empty string, not {short_repr(value, 40)}', code="invalid_value", param=key
        )
    if value is not None and len(value) > _MAX_NAME:
        raise InputError(
            f'"<<param>>" has {len(value)} characters; give at most {_MAX_NAME}',
            code="over_limit",
            param=key,
            limit=_MAX_NAME,
            value=len(value),
        )
    return value if value is None else check_utf8(value, key)


def _read_fit(prompt: Mapping[Any, object]) -> str | None:
    value = _read_text(prompt, "fit")
    if value not in (None, "context"):
        raise InputError(f'"fit" must be "context" or left out, not {short_repr(value, 40)}', code="invalid_value", param="fit")
    return value
