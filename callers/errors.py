"""Errors that a caller can cause or has to handle. Every message is one line: what is wrong, the limit, and what to do next.

Each error is data: a code, the parameter, the limit, the value, and an advice. Its text is a template (`wording`), which
Python, the server and the command line word in their own way.
"""

from __future__ import annotations

import difflib
import errno
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from typing import Any, ClassVar, Literal, TypeVar

from .other_names import advice_about
from .wording import ADVICE, advice_in, in_python, worded

ErrorCode = Literal[
    "invalid_input",  # a prompt, message or parameter that cannot be served, for another reason than the next four
    "invalid_value",  # the value of a parameter has a wrong type or is not allowed
    "unknown_name",  # a parameter, field or option that does not exist; `value` is its name
    "unsupported",  # what is asked for exists, but this model or engine does not do it
    "over_limit",  # more than a limit allows, which `limit` gives: an item's pixels, seconds or bytes, the entries of a list
    "invalid_media",  # an item that cannot be read, decoded or processed
    "too_long",  # more tokens than the model's context or the caches can ever hold
    "invalid_config",  # an engine option, or a checkpoint's config.json
    "checkpoint",  # weights or tokenizer files
    "not_found",  # a model's name, or a revision, that the Hub does not know, or an adapter that no resolver finds
    "gated",  # a model on the Hub that this account may not read
    "unreachable",  # the Hub, whose cache lacks the model, or the encoders of other engines (`encoder`)
    "disk_full",  # too little space for a download, a body or a file of the server
    "encoder_failed",  # the encoder failed on an item, now or a short while ago
    "not_finite",  # the model computed NaN or infinity
    "out_of_memory",  # on the device or the host
    "overloaded",  # more requests than the engine takes
    "busy",  # the machine gave a worker process too little of its processors; the same request may succeed later
    "interrupted",  # the step was interrupted, for example by Ctrl-C
    "engine_asleep",  # call `wake_up` first
    "engine_closed",  # the engine was closed, or belongs to another process
    "engine_dead",  # the engine or its process has failed; the message says whether to ask again or to make a new engine
    "internal",  # a bug of sensorium
]
OF_PROMPTS: tuple[ErrorCode, ...] = (
    "invalid_input", "invalid_value", "unknown_name", "unsupported", "over_limit", "too_long",
)  # fmt: skip
"""Codes of errors that another prompt, or other parameters, would avoid."""
_OF_VALUES = ("invalid_input", "invalid_value", "unknown_name", "unsupported")
MAX_DEPTH = 64  # of nested lists and mappings; a value that contains itself exceeds any limit
_MAX_CHOICES = 16  # names in the list of the known ones
_MAX_NAME = 100  # characters of a name that is compared with the known ones
_MAX_MESSAGE = 960  # characters of a message; a longer one loses its middle
_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")
_MAX_VALUE = 80  # characters of a value in a message
_MAX_TEXT = 400  # characters of a value that is a text


Quantity = int | float | str
"""A number, or a text such as the repr of a value."""
T = TypeVar("T")


class _Repr(reprlib.Repr):
    """Shows a few entries of a collection, and integers of any length."""

    def repr_int(self, x: int, level: int) -> str:
        return hex(x) if x.bit_length() > 1000 else super().repr_int(x, level)


_REPR = _Repr()
_REPR.maxstring = _REPR.maxother = 1 << 10
_TAKE_AN = ("a", "e", "i", "o", "nd")  # type names that start like this take "an": an ndarray, but a uint8


@dataclass(frozen=True)
class ErrorInfo:
    """The reason why a request failed, as data. `str()` of it is the message.

    Args:
        code: the kind of error; see `ErrorCode`. "internal" and "engine_dead" are faults of sensorium.
        text: the message as a template, with names such as <<param>> and <<check_url>> for each interface to word.
        modality: "image", "video" or "audio" if one item is at fault, else None.
        index: position of that item among the items of its modality in the prompt, from 0.
        param: name of the parameter at fault, such as "max_tokens", if it is known; in a conversation the place, such as
            "messages[2].content[1]".
        limit: the limit that was exceeded, if the error is about one.
        value: what exceeds it, or what cannot be used.
        advice: name of what to do next, as in the table `wording.ADVICE`, if each interface words it in its own way.
    """

    code: ErrorCode
    text: str
    modality: str | None = None
    index: int | None = None
    param: str | None = None
    limit: Quantity | None = None
    value: Quantity | None = None
    advice: str | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def message(self) -> str:
        """One line in the words of Python: what is wrong, the limit, and what to do next. It starts with the item's name."""
        return self.worded(ADVICE)

    @property
    def reason(self) -> str:
        """The message without the item's name."""
        return self.without_item().message

    def worded(self, words: Mapping[str, str]) -> str:
        """Return the message with these words for the names in its text."""
        return clip(worded(self.text, words, self.param))

    def without_item(self) -> ErrorInfo:
        """Return the same error with a text that does not name the item."""
        return replace(self, text=self.text.removeprefix(f"{self.modality} {self.index}: "))

    def fields(self) -> dict[str, Any]:
        """Return the arguments of an InputError with this text and these values."""
        return {"text": self.text, "code": self.code, "param": self.param, "limit": self.limit, "value": self.value}

    def for_item(self, modality: str, index: int) -> ErrorInfo:
        """Return the same error with the item it is about, in the text too."""
        return replace(self, text=f"{modality} {index}: {self.text}", modality=modality, index=index)

    def exception(self) -> SensoriumError:
        """Return the exception of this error, of the class that fits its code and item."""
        kinds = {
            "invalid_config": ConfigError,
            "checkpoint": CheckpointError,
            "engine_dead": EngineDeadError,
            "busy": BusyError,
        }
        kind = MediaError if self.modality is not None else kinds.get(self.code, InputError)
        return _rebuild(kind, (self.message,), {"info": self})


