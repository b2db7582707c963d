"""Checks of the arguments of `LLM` and `AsyncLLM`, including arguments that only vLLM has."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from types import UnionType
from typing import Any

import numpy as np
import torch

from ...callers.errors import CheckpointError, InputError, check_utf8, equals_one_of, hint, short_repr, typed
from ...callers.other_names import advice_about
from ...callers.pacing import releasing_gil
from ...callers.plain import builtin_copy
from ...mm.columns import column_values
from ...processors.files import read_template
from ...processors.text.template import load_template
from ..sampling_params import UNUSED_PARAMS, SamplingParams

Messages = Sequence[Mapping[str, Any]]
_RENDERING = ("add_generation_prompt", "chat_template", "continue_final_message", "tools", "chat_template_kwargs")
_VARIABLES = ("tools", "chat_template_kwargs")
_MAX_COMPILED = 4096  # characters; shorter templates of requests are compiled at once, to report errors early
REQUEST_KEYS = ("mm_processor_kwargs", "cache_salt", "fit", "truncate_prompt_tokens", "truncation_side")
"""Keys of a prompt that `chat` takes as arguments."""
_UNUSED = {  # argument of vLLM -> its only accepted value besides None, and why others are refused
    "lora_request": (None, "speak and encode_media take no adapters"),
    "prompt_adapter_request": (None, "there are no prompt adapters"),
    "guided_options_request": (None, "give SamplingParams structured_outputs"),
    "tokenization_kwargs": (None, "encode the prompt and give prompt_token_ids"),
    "chat_template_content_format": ("auto", "the template's syntax tree decides"),
}
_ONE_ANSWER = frozenset({"beam_size", "voice"})  # arguments of transcribe and speak, which take sampling_params without n
_TEXT_KINDS = "OSTU"  # of numpy's dtypes
_FORMS: tuple[tuple[str, type | UnionType, str], ...] = (
    ("add_generation_prompt", bool, "True or False"),
    ("chat_template", str | os.PathLike, "Jinja source, or a pathlib.Path"),
    ("chat_template_kwargs", Mapping, "a mapping"),
    ("continue_final_message", bool, "True or False"),
    ("tools", list | tuple, "a list of tools"),
)


def check_sleep_level(level: int) -> None:
    if not isinstance(level, int) or level not in (1, 2):
        raise InputError(f"<<param=>>{short_repr(level)} must be 1 or 2; both do the same", code="invalid_value", param="level")


def check_wake_tags(tags: object) -> None:
    known = ("weights", "kv_cache")
    if tags is not None and not (isinstance(tags, list | tuple) and all(equals_one_of(tag, known) for tag in tags)):
        reason = f"<<param=>>{short_repr(tags)} must be None or a list of {', '.join(known)}; any of them wakes all"
        raise InputError(reason, code="invalid_value", param="tags")


def as_prompts(prompts: object) -> Sequence[object]:
    """Return one prompt or several as a list. Raise InputError for anything else."""
    check_ordered(prompts, "prompts")
    column = column_values(prompts, "prompts")
    prompts = prompts if column is None else column
    if isinstance(prompts, np.ndarray) and prompts.ndim != 1 and prompts.dtype.kind in _TEXT_KINDS:
        reason = f"prompts must be an array of one dimension, not {prompts.ndim}; give prompts.reshape(-1)"
        raise InputError(reason, code="invalid_value", param="prompts")
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | np.ndarray | torch.Tensor):
        advice = '; token ids are {"prompt_token_ids": ids}' if isinstance(prompts, np.ndarray | torch.Tensor) else ""
        raise InputError(f"prompts must be a string, a mapping or a list of them, not {typed(prompts)}{advice}")
    listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
    return [listed] if column is None and is_token_ids(listed) else listed  # numbers in a column are no prompt


def is_token_ids(prompt: object) -> bool:
    """Return whether it is a list or tuple of integers: one prompt."""
    return (
        isinstance(prompt, list | tuple)
        and bool(prompt)
        and all(isinstance(entry, Integral) for entry in releasing_gil(prompt))
    )


def check_ordered(values: object, param: str) -> None:
    """Raise InputError for a set: it has no order, so results could not be assigned to its elements."""
    if isinstance(values, set | frozenset):
        raise InputError(
            f"<<param>> must not be a {type(values).__name__}, which has no order; give a list",
            code="invalid_value",
            param=param,
        )


def as_priorities(priority: int | Sequence[int], count: int) -> Sequence[int]:
    priority = builtin_copy(priority, "priority")
    several: list[Any] = list(priority) if isinstance(priority, Sequence) else [priority] * count
    if len(several) != count or not all(isinstance(value, int) and not isinstance(value, bool) for value in several):
        raise InputError(f"priority={short_repr(priority)} must be an integer, or one per prompt ({count} here)")
    return several


def as_conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    if (column := column_values(messages, "messages")) is not None:
        messages = column
    if isinstance(messages, Iterator):
        return list(messages)  # type: ignore[arg-type]
    if not isinstance(messages, list | tuple):
        advice = "; give [message]" if isinstance(messages, Mapping) else ""
        advice = '; give [{"role": "user", "content": text}]' if isinstance(messages, str) else advice
        raise InputError(f"messages must be a list of messages or of conversations, not {typed(messages)}{advice}")
    nested = [isinstance(entry, list | tuple) for entry in releasing_gil(messages)]
    if nested and all(nested):
        return list(messages)  # type: ignore[arg-type]
    if any(nested):
        other = nested.index(False)
        reason = f"entry {nested.index(True)} is a conversation (a list of messages), but entry {other} is"
        reason += f" {typed(messages[other])}; give one conversation, or a list of conversations"
        raise InputError(reason, param="messages")
    return [messages]  # type: ignore[list-item]


def request_template(template: str | os.PathLike[str]) -> str:
    """Return a request's chat template. Only a path object is read as a file: texts of requests may come from clients."""
    if isinstance(template, str) and {"{", "}", "\n"}.isdisjoint(check_utf8(template, "chat_template")):
        reason = f"<<param=>>{short_repr(template)} is not Jinja source; give Jinja source, or the path as pathlib.Path"
        raise InputError(reason, param="chat_template")
    return read_chat_template(template, _MAX_COMPILED)


