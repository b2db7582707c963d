"""Short representations of results: one line for the terminal, a table for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from html import escape
from typing import Any

from torch import Tensor

from .errors import short_repr

_LONGEST = 2000  # characters of a value in a table


class ReprMixin:
    """Base of dataclasses with `repr=False`. The repr leaves out fields with their default, and shortens values to a line."""

    def repr_fields(self) -> Sequence[tuple[str, object]]:
        """Return the (name, value) pairs that the repr contains."""
        declared: Sequence[Field[Any]] = fields(self)  # type: ignore[arg-type]
        pairs = [(field, getattr(self, field.name)) for field in declared if field.repr]
        return [(field.name, value) for field, value in pairs if not _is_default(field, value)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={_short(value)}' for name, value in self.repr_fields())})"

    def _repr_html_(self) -> str:
        """Return an HTML table, which notebooks show. All text is escaped."""
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{_cell(value)}</td></tr>" for name, value in self.repr_fields())
        return f"<table><caption>{escape(type(self).__name__)}</caption>{rows}</table>"


def _is_default(field: Field[Any], value: object) -> bool:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    plain = isinstance(value, bool | int | float | str | tuple | dict)
    return value is None or value is default or (plain and value == default)


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} {list(value.shape)}>"
    if isinstance(value, tuple | list) and len(value) > 8 and all(isinstance(part, int) for part in value):
        return f"<{len(value)} integers>"
    if isinstance(value, ReprMixin):
        return repr(value)
    if isinstance(value, tuple | list) and value and all(isinstance(part, ReprMixin) for part in value):
        more = f", ... {len(value) - 4} more" if len(value) > 4 else ""
        return f"[{', '.join(map(repr, value[:4]))}{more}]"
    return short_repr(value)


def _cell(value: object) -> str:
    if isinstance(value, ReprMixin):
        return value._repr_html_()
    if isinstance(value, tuple | list) and value and all(isinstance(part, ReprMixin) for part in value):
        more = f"<p>... {len(value) - 4} more</p>" if len(value) > 4 else ""
        return "".join(part._repr_html_() for part in value[:4]) + more
    text = value if isinstance(value, str) else _short(value)
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f'<pre style="white-space: pre-wrap; text-align: left">{escape(cut)}</pre>'