class SensoriumError(ValueError):
    """Base class of all errors that a caller can cause; `info` holds the error as data.

    Args:
        text: one line, a template as in `ErrorInfo`.
        code, param, limit, value: as in `ErrorInfo`; the default code is that of the class, and of a value that is neither a
            number nor a text `info` has the repr.
    """

    default_code: ClassVar[ErrorCode] = "invalid_input"

    def __init__(
        self,
        text: str = "",
        *,
        code: ErrorCode | None = None,
        param: str | None = None,
        limit: Quantity | None = None,
        value: object = None,
    ) -> None:
        text = one_line(clip(text))
        self.info = ErrorInfo(
            code or self.default_code,
            text,
            param=param and clip(param, _MAX_NAME),
            limit=limit,
            value=_quantity(value),
            advice=advice_in(text),
        )
        super().__init__(self.info.message)

    def __str__(self) -> str:
        return self.info.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class ConfigError(SensoriumError):
    """An engine option or a checkpoint's configuration is unknown, contradicts itself or asks for remote code."""

    default_code = "invalid_config"


class CheckpointError(SensoriumError):
    """Weights or tokenizer files are missing, unexpected, of a wrong shape or unreadable."""

    default_code = "checkpoint"


class HubError(SensoriumError):
    """A model on the Hugging Face Hub cannot be found, read or downloaded; the code says why."""

    default_code = "unreachable"


class InputError(SensoriumError):
    """A prompt, message or parameter cannot be served."""


class MediaError(InputError):
    """An image, video or audio cannot be decoded or processed, or is over a limit.

    Args:
        modality, index, code, param: as in `ErrorInfo`.
        reason: one clause without the item's name: what is wrong, and the limit if there is one.
    """

    default_code = "invalid_media"

    def __init__(
        self,
        modality: str,
        index: int,
        reason: str,
        *,
        code: ErrorCode | None = None,
        param: str | None = None,
        limit: Quantity | None = None,
        value: object = None,
    ) -> None:
        super().__init__(reason, code=code, param=param, limit=limit, value=value)
        self.info = self.info.for_item(modality, index)
        self.args = (self.info.message,)

    @property
    def reason(self) -> str:
        """The message without the item's name."""
        return self.info.reason


class EngineDeadError(SensoriumError):
    """The engine's process has ended. The message says whether to send the request again or to make a new engine."""

    default_code = "engine_dead"


class BusyError(SensoriumError):
    """A worker process got too little processor time from the machine. The request is not at fault: send it again later."""

    default_code = "busy"


def media_error(error: InputError, modality: str, index: int) -> MediaError:
    """Return an error about an item as a MediaError that names the item."""
    info = error.info.without_item()
    code = "invalid_media" if info.code in _OF_VALUES else info.code
    return MediaError(modality, index, info.text, code=code, param=info.param, limit=info.limit, value=info.value)


