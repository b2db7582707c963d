"""The elements of answers (boxes, tables, formulas), for folders that may import the engine but not `processors`."""

from __future__ import annotations

from ..processors.elements.element import HTML_BOX, Cell, Element
from ..processors.elements.latex_tables import BEGIN as LATEX_TABLE
from ..processors.elements.latex_tables import closing_brace, latex_text, read_latex_table, table_end
from ..processors.elements.marked_text import MarkedText
from ..processors.elements.tables import MAX_CELLS, read_table, text_outside

__all__ = [
    "HTML_BOX",
    "LATEX_TABLE",
    "MAX_CELLS",
    "Cell",
    "Element",
    "MarkedText",
    "closing_brace",
    "latex_text",
    "read_latex_table",
    "read_table",
    "table_end",
    "text_outside",
]
