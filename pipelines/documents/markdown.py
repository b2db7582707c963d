"""Markdown, of document models and of files, to blocks: headings, lists, tables, formulas, code, pictures and paragraphs.

Nothing is left out but markup. The text of blocks keeps inline markup (`**bold**`, `$x$`, `\\*`): it is Markdown itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...engine.elements import (
    LATEX_TABLE,
    MAX_CELLS,
    Cell,
    closing_brace,
    latex_text,
    read_latex_table,
    read_table,
    table_end,
    text_outside,
)
from .blocks import Block, Kind, Line, table_text

_FENCE = re.compile(r"\s{0,3}(`{3,}|~{3,})\s*([\w+-]*)$")  # of a line without spaces at its end
_HEADING = re.compile(r"\s{0,3}(#{1,6})(?!\S)")
_ITEM = re.compile(r"(\s*)((?:[-*+•]|\(?\d{1,4}[.)])\s+\S.*)$")
_RULE = re.compile(r"\s{0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$")
_DELIMITERS = re.compile(r"\|? ?:?-+:? ?(?:\| ?:?-+:? ?)*\|?$")  # of a line without repeated spaces
_ROW = re.compile(r"\|\s.*\s\|$")  # of a table that lacks its line of dashes; without spaces at both ends
_DASHES = re.compile(r"\|(?: ?:?-{3,}:? ?\|)+$")
_PIPE = re.compile(r"(?<!\\)\|")
_IMAGE = re.compile(r"\s*!\[([^\[\]]*)\]\(([^()\s]*)\)\s*$")
_MATHS = (("$$", "$$"), ("\\[", "\\]"))
_ENVIRONMENT = re.compile(r"\s*\\begin\{((?:equation|align|gather|multline|displaymath)\*?)\}")
_TAGS: dict[str, Kind] = {
    "page_number": "page_footer", "footer": "page_footer", "header": "page_header", "watermark": "paragraph",
    "img": "picture", "figcaption": "caption", "signature": "paragraph", "center": "paragraph",
}  # fmt: skip
_TAGGED = re.compile(rf"\s*<({'|'.join(_TAGS)})>(.*?)</\1>", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(rf"\s*<(?:{'|'.join(_TAGS)})>", re.IGNORECASE)
_TABLE, _TABLE_END = re.compile(r"<table\b", re.IGNORECASE), re.compile(r"</table\s*>", re.IGNORECASE)
_COMMANDS: dict[str, tuple[Kind, int]] = {
    "caption": ("caption", 0), "author": ("paragraph", 0), "title": ("heading", 1), "section": ("heading", 2),
    "subsection": ("heading", 3), "subsubsection": ("heading", 4),
}  # fmt: skip
"""LaTeX commands whose argument is a block, with its kind and level."""
_COMMAND = re.compile(rf"\s*\\({'|'.join(_COMMANDS)})\*?(?:\s*\[[^\[\]]*\])?\s*(?=\{{)")
_LAYOUT = re.compile(
    r"""\s*\\(?:(?:begin|end)\s*\{(?:(?:wrap|sideways)?table\*?|abstract|center|adjustbox|threeparttable)\}(?:\[[^\[\]]*\]|\{[^{}]*\})*
    |(?:centering|tiny|scriptsize|footnotesize|small|normalsize)\b
    |(?:label|setlength|addtolength|renewcommand|vspace)\*?(?:\s*\{[^{}]*\}){1,2}
    |(resizebox|scalebox)\*?(?:\s*\{[^{}]*\}){1,2}\s*\{%?)""",
    re.VERBOSE,
)
"""LaTeX commands around a table that are not part of its text."""
_MAX_UNCLOSED = 16  # LaTeX tables without an end, after which no more are looked for
_ARGUMENT_LINES = 64
_LONG_REST = 2048  # characters
_CUT = re.compile(r"[ \t]|(?=\$\$|\\|<)")  # where a long rest of a line may be divided; a line end replaces a space
_WRAPPED = ("", "markdown", "md", "html")  # languages of a code fence around a whole answer
_KEY = re.compile(r"[\w-]+\s*:(?:\s|$)")
_TITLE = re.compile(r"title\s*:\s*(\S.*)$", re.IGNORECASE)
_MAX_FRONT_MATTER = 200  # lines
_UNDERLINE = re.compile(r" {0,3}(=+|-+)\s*$")
_INDENTED = re.compile(r"(?: {4}|\t)(?=\s*\S)")
_FRONT_MATTER = ("primary_language", "is_rotation_valid", "rotation_correction", "is_table", "is_diagram")  # olmOCR's


def markdown_blocks(text: str, block: Block) -> Iterator[Block]:
    """Yield the blocks of a text in Markdown.

    Args:
        block: gives the blocks their source, model and box.
    """
    lines = _unwrapped(text.replace("\r\n", "\n").split("\n"))
    return iter(_Splitter(lines, replace(block, text_format="markdown")).split())


def markdown_file_blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page of a Markdown file, which may also have underlined headings, indented code and front matter.

    Front matter (metadata between lines of dashes) is code, after a heading with its title.
    """
    lines, base = text.split("\n"), Block("paragraph", "", text_format="markdown")
    end = _front_matter_end(lines)
    if end:
        title = next((match[1] for line in lines[1:end] if (match := _TITLE.match(line))), "")
        yield from [replace(base, kind="heading", text=title.strip("\"' "), level=1)] if title else ()
        yield replace(base, kind="code", text="\n".join(lines[1:end]))
    yield from _Splitter(lines[end + 1 if end else 0 :], base, is_file=True).split()


def plain_text_blocks(text: str) -> Iterator[Block]:
    """Yield the paragraphs of a plain text, which have empty lines between them, and the items of its lists."""
    waiting, is_item = list[str](), False
    for line in [*text.split("\n"), ""]:
        item = _ITEM.match(line)
        if waiting and (item or not line.strip()):
            lines = tuple(map(Line, waiting)) if len(waiting) > 1 else ()
            yield Block("list_item" if is_item else "paragraph", " ".join(waiting), lines=lines, level=int(is_item))
            waiting, is_item = [], False
        if line.strip():
            waiting.append(line.strip())
            is_item = is_item or item is not None


def _front_matter_end(lines: Sequence[str]) -> int:
    """Return the index of the line that ends the front matter of a file, 0 without one."""
    if lines[0].rstrip() != "---" or len(lines) < 3 or not _KEY.match(lines[1]):
        return 0
    for index, line in enumerate(lines[1:_MAX_FRONT_MATTER], 1):
        if line.rstrip() in ("---", "..."):
            return index
        if line.strip() and not (_KEY.match(line) or line[0] in " \t-#"):
            return 0
    return 0


def _unwrapped(lines: list[str]) -> list[str]:
    """Return the lines without a code fence around all of them, and without olmOCR's front matter."""
    texts = [index for index, line in enumerate(lines) if line.strip()]
    lines = lines[texts[0] : texts[-1] + 1] if texts else []
    fence = _FENCE.match(lines[0].rstrip()) if lines else None
    if fence and fence[2].lower() in _WRAPPED and (fence[2] or len(lines) > 2):
        inner = lines[1:-1] if lines[-1].strip() == fence[1] else lines[1:]
        if not any(line.strip().startswith(fence[1]) for line in inner):
            lines = inner if fence[2] else lines
    if lines[:1] == ["---"] and "---" in lines[1:]:
        end = lines.index("---", 1)
        if all(line.partition(":")[0].strip() in _FRONT_MATTER for line in lines[1:end]):
            return lines[end + 1 :]
    return lines


@dataclass
class _Splitter:
    """Splits lines into blocks. Each line is looked at a few times, whatever is left open.

    Args:
        paragraph: the lines of the paragraph or item that has begun.
        unclosed: ends of formulas that no line from here on has.
        table_end: the last line that was found to end a table.
        tables_from: lines before it begin no HTML table.
        latex_tables_from: lines before it begin no LaTeX table.
        unclosed_tables: LaTeX tables that were found to have no end.
        open_boxes: LaTeX boxes around a table whose closing brace has not come yet.
        is_file: underlined headings and indented code are read, too. Models write lines of dashes between parts of a page.
    """

    lines: list[str]
    base: Block
    blocks: list[Block] = field(default_factory=list)
    paragraph: list[str] = field(default_factory=list)
    kind: Kind = "paragraph"
    level: int = 0
    unclosed: set[str] = field(default_factory=set)
    table_end: int = -1
    tables_from: int = 0
    latex_tables_from: int = 0
    unclosed_tables: int = 0
    open_boxes: int = 0
    is_file: bool = False

    def split(self) -> list[Block]:
        at = 0
        while at < len(self.lines):
            at = self._next(at)
        self._end()
        return self.blocks

    def _next(self, at: int) -> int:
        """Read the line at an index, and those that belong to it. Return the index of the next one.

        The other methods return None if what they read does not begin there.
        """
        line = self.lines[at]
        if self.is_file and (after := self._of_file(at)) is not None:
            return after
        if not line.strip() or _RULE.match(line):
            self._end()
            return at + 1
        for read in (self._fence, self._formula, self._html_table, self._latex, self._pipe_table, self._tagged):
            if (after := read(at)) is not None:
                return after
        if heading := _HEADING.match(line):
            self._add("heading", _title(line[heading.end() :]), level=len(heading[1]))
        elif image := _IMAGE.match(line):
            self._add("picture", image[1] or image[2])
        elif item := _ITEM.match(line):
            self._end()
            self.paragraph, self.kind, self.level = [item[2].strip()], "list_item", 1 + len(item[1].expandtabs(4)) // 2
        else:
            self.paragraph.append(line.strip())
        return at + 1

    def _of_file(self, at: int) -> int | None:
        """Read an underline, which makes the paragraph before it a heading, or indented code."""
        line = self.lines[at]
        if self.paragraph and self.kind == "paragraph" and (underline := _UNDERLINE.match(line)):
            title, self.paragraph = " ".join(self.paragraph), []
            self._add("heading", title, level=1 if underline[1][0] == "=" else 2)
            return at + 1
        if self.paragraph or not _INDENTED.match(line) or (self.blocks and self.blocks[-1].kind == "list_item"):
            return None
        end = at
        while end < len(self.lines) and (not self.lines[end].strip() or _INDENTED.match(self.lines[end])):
            end += 1
        self._add("code", "\n".join(_INDENTED.sub("", line, count=1) for line in self.lines[at:end]).rstrip())
        return end

    def _end(self) -> None:
        """Add the paragraph or item that has begun."""
        lines, kind, level = self.paragraph, self.kind, self.level
        self.paragraph, self.kind, self.level = [], "paragraph", 0
        if lines:
            parts = tuple(map(Line, lines)) if len(lines) > 1 else ()
            self.blocks.append(replace(self.base, kind=kind, text=" ".join(lines), level=level, lines=parts))

    def _add(self, kind: Kind, text: str, level: int = 0, cells: tuple[Cell, ...] = ()) -> None:
        self._end()
        if text or cells:
            self.blocks.append(replace(self.base, kind=kind, text=text, level=level, cells=cells))

    def _fence(self, at: int) -> int | None:
        """Read fenced code. Without an end it goes to the last line."""
        fence = _FENCE.match(self.lines[at].rstrip())
        if fence is None:
            return None
        end = next((i for i in range(at + 1, len(self.lines)) if self.lines[i].strip() == fence[1]), len(self.lines))
        self._add("code", "\n".join(self.lines[at + 1 : end]))
        return end + 1

    def _formula(self, at: int) -> int | None:
        """Read a formula on lines of its own. What follows its end on the same line is read on."""
        line = self.lines[at].lstrip()
        begin, close = next((pair for pair in _MATHS if line.startswith(pair[0])), ("", ""))
        if environment := _ENVIRONMENT.match(line):
            close = f"\\end{{{environment[1]}}}"
        if not close or close in self.unclosed:
            return None
        rest = line[len(begin) :] if begin else line[environment.end() :] if environment else ""
        inside = list[str]()
        for end in range(at, len(self.lines)):
            text = rest if end == at else self.lines[end]
            before, found, after = text.partition(close)
            if found:
                formula = "\n".join([*inside, before]).strip()
                self._add("formula", f"\\begin{{{environment[1]}}}{formula}{close}" if environment else formula)
                return self._read_on(end, after)
            inside.append(text)
        self.unclosed.add(close)
        return None

    def _read_on(self, at: int, rest: str) -> int:
        """Return the index of the next line: this one with the rest of its text, if there is any.

        A long rest becomes several lines. Otherwise all of it would be searched again after each of its elements.
        """
        if not rest.strip():
            return at + 1
        pieces = list(_pieces(rest))
        self.lines[at : at + 1] = pieces
        self.table_end, self.tables_from, self.latex_tables_from = (
            index + len(pieces) - 1 if index > at else index
            for index in (self.table_end, self.tables_from, self.latex_tables_from)
        )
        return at

    def _html_table(self, at: int) -> int | None:
        """Read an HTML table. What stands before it on its line is a paragraph, and so is what is in none of its cells."""
        begin = _TABLE.search(self.lines[at]) if at >= self.tables_from else None
        if begin is None:
            return None
        text, end = self.lines[at][begin.start() :], at
        if not _TABLE_END.search(text):
            end = self._find_table_end(at + 1)
            text = "\n".join([text, *self.lines[at + 1 : end + 1]])
        close = _TABLE_END.search(text)
        table, rest = (text[: close.end()], text[close.end() :]) if close else (text, "")
        cells = read_table(table)
        if not cells or len(cells) >= MAX_CELLS:
            self.tables_from = end
            return None
        if before := self.lines[at][: begin.start()].strip():
            self.paragraph.append(before)
        self._end()
        self._add("caption", text_outside(table))
        self._add("table", table_text(cells), cells=cells)
        return self._read_on(end, rest)

    def _find_table_end(self, at: int) -> int:
        """Return the index of the first line from this one on that ends a table, or of the last line."""
        if self.table_end < at:
            ends = (i for i in range(at, len(self.lines)) if _TABLE_END.search(self.lines[i]))
            self.table_end = next(ends, len(self.lines) - 1)
        return self.table_end

    def _latex(self, at: int) -> int | None:
        """Read a LaTeX table, its caption, or commands around it. What stands before a table on its line is a paragraph."""
        line = self.lines[at]
        if "\\" not in line:
            return self._close_box(at) if self.open_boxes else None
        if (layout := _LAYOUT.match(line)) is not None:
            self._end()
            self.open_boxes += layout[1] is not None
            return self._read_on(at, line[layout.end() :])
        if (command := _COMMAND.match(line)) is not None:
            return self._command(at, command)
        begin = LATEX_TABLE.search(line)
        if begin is None or at < self.latex_tables_from or self.unclosed_tables >= _MAX_UNCLOSED:
            return None
        end_of_table = table_end(self.lines, at, begin.start())
        if end_of_table is None:
            self.unclosed_tables += 1
            return None
        last, column = end_of_table
        inside = [line[begin.start() :], *self.lines[at + 1 : last + 1]]
        inside[-1] = inside[-1][: column - (begin.start() if last == at else 0)]
        cells = read_latex_table("\n".join(inside))
        if not cells or len(cells) >= MAX_CELLS:
            self.latex_tables_from = last
            return None
        if before := line[: begin.start()].strip():
            self.paragraph.append(before)
        self._add("table", table_text(cells), cells=cells)
        return self._read_on(last, self.lines[last][column:])

    def _command(self, at: int, command: re.Match[str]) -> int | None:
        """Read a LaTeX command whose argument is a block. The argument may have several lines."""
        text = "\n".join(self.lines[at : at + _ARGUMENT_LINES])
        end = closing_brace(text, command.end())
        kind, level = _COMMANDS[command[1]]
        if text[end] != "}" and kind != "caption":
            return None
        self._add(kind, latex_text(text[command.end() + 1 : end]), level)
        return self._read_on(at + text[:end].count("\n"), text[end + 1 :].partition("\n")[0])

    def _close_box(self, at: int) -> int | None:
        """Read the brace that closes a box around a table."""
        if not (line := self.lines[at].lstrip()).startswith("}"):
            return None
        self.open_boxes -= 1
        return self._read_on(at, line[1:])

    def _pipe_table(self, at: int) -> int | None:
        """Read a table of lines with `|`, whose second line has dashes."""
        is_table = (
            at + 1 < len(self.lines) and "|" in self.lines[at] and _DELIMITERS.match(" ".join(self.lines[at + 1].split()))
        )
        if not is_table or ("|" not in self.lines[at + 1] and len(_cells(self.lines[at])) > 1):
            return self._broken_pipe_table(at)
        end = at + 2
        while end < len(self.lines) and "|" in self.lines[end]:
            end += 1
        self._add_rows([self.lines[at], *self.lines[at + 2 : end]], num_headers=1)
        return end

    def _broken_pipe_table(self, at: int) -> int | None:
        """Read a table whose separator line is missing or first: at least two rows with the same number of cells."""
        is_headless = _DASHES.match(self.lines[at].strip()) is not None
        rows, end = list[str](), at + is_headless
        while end < len(self.lines) and _ROW.match(row := self.lines[end].strip()):
            if rows and len(_cells(row)) != len(_cells(rows[0])):
                break
            rows.append(row)
            end += 1
        if len(rows) < 2 - is_headless or len(_cells(rows[0])) < 2:
            return None
        self._add_rows(rows, num_headers=0)
        return end

    def _add_rows(self, lines: list[str], num_headers: int) -> None:
        texts = ((row, column, text) for row, line in enumerate(lines) for column, text in enumerate(_cells(line)))
        cells = tuple(Cell(row, column, text, header=row < num_headers) for row, column, text in texts)
        self._add("table", table_text(cells), cells=cells)

    def _tagged(self, at: int) -> int | None:
        """Read tags that models were trained to write, such as `<page_number>`, on a line of their own."""
        if not _TAG.match(self.lines[at]):
            return None
        text = "\n".join(self.lines[at : at + 64])
        tagged = _TAGGED.match(text)
        if tagged is None:
            return None
        self._add(_TAGS[tagged[1].lower()], " ".join(tagged[2].split()))
        end = text[: tagged.end()].count("\n") + at
        return self._read_on(end, text[tagged.end() :].partition("\n")[0])


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of about `_LONG_REST` characters."""
    start = 0
    while (cut := _CUT.search(text, start + _LONG_REST)) and cut.end() < len(text):
        yield text[start : cut.start()]
        start = cut.end()
    yield text[start:]


def _title(text: str) -> str:
    """Return the text of a heading without the number signs that close it."""
    title = text.strip()
    before = title.rstrip("#")
    return before.rstrip() if before[-1:].isspace() else title


def _cells(line: str) -> list[str]:
    """Return the texts of a row's cells."""
    row = line.strip()
    row = row.removeprefix("|")
    row = row[:-1] if row.endswith("|") and not row.endswith("\\|") else row
    return [cell.strip().replace("\\|", "|") for cell in _PIPE.split(row)]
