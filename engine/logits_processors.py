"""Callers' own changes to logits, registered by name so that a request stays plain data. Knows no sampler and no model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..mm.errors import InputError, hint

_FACTORIES: dict[str, Callable[..., LogitsProcessor]] = {}


class LogitsProcessor(Protocol):
    """Changes the logits of one sequence, in place.

    It is made once per sequence and should be a function of its arguments: after a rollback it is called with fewer tokens.

    A class may have a static method `batch(processors, answers, logits)` beside it, for all its sequences of a step at once:
    lists of the processors and of their answers, and float32 `[len(processors), vocab]` to be changed in place.
    """

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        """`token_ids`: the answer up to now. `logits`: float32 `[vocab]`, before any other rule; -inf forbids a token."""


_Factory = TypeVar("_Factory", bound=Callable[..., LogitsProcessor])


def register_logits_processor(name: str, factory: _Factory) -> _Factory:
    """Make `SamplingParams(logits_processors=...)` know a name.

    Args:
        factory: makes the processor of one sequence from the arguments that the request names it with.

    Raises:
        InputError: the name is empty, or taken by another factory, or the factory cannot be called.
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"a logits processor needs a name, not {name!r}")
    if not callable(factory):
        raise InputError(f"logits processor {name!r} needs a class or a function that makes one, not {factory!r}")
    if _FACTORIES.setdefault(name, factory) is not factory:
        raise InputError(f"the name {name!r} is taken by another logits processor; choose one of your own")
    return factory


def normalised(given: object) -> dict[str, dict[str, Any]]:
    """Names, or names with arguments, as a mapping of both.

    Raises:
        InputError: another form, or a name that is not registered; the message says which one is near.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Collection):
        raise InputError(f"logits_processors={given!r} must be names, or names mapped to their arguments")
    if not all(isinstance(name, str) for name in given):
        raise InputError(f"logits_processors={given!r} must be names that register_logits_processor made known")
    named = dict(given) if isinstance(given, Mapping) else {name: {} for name in given}
    for name, arguments in named.items():
        if name not in _FACTORIES:
            raise InputError(f"logits processor {name!r} is not one of register_logits_processor's; {hint(name, _FACTORIES)}")
        if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
            raise InputError(f"logits_processors[{name!r}]={arguments!r} must map names of arguments to values")
    return {name: dict(arguments) for name, arguments in named.items()}


def make_processors(named: Mapping[str, Mapping[str, Any]]) -> list[LogitsProcessor]:
    """One of each, for one sequence. InputError when a factory does not take its arguments."""
    made = []
    for name, arguments in named.items():
        try:
            made.append(_FACTORIES[name](**arguments))
        except (Exception, SystemExit) as error:  # the caller's own code
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"logits processor {name!r} cannot be made of {dict(arguments)!r}: {reason}") from error
    return made


def apply_processors(
    made: Sequence[Sequence[LogitsProcessor]], answers: Sequence[Sequence[int]], logits: Tensor
) -> dict[int, Exception]:
    """Run the processors of all rows of `[rows, vocab]`, in place; the errors of rows that failed.

    Those of a class with a batch form run together, after the others.
    """
    errors: dict[int, Exception] = {}
    together: dict[tuple[type, int], list[tuple[int, LogitsProcessor]]] = {}
    for row, processors in enumerate(made):
        for index, processor in enumerate(processors):
            kind = type(processor)
            if hasattr(kind, "batch"):
                earlier = sum(type(other) is kind for other in processors[:index])  # the same class under two names
                together.setdefault((kind, earlier), []).append((row, processor))
            elif row not in errors:
                _run(errors, [row], partial(processor, answers[row], logits[row]))
    for (kind, _), entries in together.items():
        _batch(kind, [entry for entry in entries if entry[0] not in errors], answers, logits, errors)
    return errors


def _batch(
    kind: Any,
    entries: Sequence[tuple[int, LogitsProcessor]],
    answers: Sequence[Sequence[int]],
    logits: Tensor,
    errors: dict[int, Exception],
) -> None:
    """One call for all rows of a class; when it fails, one for each, so that the others are not lost."""
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
            _batch(kind, [entry], answers, logits, errors)


def _run(errors: dict[int, Exception], rows: Sequence[int], call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:  # the caller's own code: it ends the caller's own request
        errors.update(dict.fromkeys(rows, error))
    except SystemExit as error:  # nor does it end the process, or what others have in this step
        errors.update(dict.fromkeys(rows, InputError(f"a logits processor raised SystemExit ({error}); it must return")))
