"""Checks of the arguments of `LLM` and `AsyncLLM`, including arguments that only vLLM has."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any

import numpy as np
import torch

from ...mm.errors import CheckpointError, InputError, check_utf8, equals_one_of, hint, short_repr, typed
from ...mm.pacing import releasing_gil
from ...mm.plain import builtin_copy, builtin_list, check_classes, reading
from ...processors.files import read_template
from ...processors.text.template import load_template
from ..sampling_params import SamplingParams

Messages = Sequence[Mapping[str, Any]]
_RENDERING = ("add_generation_prompt", "chat_template", "continue_final_message", "tools", "chat_template_kwargs")
_VARIABLES = ("tools", "chat_template_kwargs")
_MAX_COMPILED = 4096  # characters; shorter templates of requests are compiled at once, to report errors early
REQUEST_KEYS = ("mm_processor_kwargs", "cache_salt", "fit")  # keys of a prompt that `chat` takes as arguments
_UNUSED = {  # argument of vLLM -> its only accepted value besides None, and why others are refused
    "lora_request": (None, "give LLM the adapter's folder as adapter="),
    "prompt_adapter_request": (None, "there are no prompt adapters"),
    "guided_options_request": (None, "give SamplingParams structured_outputs"),
    "tokenization_kwargs": (None, "encode the prompt and give prompt_token_ids"),
    "chat_template_content_format": ("auto", "the template's syntax tree decides"),
}
_FORMS: tuple[tuple[str, type | UnionType, str], ...] = (
    ("add_generation_prompt", bool, "True or False"),
    ("chat_template", str | os.PathLike, "Jinja source, or a pathlib.Path"),
    ("chat_template_kwargs", Mapping, "a mapping"),
    ("continue_final_message", bool, "True or False"),
    ("tools", list | tuple, "a list of tools"),
)


def check_sleep_level(level: int) -> None:
    if level not in (1, 2):
        raise InputError(f"level={short_repr(level)} must be 1 or 2; both do the same", param="level")


def as_prompts(prompts: object) -> Sequence[object]:
    """Return one prompt or several as a list. Raise InputError for anything else."""
    check_classes(prompts=prompts)
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | np.ndarray | torch.Tensor):
        raise InputError(f"prompts must be a string, a mapping or a list of them, not {typed(prompts)}")
    if isinstance(prompts, list | tuple):
        prompts = builtin_list(prompts, "prompts")
    listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
    with reading(listed, "prompts"):
        is_one = bool(listed) and all(isinstance(entry, int) for entry in releasing_gil(listed))  # a list of token ids
    return [listed] if is_one else listed


def as_priorities(given: int | Sequence[int], count: int) -> Sequence[int]:
    given = builtin_copy(given, "priority")
    several: list[Any] = list(given) if isinstance(given, Sequence) else [given] * count
    if len(several) != count or not all(isinstance(one, int) and not isinstance(one, bool) for one in several):
        raise InputError(f"priority={short_repr(given)} must be an integer, or one per prompt ({count} here)")
    return several


def as_conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    check_classes(messages=messages)
    if isinstance(messages, Iterator):
        return list(messages)  # type: ignore[arg-type]
    if not isinstance(messages, list | tuple):
        how = "; give [message]" if isinstance(messages, Mapping) else ""
        how = '; give [{"role": "user", "content": text}]' if isinstance(messages, str) else how
        raise InputError(f"messages must be a list of messages or of conversations, not {typed(messages)}{how}")
    messages = builtin_list(messages, "messages")
    with reading(messages, "messages"):
        nested = [isinstance(entry, list | tuple) for entry in releasing_gil(messages)]
    if nested and all(nested):
        return [builtin_list(entry, "messages") for entry in messages]  # type: ignore[arg-type]
    if any(nested):
        other = nested.index(False)
        reason = f"entry {nested.index(True)} is a conversation (a list of messages), but entry {other} is"
        reason += f" {typed(messages[other])}; give one conversation, or a list of conversations"
        raise InputError(reason, param="messages")
    return [messages]  # type: ignore[list-item]


def request_template(given: str | os.PathLike[str]) -> str:
    """Return a request's chat template. Only a path object is read as a file: texts of requests may come from clients."""
    with reading(given, "chat_template"):
        return _request_template(given)


def _request_template(given: str | os.PathLike[str]) -> str:
    if isinstance(given, str) and {"{", "}", "\n"}.isdisjoint(check_utf8(given, "chat_template")):
        reason = f"chat_template={short_repr(given)} is not Jinja source; give Jinja source, or the path as pathlib.Path"
        raise InputError(reason, param="chat_template")
    return read_chat_template(given, _MAX_COMPILED)


def read_chat_template(given: str | os.PathLike[str], max_compiled: float = math.inf) -> str:
    """Return a chat template. Raise InputError if it cannot be read or, up to `max_compiled` characters, compiled."""
    try:
        source = read_template(given)
        if len(source) <= max_compiled:
            load_template(source)
    except CheckpointError as error:
        raise InputError(str(error), param="chat_template") from None
    return source


def drop_vllm_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without vLLM's arguments that have no meaning here. Raise InputError if one asks for something."""
    for name, (default, reason) in _UNUSED.items():
        if not equals_one_of(options.get(name), (None, default)):
            raise InputError(f"{name}={short_repr(options[name])} cannot be honoured: {reason}", param=name)
    return {name: value for name, value in options.items() if name not in _UNUSED}


def unknown_argument(name: str, known: Collection[str], where: str = "") -> InputError:
    """Return the error about an unknown argument of a call that may take sampling_params."""
    if "sampling_params" in known and name in SamplingParams.__dataclass_fields__:
        how = f"give sampling_params=SamplingParams({name}=...)"
    elif "prompts" in known and name in REQUEST_KEYS:
        how = 'give it as a key of the prompt: {"prompt": ..., "' + name + '": ...}'
    elif "prompts" in known and name in ("prompt_token_ids", "prompt_embeds"):
        how = 'give it as a prompt: {"' + name + '": ...}'
    else:
        how = hint(name, known)
    return InputError(f"unknown argument {short_repr(name, 40)}{where}; {how}", param=name)


def read_chat_options(options: Mapping[str, Any], max_template_chars: int) -> dict[str, Any]:
    """Return the arguments of `chat` in builtin types. Raise InputError for a wrong name, type or size."""
    for name in options:
        if name not in (*_RENDERING, *REQUEST_KEYS):
            raise unknown_argument(name, ("sampling_params", *_RENDERING, *REQUEST_KEYS), " for messages")
    check_classes(**options)
    for name, kind, form in _FORMS:
        if not isinstance(options.get(name), kind | None):
            raise InputError(f"{name} must be {form}, not {typed(options[name])}", param=name)
    limits = dict.fromkeys(_VARIABLES, max_template_chars)
    copied = {
        name: builtin_copy(value, name, max_chars=limits.get(name, math.inf), option="max_template_chars")
        for name, value in options.items()
    }
    if not all(isinstance(name, str) for name in copied.get("chat_template_kwargs") or ()):
        raise InputError("chat_template_kwargs must be a mapping from names to values", param="chat_template_kwargs")
    return copied