def hint(name: object, choices: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return the end of an error text about an unknown name: a suggestion, and the first of the known names.

    The suggestion is our name for another library's argument, or the most similar known name.

    Args:
        others: names that may be the nearest one but are not listed.
    """
    names = list(choices)
    if not names:
        return "none is known"
    advice = suggestion(name, [*names, *others])
    start = "" if not advice else f"{advice} " if advice.endswith("?") else f"{advice}. "
    further = len(names) - _MAX_CHOICES
    more = f" and {further} other{'s' if further > 1 else ''}" if further > 0 else ""
    return f"{start}{'The' if start else 'the'} known ones are {', '.join(names[:_MAX_CHOICES])}{more}"


def suggestion(name: object, candidates: Sequence[str]) -> str:
    """Return "did you mean ...?" with our name for another library's argument or the most similar one, advice, or ""."""
    name = name[:_MAX_NAME] if isinstance(name, str) else short_repr(name, _MAX_NAME)
    advice = advice_about(name, candidates)
    folded = {candidate.casefold(): candidate for candidate in reversed(candidates)}  # the first of equal ones
    near = [] if advice else difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    return f"did you mean {folded[near[0]]}?" if near else advice


def hints_at_arguments(kind: type[T]) -> type[T]:
    """Make a class raise TypeError with a suggestion for an unknown keyword argument (class decorator)."""
    init: Any = kind.__init__
    names = list(signature(kind).parameters)

    @wraps(init)
    def checked(self: T, *args: Any, **values: Any) -> None:
        unknown = next((name for name in values if name not in names), None)
        if unknown is not None:
            reason = f"{kind.__name__} got an unexpected keyword argument {short_repr(unknown)}"
            raise TypeError(clip(in_python(f"{reason}; {hint(unknown, names)}")))
        init(self, *args, **values)

    kind.__init__ = checked  # type: ignore
    return kind


def equals_one_of(value: object, accepted: Iterable[object]) -> bool:
    """Return whether a value is among these. An array or a tensor of several numbers is not."""
    try:
        return any(bool(value == choice) for choice in accepted)
    except Exception:  # of the caller's class
        return False


def typed(value: object) -> str:
    """Return a value's type with its article, as in "an int", or "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name.lower().startswith(_TAKE_AN) else 'a'} {name}"


def short_repr(value: object, limit: int = _MAX_VALUE) -> str:
    """Return `repr(value)` on one line, cut to `limit` characters, for use in a message."""
    try:
        if isinstance(value, str | bytes):
            value = value[: limit + 1]  # `repr` of a large file would take long
        text = one_line(_REPR.repr(value))
    except Exception:  # of the caller's class; or Python refuses to write integers of thousands of digits
        text = f"{typed(value)} that cannot be shown"
    return text if len(text) <= limit else f"{text[:limit]}..."


def error_reason(error: BaseException, limit: int = 200) -> str:
    """Return the message of a caller's exception on one line; its class if the exception has no message."""
    try:
        return clip(one_line(str(error)), limit) or type(error).__name__
    except Exception:
        return type(error).__name__


@contextmanager
def naming_param(param: str, fields: Collection[str] = ()) -> Iterator[None]:
    """Name the parameter of errors about an input that name none.

    Args:
        param: the parameter, such as "messages[0].content[1]".
        fields: an error that names one of these fields of the parameter gets both names, such as "messages[0].content[1].fps".
    """
    try:
        yield
    except SensoriumError as error:
        inner = error.info.param
        if inner in fields or (inner is None and error.info.code in (*OF_PROMPTS, "invalid_media", "encoder_failed")):
            error.info = replace(error.info, param=clip(param if inner is None else f"{param}.{inner}", _MAX_NAME))
        raise


@contextmanager
def naming_field(param: str, field: str) -> Iterator[None]:
    """Name the field in which a client gives the value of a parameter, in errors about the parameter or a part of it."""
    try:
        yield
    except SensoriumError as error:
        if param != field and (error.info.param or "").partition(".")[0] == param:
            error.info = replace(error.info, param=field)
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the device or the host ran out of memory. The same item may succeed at another time."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's; torch is not imported here
        return True
    return isinstance(error, RuntimeError) and any(text in error_reason(error).lower() for text in _MEMORY_TEXTS)


def is_disk_full(error: BaseException) -> bool:
    """Return True if a file could not be written for lack of space; of a group, if that is so for one of its exceptions."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_disk_full, error.exceptions))
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlite_errorname", None) == "SQLITE_FULL"  # of sqlite3, which is not imported here


def check_utf8(text: str, param: str = "prompt") -> str:
    """Return a text; InputError if it is not valid UTF-8. `param`: its name in the error."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"<<param>> has a lone surrogate (half a character) at position {error.start}; remove it"
        raise InputError(reason, param=short_repr(param, 100)[1:-1]) from None
    return text


def clip(text: str, limit: int = _MAX_MESSAGE) -> str:
    """Return a text for a message: without its middle if it is longer than `limit`, and with lone surrogates escaped."""
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]} ... {text[-limit // 4 :]}"
    safe = text.encode("utf-8", "backslashreplace").decode()
    return safe if len(safe) <= limit else clip(safe, limit)


def _quantity(value: object) -> Quantity | None:
    """Return a value as data: numbers and short texts as they are, the repr of others."""
    if value is None or type(value) in (int, float):
        return value  # type: ignore[return-value]
    return clip(one_line(value), _MAX_TEXT) if type(value) is str else short_repr(value)


def one_line(text: str) -> str:
    """Return the text with each run of whitespace replaced by one space."""
    return " ".join(text.split())


def _rebuild(kind: type[SensoriumError], args: tuple[object, ...], state: dict[str, object]) -> SensoriumError:
    """Undo `SensoriumError.__reduce__` without the class's `__init__`, whose arguments are not `args`."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
