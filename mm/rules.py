"""Rules that a family names: pure functions and their parameters, which travel between processes as data.

A family whose items have positions of their own, or whose tokens attend to each other in a way of its own, has these functions
in its `rules.py`. Types and engine hold a `Rule`; the function is found by its name when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from ..callers.errors import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FUNCTIONS: dict[str, Callable[..., Any]] = {}  # by name


@dataclass(frozen=True)
class Rule:
    """A registered function, and the parameters that follow the arguments of a call.

    Args:
        name: "package.module:function".
        params: plain data.
    """

    name: str
    params: tuple[Any, ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Any], *params: Any) -> Rule:
        """Return the rule of a function that `register` has registered."""
        name = _name(function)
        assert name in _FUNCTIONS, f"{name} is not registered"
        return cls(name, params)

    def __call__(self, *args: Any) -> Any:
        return _find(self.name)(*args, *self.params)


def register(function: _Function) -> _Function:
    """Register a pure function of a module whose name ends with "rules", so that a Rule can name it."""
    _FUNCTIONS[_name(function)] = function
    return function


def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__name__}"


def _find(name: str) -> Callable[..., Any]:
    """Return a registered function, after its module is imported; ConfigError if there is none."""
    module = name.partition(":")[0]
    if name not in _FUNCTIONS and module.endswith("rules"):
        import_module(module)
    if name not in _FUNCTIONS:
        raise ConfigError(f"the rule {name[:100]!r} is not registered; decorate its function with mm.rules.register")
    return _FUNCTIONS[name]


@dataclass(frozen=True, eq=False)
class KeyOrder:
    """Places of the first `n` tokens of a sequence, up to the end of its last item.

    Args:
        places: int64 `[n]`, the place of each token's key and value among those of the sequence.
        key_range: int64 `[2, n]`, first place and end of places that each token attends to.
    """

    places: np.ndarray
    key_range: np.ndarray


@dataclass(frozen=True)
class PromptAttention:
    """How the tokens of a prompt attend to each other, besides to the tokens before them.

    Args:
        name: what docs/models.md calls it.
        spans: `(prompt_length, features)` -> spans `[start, stop)` in order, whose tokens attend to each other and are computed
            in one step. None: there are none, and a prompt can be cut after any token.
        key_order: `(features)` -> KeyOrder of a span that reaches from the start of the prompt to the end of the last item, or
            None. None: keys are in the order of the tokens.
        whole_prompt: the prompt is one span, and its tokens see all of it in layers with a sliding window, too, unless
            `two_sided_windows`.
        two_sided_windows: in layers with a sliding window, tokens of a span see no further ahead than behind.
        windows_only: tokens of a span attend to later ones only in layers with a sliding window.
        brackets: tokens of the largest span that are no encoder rows.
    """

    name: str = "causal"
    spans: Rule | None = None
    key_order: Rule | None = None
    whole_prompt: bool = False
    two_sided_windows: bool = False
    windows_only: bool = False
    brackets: int = 0

    @property
    def is_at_once(self) -> bool:
        """True if a step must be able to compute a whole prompt, because a span may be as long as one."""
        return self.whole_prompt or self.key_order is not None


CAUSAL = PromptAttention()
