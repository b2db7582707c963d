"""Errors that a caller can cause or has to handle. Every message is one line: what is wrong, the limit, and what to do next."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from typing import Any, ClassVar, Literal, TypeVar

from .other_names import advice_about

ErrorCode = Literal[
    "invalid_input",  # a prompt, message or parameter that cannot be served
    "invalid_media",  # an item that cannot be read, decoded or processed, or is over a limit
    "too_long",  # more tokens than the model's context or the caches can ever hold
    "invalid_config",  # an engine option, or a checkpoint's config.json
    "checkpoint",  # weights or tokenizer files
    "not_found",  # a model's name, or a revision, that the Hub does not know
    "gated",  # a model on the Hub that this account may not read
    "unreachable",  # the Hub cannot be reached, and the cache lacks the model
    "disk_full",  # too little space for a download
    "encoder_failed",  # the encoder failed on an item, now or a short while ago
    "not_finite",  # the model computed NaN or infinity
    "out_of_memory",  # on the device or the host
    "overloaded",  # more requests than the engine takes
    "interrupted",  # the step was interrupted, for example by Ctrl-C
    "engine_asleep",  # call `wake_up` first
    "engine_closed",  # the engine was closed, or belongs to another process
    "engine_dead",  # the engine or its process has failed; the message says whether to ask again or to make a new engine
    "internal",  # a bug of sensorium
]
MAX_DEPTH = 64  # of nested lists and mappings; a value that contains itself exceeds any limit
_MAX_NAME = 100  # characters of a name that is compared with the known ones
_MAX_MESSAGE = 960  # characters of a message; a longer one loses its middle
_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")
_OF_INPUTS = ("invalid_input", "invalid_media", "too_long", "encoder_failed")
_MAX_VALUE = 80  # characters of a value in a message


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
        message: one line: what is wrong, the limit, and what to do next. It starts with the item's name if there is one.
        modality: "image", "video" or "audio" if one item is at fault, else None.
        index: position of that item among the items of its modality in the prompt, from 0.
        param: name of the parameter at fault, such as "max_tokens", if it is known; in a conversation the place, such as
            "messages[2].content[1]".
    """

    code: ErrorCode
    message: str
    modality: str | None = None
    index: int | None = None
    param: str | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def reason(self) -> str:
        """The message without the item's name."""
        return self.message.removeprefix(f"{self.modality} {self.index}: ")

    def exception(self) -> SensoriumError:
        """Return the exception of this error, of the class that fits its code and item."""
        kinds = {"invalid_config": ConfigError, "checkpoint": CheckpointError, "engine_dead": EngineDeadError}
        kind = MediaError if self.modality is not None else kinds.get(self.code, InputError)
        reason = {"reason": self.reason} if kind is MediaError else {}
        return _rebuild(kind, (self.message,), {"info": self, **reason})

    def for_item(self, modality: str, index: int) -> ErrorInfo:
        """Return the same error with the item it is about, in the message too."""
        return replace(self, message=f"{modality} {index}: {self.message}", modality=modality, index=index)


class SensoriumError(ValueError):
    """Base class of all errors that a caller can cause; `info` holds the error as data.

    Args:
        message: one line.
        code, param: as in `ErrorInfo`; the default code is that of the class.
    """

    default_code: ClassVar[ErrorCode] = "invalid_input"

    def __init__(self, message: str = "", *, code: ErrorCode | None = None, param: str | None = None) -> None:
        message = clip(message)
        super().__init__(message)
        self.info = ErrorInfo(code or self.default_code, one_line(message), param=param and clip(param, _MAX_NAME))

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
        self, modality: str, index: int, reason: str, *, code: ErrorCode | None = None, param: str | None = None
    ) -> None:
        reason = clip(reason)
        super().__init__(f"{modality} {index}: {reason}", code=code, param=param)
        self.info = replace(self.info, modality=modality, index=index)
        self.reason = reason


class EngineDeadError(SensoriumError):
    """The engine's process has ended. The message says whether to send the request again or to make a new engine."""

    default_code = "engine_dead"


