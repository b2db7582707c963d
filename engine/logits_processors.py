"""Logits processors of callers. They are registered by name, so that a request remains plain data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from inspect import signature
from pkgutil import resolve_name
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..callers.errors import InputError, hint, short_repr
from ..callers.plain import builtin_copy

_FACTORIES: dict[str, Callable[..., LogitsProcessor]] = {}


class LogitsProcessor(Protocol):
    """Changes the logits of one sequence in place.

    One instance is made per sequence. It should keep no state between calls: after a rollback it is called with fewer tokens.

    A class may also have a static method `batch(processors, answers, logits)`, which handles all its sequences of a step at
    once. It takes a list of processors, a list of their answers' token ids, and float32 logits `[len(processors), vocab]`.
    With a class attribute `keeps_logprobs = True`, it runs after all other rules, and log probabilities are those before it.
    """

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        """Change `logits` in place, before penalties and all other rules; -inf forbids a token.

        Args:
            token_ids: the tokens of the answer so far.
            logits: float32 `[vocab]`.
        """


_Factory = TypeVar("_Factory", bound=Callable[..., LogitsProcessor])


def register_logits_processor(name: str, factory: _Factory) -> _Factory:
    """Register a logits processor for `SamplingParams(logits_processors=...)`.

    Args:
        factory: makes the processor of one sequence from the arguments in the request.

    Raises:
        InputError: the name is empty or taken by another factory, or the factory is not callable.
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"a logits processor needs a name, not {short_repr(name)}", param="name")
    if not callable(factory):
        reason = f"logits processor {short_repr(name)} needs a class or a function that makes one, not {short_repr(factory)}"
        raise InputError(reason, param="factory")
    if _FACTORIES.setdefault(name, factory) is not factory:
        reason = f"the name {short_repr(name)} is taken by another logits processor; choose another one"
        raise InputError(reason, param="name")
    return factory


def register_path(name: str, path: str) -> None:
    """Register a logits processor in the engine's process from its path, "module:name". Raise InputError if that fails."""
    try:
        factory = resolve_name(path)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"logits processor {name!r} cannot be imported from {path} by the engine's process: {reason}"
        ) from None
    register_logits_processor(name, factory)


def normalize_processors(processors: object) -> dict[str, dict[str, Any]]:
    """Return the arguments of each processor by its name, from a list of names or a mapping.

    Raises:
        InputError: another form, or a name that is not registered; the message names the nearest one.
    """
    processors = builtin_copy(processors, "logits_processors")
    if isinstance(processors, str | bytes) or not isinstance(processors, Collection):
        raise _error(f"logits_processors={short_repr(processors)} must be names, or names mapped to their arguments")
    if not all(isinstance(name, str) for name in processors):
        raise _error(f"logits_processors={short_repr(processors)} must be names given to register_logits_processor")
    arguments_of = dict(processors) if isinstance(processors, Mapping) else {name: {} for name in processors}
    for name, arguments in arguments_of.items():
        if name not in _FACTORIES:
            raise _error(f"logits processor {short_repr(name)} is not registered; {hint(name, _FACTORIES)}")
        if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
            reason = f"logits_processors[{name!r}]={short_repr(arguments)} must map names of arguments to values"
            raise _error(reason)
    return {name: dict(arguments) for name, arguments in arguments_of.items()}


def import_path(name: str) -> str:
    """Return "module:name" of a registered factory, for another process.

    Raises:
        InputError: the factory is not at the top level of a module, or is defined in the main program.
    """
    factory = _FACTORIES[name]
    module, names = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "")
    target: Any = sys.modules.get(module)
    for part in names.split("."):
        target = getattr(target, part, None)
    if module == "__main__" or target is not factory:
        reason = "the engine's process cannot import it; define it at the top level of a module other than the main program"
        raise _error(f"logits processor {name!r}: {reason}")
    return f"{module}:{names}"


def make_processors(arguments_of: Mapping[str, Mapping[str, Any]]) -> list[LogitsProcessor]:
    """Make the processors of one sequence. Raise InputError if a factory fails."""
    processors = []
    for name, arguments in arguments_of.items():
        try:
            _check_arguments(_FACTORIES[name], arguments)
            processors.append(_FACTORIES[name](**arguments))
        except (Exception, SystemExit) as error:  # raised by the caller's code
            reason = error.info.text if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            raise _error(f"logits processor {name!r} cannot be made from {short_repr(dict(arguments))}: {reason}") from error
    return processors


def keeps_logprobs(processor: LogitsProcessor) -> bool:
    """Return whether log probabilities are those before a processor, see `LogitsProcessor`."""
    return getattr(type(processor), "keeps_logprobs", False) is True


def _check_arguments(factory: Callable[..., LogitsProcessor], arguments: Mapping[str, Any]) -> None:
    """Raise InputError for an argument that the factory does not take, or one that is missing."""
    try:
        parameters = signature(factory)
    except (TypeError, ValueError):  # a factory in C may tell none
        return
    try:
        parameters.bind(**arguments)
    except TypeError as error:
        raise InputError(str(error)) from None


def apply_processors(
    processors: Sequence[Sequence[LogitsProcessor]], answers: Sequence[Sequence[int]], logits: Tensor
) -> dict[int, Exception]:
    """Run the processors of each row of `logits`, `[rows, vocab]`, in place. Return the errors by row.

    Processors whose class has `batch` run after the others, one call per class.
    """
    errors: dict[int, Exception] = {}
    batches: dict[tuple[type, int], list[tuple[int, LogitsProcessor]]] = {}
    for row, row_processors in enumerate(processors):
        for index, processor in enumerate(row_processors):
            kind = type(processor)
            if hasattr(kind, "batch"):
                earlier = sum(type(other) is kind for other in row_processors[:index])  # the same class under two names
                batches.setdefault((kind, earlier), []).append((row, processor))
            elif row not in errors:
                _run(errors, [row], partial(processor, answers[row], logits[row]))
    for (kind, _), entries in batches.items():
        _run_batch(kind, [entry for entry in entries if entry[0] not in errors], answers, logits, errors)
    return errors


def _run_batch(
    kind: Any,
    entries: Sequence[tuple[int, LogitsProcessor]],
    answers: Sequence[Sequence[int]],
    logits: Tensor,
    errors: dict[int, Exception],
) -> None:
    """Run all rows of a class in one call. If it fails, run each row by itself, so that only the failing rows are lost."""
    if not entries:
        return
    rows = [row for row, _ in entries]
    part = logits[rows]
    failed: dict[int, Exception] = {}
    _run(failed, rows, partial(kind.batch, [processor for _, processor in entries], [answers[row] for row in rows], part))
    if not failed:
        logits[rows] = part
    elif len(rows) == 1:
        errors.update(failed)
    else:
        for entry in entries:
            _run_batch(kind, [entry], answers, logits, errors)


def _run(errors: dict[int, Exception], rows: Sequence[int], call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:  # raised by the caller's code; it fails the caller's request only
        failure = _error(f"a logits processor raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        errors.update(dict.fromkeys(rows, failure))
    except SystemExit as error:  # must not end the process
        errors.update(dict.fromkeys(rows, _error(f"a logits processor raised SystemExit ({error}); it must return")))


def _error(reason: str) -> InputError:
    return InputError(reason, param="logits_processors")
