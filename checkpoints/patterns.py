"""Regular expressions that come with a checkpoint. Patterns that could take minutes on one name are refused."""

from __future__ import annotations

import re
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Iterable
from typing import Any

_MAX_LENGTH = 4096  # characters
_MAX_WAYS = 1 << 27  # four ".*" and a choice of eight
_NAME = 64  # characters of a typical module name: the most that an unbounded repeat is taken to match


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern for names of modules.

    Raises:
        ValueError: the pattern is invalid, or one name could match it in too many ways; the message is the reason.
    """
    if len(pattern) > _MAX_LENGTH:
        raise ValueError(f"it has {len(pattern):,} characters, the limit is {_MAX_LENGTH:,}")
    try:
        if _ways(parser.parse(pattern)) > _MAX_WAYS:
            raise ValueError("it has nested or too many repeats; a name could take minutes to match")
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _ways(nodes: Iterable[tuple[Any, Any]]) -> int:
    """Return a bound on the ways in which backtracking can match a parsed pattern; above `_MAX_WAYS` it is not exact."""
    ways = 1
    for kind, value in nodes:
        if str(kind) == "BRANCH":
            ways *= sum(map(_ways, value[1]))
        elif str(kind).endswith("_REPEAT"):
            least, most, body = value
            inner, times = _ways(body), max(int(least), min(int(most), _NAME))
            if times > 1:
                ways *= times if inner == 1 else inner ** min(times, _NAME)
            else:
                ways *= inner + 1
        elif isinstance(value, tuple):  # groups and assertions hold nodes
            for part in value:
                ways *= _ways(part) if isinstance(part, parser.SubPattern) else 1
        elif isinstance(value, parser.SubPattern):
            ways *= _ways(value)
        ways = min(ways, _MAX_WAYS + 1)
    return ways