def media_error(error: InputError, modality: str, index: int) -> MediaError:
    """Return an error about an item as a MediaError that names the item."""
    code = "invalid_media" if error.info.code == "invalid_input" else error.info.code
    reason = error.reason if isinstance(error, MediaError) else str(error)
    return MediaError(modality, index, reason, code=code, param=error.info.param)


def hint(name: object, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return the end of an error text about an unknown name: a suggestion, and all known names.

    The suggestion is our name for another library's argument, or the most similar known name.

    Args:
        others: names that may be the nearest one but are not listed.
    """
    names = list(known)
    if not names:
        return "none is known"
    advice = suggestion(name, [*names, *others])
    start = "" if not advice else f"{advice} " if advice.endswith("?") else f"{advice}. "
    return f"{start}{'The' if start else 'the'} known ones are {', '.join(names)}"


def suggestion(name: object, candidates: Sequence[str]) -> str:
    """Return "did you mean ...?" with our name for another library's argument or the most similar one, advice, or ""."""
    name = name[:_MAX_NAME] if isinstance(name, str) else short_repr(name, _MAX_NAME)
    advice = advice_about(name, candidates)
    near = [] if advice else difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else advice


def hints_at_arguments(kind: type[T]) -> type[T]:
    """Make a class raise TypeError with a suggestion for an unknown keyword argument (class decorator)."""
    init: Any = kind.__init__  # type: ignore[misc]
    names = list(signature(kind).parameters)

    @wraps(init)
    def checked(self: T, *args: Any, **values: Any) -> None:
        unknown = next((name for name in values if name not in names), None)
        if unknown is not None:
            reason = f"{kind.__name__} got an unexpected keyword argument {short_repr(unknown)}"
            raise TypeError(clip(f"{reason}; {hint(unknown, names)}"))
        init(self, *args, **values)

    kind.__init__ = checked  # type: ignore
    return kind


def equals_one_of(value: object, accepted: Iterable[object]) -> bool:
    """Return whether a value is among these. An array or a tensor of several numbers is not."""
    try:
        return any(bool(value == one) for one in accepted)
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
def naming_param(place: str, fields: Collection[str] = ()) -> Iterator[None]:
    """Name the parameter of errors about an input that name none.

    Args:
        place: the parameter, such as "messages[0].content[1]".
        fields: an error that names one of these fields of the place gets both names, such as "messages[0].content[1].fps".
    """
    try:
        yield
    except SensoriumError as error:
        own = error.info.param
        if own in fields or (own is None and error.info.code in _OF_INPUTS):
            error.info = replace(error.info, param=clip(place if own is None else f"{place}.{own}", _MAX_NAME))
        raise


@contextmanager
def renaming_param(name: str, field: str) -> Iterator[None]:
    """Name `field` in errors about the parameter `name` or a part of it: the caller gives its value there."""
    try:
        yield
    except SensoriumError as error:
        if name != field and (error.info.param or "").partition(".")[0] == name:
            message = re.sub(rf"\b{name}\b(\.\w+)?", field, error.info.message)
            error.info = replace(error.info, message=message, param=field)
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the device or the host ran out of memory. The same item may succeed at another time."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's; torch is not imported here
        return True
    return isinstance(error, RuntimeError) and any(text in error_reason(error).lower() for text in _MEMORY_TEXTS)


def check_utf8(text: str, param: str = "prompt") -> str:
    """Return a text; InputError if it is not valid UTF-8. `param`: its name in the error."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"{short_repr(param, 100)[1:-1]} has a lone surrogate (half a character) at position {error.start}; remove it"
        raise InputError(reason, param=param[:100]) from None
    return text


def clip(text: str, limit: int = _MAX_MESSAGE) -> str:
    """Return a text for a message: without its middle if it is longer than `limit`, and with lone surrogates escaped."""
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]} ... {text[-limit // 4 :]}"
    safe = text.encode("utf-8", "backslashreplace").decode()
    return safe if len(safe) <= limit else clip(safe, limit)


def one_line(text: str) -> str:
    """Return the text with each run of whitespace replaced by one space."""
    return " ".join(text.split())


def _rebuild(kind: type[SensoriumError], args: tuple[object, ...], state: dict[str, object]) -> SensoriumError:
    """Undo `SensoriumError.__reduce__` without the class's `__init__`, whose arguments are not `args`."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