def read_chat_template(template: str | os.PathLike[str], max_compiled: float = math.inf) -> str:
    """Return a chat template. Raise InputError if it cannot be read or, up to `max_compiled` characters, compiled."""
    try:
        source = read_template(template)
        if len(source) <= max_compiled:
            load_template(source)
    except CheckpointError as error:
        raise InputError(error.info.text, param="chat_template") from None
    return source


def drop_vllm_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without vLLM's arguments that have no meaning here. Raise InputError if one asks for something."""
    for name, (default, reason) in _UNUSED.items():
        if not equals_one_of(options.get(name), (None, default)):
            raise InputError(
                f"<<param=>>{short_repr(options[name])} cannot be honoured: {reason}", code="unsupported", param=name
            )
    return {name: value for name, value in options.items() if name not in _UNUSED}


def unknown_argument(name: str, allowed: Collection[str], where: str = "") -> InputError:
    """Return the error about an unknown argument of a call that may take sampling_params."""
    is_sampling = "sampling_params" in allowed and name in SamplingParams.__dataclass_fields__
    if is_sampling and name == "n" and not _ONE_ANSWER.isdisjoint(allowed):
        advice = "there is one answer for each input; leave it out"
    elif is_sampling and name not in UNUSED_PARAMS:
        advice = f"give sampling_params=SamplingParams({name}=...)"
    elif "prompts" in allowed and name in REQUEST_KEYS:
        advice = 'give it as a key of the prompt: {"prompt": ..., "' + name + '": ...}'
    elif "prompts" in allowed and name in ("prompt_token_ids", "prompt_embeds"):
        advice = 'give it as a prompt: {"' + name + '": ...}'
    elif is_sampling and not advice_about(name, allowed) and UNUSED_PARAMS[name][1]:
        advice = UNUSED_PARAMS[name][1]
    else:
        advice = hint(name, allowed)
    return InputError(f"unknown argument {short_repr(name, 40)}{where}; {advice}", code="unknown_name", value=name, param=name)


def read_chat_options(options: Mapping[str, Any], max_template_chars: int) -> dict[str, Any]:
    """Return the arguments of `chat` in builtin types. Raise InputError for a wrong name, type or size."""
    for name in options:
        if name not in (*_RENDERING, *REQUEST_KEYS):
            raise unknown_argument(name, ("sampling_params", *_RENDERING, *REQUEST_KEYS), " for messages")
    for name, kind, expected in _FORMS:
        if not isinstance(options.get(name), kind | None):
            raise InputError(f"<<param>> must be {expected}, not {typed(options[name])}", code="invalid_value", param=name)
    limits = dict.fromkeys(_VARIABLES, max_template_chars)
    copied = {
        name: builtin_copy(value, name, max_chars=limits.get(name, math.inf), option="max_template_chars")
        for name, value in options.items()
    }
    if not all(isinstance(name, str) for name in copied.get("chat_template_kwargs") or ()):
        raise InputError("<<param>> must be a mapping from names to values", code="invalid_value", param="chat_template_kwargs")
    return copied
