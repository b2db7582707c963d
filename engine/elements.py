"""The elements of answers (boxes, tables, formulas), for folders that may import the engine but not `processors`."""

from __future__ import annotations

from ..processors.elements.element import Cell, Element
from ..processors.elements.formats import HTML_BOX, MarkedText
from ..processors.elements.tables import MAX_CELLS, read_table, text_outside

__all__ = ["HTML_BOX", "MAX_CELLS", "Cell", "Element", "MarkedText", "read_table", "text_outside"]
