"""A document as docling-core's JSON (`DoclingDocument`), without that package.

Source: docling-core 2.104, `docling_core.types.doc`; 1.7.0 is the version of its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from .blocks import FURNITURE, Block, PageRecord

_VERSION = "1.7.0"
_MARKER = re.compile(r"(\(?\w{1,4}[.)]|[•▪◦‣·○●■–*+-])\s+")
_LABELS = {"list_item": "list_item", "formula": "formula", "code": "code", "caption": "caption", "footnote": "footnote",
           "page_header": "page_header", "page_footer": "page_footer"}  # fmt: skip
_Fields = dict[str, Any]


def docling(source: str, pages: Iterable[PageRecord]) -> Iterator[str]:
    """Yield the JSON of a document. Its items are held until the last page is known, as their kinds have lists of their own."""
    builder = _Builder()
    for page in pages:
        builder.add_page(page)
    head = {"schema_name": "DoclingDocument", "version": _VERSION, "name": PurePosixPath(source).stem or "document"}
    body = {
        "self_ref": "#/body",
        "children": builder.children,
        "content_layer": "body",
        "name": "_root_",
        "label": "unspecified",
    }
    yield json.dumps({**head, "body": body, "pages": builder.pages, **builder.items}, ensure_ascii=False)
    yield "\n"


@dataclass
class _Builder:
    """Collects the items of a document. `group`: the list that the last item belongs to."""

    children: list[_Fields] = field(default_factory=list)
    pages: dict[str, _Fields] = field(default_factory=dict)
    items: dict[str, list[_Fields]] = field(default_factory=lambda: {"groups": [], "texts": [], "tables": [], "pictures": []})
    group: _Fields | None = None

    def add_page(self, page: PageRecord) -> None:
        size = {"width": page.width, "height": page.height}
        self.pages[str(page.number)] = {"size": size, "page_no": page.number}
        for block in page.blocks:
            if block.kind != "list_item":
                self.group = None
            elif self.group is None:
                self.group = self._add("groups", {"children": [], "name": "list", "label": "list"}, self.children)
            self._add(*_item(block, page), self.children if self.group is None else self.group["children"])

    def _add(self, kind: str, fields: _Fields, children: list[_Fields]) -> _Fields:
        parent = "#/body" if children is self.children or self.group is None else self.group["self_ref"]
        reference = f"#/{kind}/{len(self.items[kind])}"
        children.append({"$ref": reference})
        item = {"self_ref": reference, "parent": {"$ref": parent}, "children": [], "content_layer": "body", **fields}
        self.items[kind].append(item)
        return item


def _item(block: Block, page: PageRecord) -> tuple[str, _Fields]:
    """Return the list that the item of a block belongs to, and its fields."""
    left, top, right, bottom = block.box or (0.0, 0.0, page.width, page.height)
    box = {"l": left, "t": top, "r": right, "b": bottom, "coord_origin": "TOPLEFT"}
    fields: _Fields = {"prov": [{"page_no": page.number, "bbox": box, "charspan": [0, len(block.text)]}]}
    if block.kind in FURNITURE:
        fields["content_layer"] = "furniture"
    if block.kind == "table" and block.cells:
        return "tables", {**fields, "label": "table", "data": _table(block)}
    if block.kind == "picture" and not block.text:
        return "pictures", {**fields, "label": "picture"}
    text, label = block.text, _LABELS.get(block.kind, "text")
    if block.kind == "heading":
        label = "title" if block.level <= 1 else "section_header"
        fields |= {"level": block.level - 1} if block.level > 1 else {}
    elif block.kind == "list_item" and (marker := _MARKER.match(text)):
        fields |= {"marker": marker[1], "enumerated": marker[1][-1] in ".)"}
        text = text[marker.end() :]
    return "texts", {**fields, "label": label, "orig": block.text, "text": text}


def _table(block: Block) -> _Fields:
    cells = [
        {
            "row_span": cell.row_span,
            "col_span": cell.column_span,
            "start_row_offset_idx": cell.row,
            "end_row_offset_idx": cell.row + cell.row_span,
            "start_col_offset_idx": cell.column,
            "end_col_offset_idx": cell.column + cell.column_span,
            "text": cell.text,
            "column_header": cell.header,
        }
        for cell in block.cells
    ]
    rows, columns = max(cell.row + cell.row_span for cell in block.cells), max(c.column + c.column_span for c in block.cells)
    return {"table_cells": cells, "num_rows": rows, "num_cols": columns}
