"""Answers of document models as blocks; the forms are those of the publishers' model cards and cookbooks."""

from __future__ import annotations

import json
from collections import Counter
from html import escape
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.engine.elements import MAX_CELLS, Cell, MarkedText, read_latex_table, read_table
from sensorium.pipelines.documents import markdown
from sensorium.pipelines.documents.answers import answer_blocks
from sensorium.pipelines.documents.blocks import Block, PageRecord
from sensorium.pipelines.documents.projections import Projected, project
from sensorium.processors.elements.element import ImageScale

SCALE = ImageScale((2000, 1000), (2000, 1000))  # height, width of a page of 500 x 1000 points
POINTS = 2.0  # pixels per point


def blocks(text: str, markup: str | None = None) -> tuple[Block, ...]:
    return answer_blocks(text, None if markup is None else MarkedText(markup, text, (SCALE,)), POINTS, "model")


def shape(found: tuple[Block, ...]) -> list[tuple[Any, ...]]:
    return [(block.kind, block.level, block.text) if block.level else (block.kind, block.text) for block in found]


MARKDOWN = r"""# A *title*

Two lines
of one paragraph with $x_1$.
$$
E = mc^2
$$
$$ a $$ (1)

\[ b \]
\begin{align*}
c &= d
\end{align*}

| Name | Price |
|:---|---:|
| cup | 5 \| 6 | extra |
| lid |

- an item
  that goes on
  - a deeper one
2. a second

```python
if x:

    pass
```
before <table><caption>Prices</caption><tr><th rowspan=2>a</th><td>b &lt; c</td></tr><tr><td>d</td></tr></table> after
![A chart](image_1.png)
<page_number>14</page_number>
***
the end"""


def test_markdown() -> None:
    found = blocks(MARKDOWN)
    assert shape(found) == [
        ("heading", 1, "A *title*"),
        ("paragraph", "Two lines of one paragraph with $x_1$."),
        ("formula", "E = mc^2"),
        ("formula", "a"),
        ("paragraph", "(1)"),
        ("formula", "b"),
        ("formula", "\\begin{align*}c &= d\\end{align*}"),
        ("table", "Name\tPrice\ncup\t5 | 6\textra\nlid"),
        ("list_item", 1, "- an item that goes on"),
        ("list_item", 2, "- a deeper one"),
        ("list_item", 1, "2. a second"),
        ("code", "if x:\n\n    pass"),
        ("paragraph", "before"),
        ("caption", "Prices"),
        ("table", "a\tb < c\n\td"),
        ("paragraph", "after"),
        ("picture", "A chart"),
        ("page_footer", "14"),
        ("paragraph", "the end"),
    ]
    assert [line.text for line in found[1].lines] == ["Two lines", "of one paragraph with $x_1$."]
    assert {(block.source, block.model, block.text_format, block.box) for block in found} == {
        ("model", "model", "markdown", None)
    }
    assert found[14].cells == (Cell(0, 0, "a", 2, 1, True), Cell(0, 1, "b < c"), Cell(1, 1, "d"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```markdown\n# A\n\nb\n```", [("heading", 1, "A"), ("paragraph", "b")]),
        ("```\na\nb\n```", [("code", "a\nb")]),
        ("---\nprimary_language: en\nis_table: False\n---\ntext", [("paragraph", "text")]),
        ("---\nname: kept\n---\ntext", [("paragraph", "name: kept"), ("paragraph", "text")]),
        ("$$ never closed\ntext", [("paragraph", "$$ never closed text")]),
        ("<table><tr><td>cut", [("table", "cut")]),
        ("<table>no cells</table>", [("paragraph", "<table>no cells</table>")]),
        ("a | b\nc | d", [("paragraph", "a | b c | d")]),
        ("| a | b |\n| c | d |\ntext", [("table", "a\tb\nc\td"), ("paragraph", "text")]),  # without its line of dashes
        ("|---|---|\n| a | b |\n\ntext", [("table", "a\tb"), ("paragraph", "text")]),
        ("| a | b |\n| c | d |\n| e |", [("table", "a\tb\nc\td"), ("paragraph", "| e |")]),
        ("| a | b |\ntext", [("paragraph", "| a | b | text")]),
        ("| a | b |\n| c |", [("paragraph", "| a | b | | c |")]),
        ("|x| = |y|\n|y| = |z|", [("paragraph", "|x| = |y| |y| = |z|")]),
        ("", []),
    ],
)
def test_forms_of_markdown(text: str, expected: list[tuple[Any, ...]]) -> None:
    assert shape(blocks(text)) == expected


def test_markdown_is_written_as_it_was_read() -> None:
    first = blocks(MARKDOWN.replace("<page_number>14</page_number>\n", ""))
    text = "".join(project(Projected("a", None, [PageRecord(1, 500, 1000, blocks=first)]), "md"))
    assert text.startswith("<!-- page 1 -->\n\n# A *title*\n")
    assert "| Name | Price |  |\n| --- | --- | --- |\n| cup | 5 \\| 6 | extra |\n| lid |\n" in text
    again = blocks(text.removeprefix("<!-- page 1 -->\n"))
    assert [block.text.split() for block in again] == [block.text.split() for block in first]
    assert [block.kind for block in again] == ["paragraph" if block.kind == "caption" else block.kind for block in first]


def test_headers_and_footers_are_left_out_of_text() -> None:
    found = blocks("<header>top</header>\n\ntext <b>\n\n<page_number>3</page_number>")
    document = Projected("a", None, [PageRecord(1, 500, 1000, blocks=found)])
    for output_format, has in (("md", False), ("txt", False), ("html", False), ("json", True), ("hocr", True)):
        assert ("top" in "".join(project(document, output_format))) is has


DOCTAGS = (
    "<doctag><page_header><loc_0><loc_0><loc_500><loc_20>Journal</page_header>\n"
    "<section_header_level_1><loc_0><loc_25><loc_500><loc_50>1 * Intro</section_header_level_1>\n"
    "<text>no box</text>\n<unordered_list><list_item><loc_0><loc_60><loc_500><loc_70>one</list_item>\n</unordered_list>"
    "<otsl><loc_0><loc_100><loc_500><loc_200>note<ched>Name<lcel><nl><fcel>cup<fcel>5<nl>"
    "<caption><loc_0><loc_100><loc_500><loc_120>Prices</caption></otsl>\n"
    "<formula><loc_0><loc_210><loc_500><loc_220>E = mc^2</formula>\n"
    "<code><loc_0><loc_230><loc_500><loc_250><_Python_>a\n  b</code>\n<picture><loc_0><loc_260><loc_500><loc_300></picture>"
    "stray</doctag>"
)
REF_DET = (
    "<|ref|>title<|/ref|><|det|>[[0, 0, 999, 100]]<|/det|>\n# Hello\n\n<|ref|>text<|/ref|>"
    "<|det|>[[0, 100, 999, 200], [0, 300, 999, 400]]<|/det|>\none\n\n## two\n\n"
    "<|ref|>equation<|/ref|><|det|>[[0, 400, 999, 500]]<|/det|>\n\\[ x \\]<｜end▁of▁sentence｜>"
)
UNLIMITED = (
    "<|det|>title [0, 0, 999, 100]<|/det|># Hello\n\n<|det|>text [0, 100, 999, 200]<|/det|>\none\n\n"
    "<|det|>image [0, 200, 999, 300]<|/det|>\n<|det|>image_caption [0, 300, 999, 320]<|/det|>Figure 1\n"
    "<|det|>table [0, 320, 999, 400]<|/det|><table><tr><td>a</td><td>b</td></tr></table>\n"
    "<|det|>equation [0, 400, 999, 500]<|/det|>\\[ x \\]<|det|>page_number [0, 900, 999, 950]<|/det|>7<｜end▁of▁sentence｜>"
)
DOTS = json.dumps(
    [
        {"bbox": [0, 0, 1000, 100], "category": "Page-header", "text": "Journal"},
        {"bbox": [0, 100, 1000, 200], "category": "Title", "text": "# Hello"},
        {"bbox": [0, 200, 1000, 300], "category": "Table", "text": "<table><tr><td>1 &lt; 2</td></tr></table>"},
        {"bbox": [0, 300, 1000, 400], "category": "Picture"},
        {"bbox": [0, 400, 1000, 500], "category": "Formula", "text": "$$ \\frac{a}{b} $$"},
        {"bbox": [0, 500, 1000, 600], "category": "List-item", "text": "- *one*", "note": "kept"},
    ]
)
QWEN_HTML = (
    '```html\n<html><body>\n<h2 data-bbox="0 0 1000 100">A &amp; B</h2>\n<p data-bbox="0 100 1000 200">one <b>two</b></p>\n'
    '<ol data-bbox="0 200 1000 300"><li>first</li><li data-bbox="0 250 1000 300">second</li></ol>\n'
    '<table data-bbox="0 300 1000 400"><tr><td>x</td></tr></table>\nloose &lt; text\n'
    '<div class="image" data-bbox="0 400 1000 500"><img data-bbox="1 401 999 499"/></div>\n'
    '<div class="formula" data-bbox="0 500 1000 600"><img data-bbox="0 500 1000 600" /><div>$$y$$</div></div>\n'
    "</body></html>\n```"
)
FORMATS: dict[str, tuple[str | None, str, list[tuple[Any, ...]]]] = {
    "doctags": (
        "doctags",
        DOCTAGS,
        [
            ("page_header", "Journal"),
            ("heading", 2, "1 * Intro"),
            ("paragraph", "no box"),
            ("list_item", 1, "one"),
            ("caption", "note"),
            ("table", "Name\ncup\t5"),
            ("caption", "Prices"),
            ("formula", "E = mc^2"),
            ("code", "a\n  b"),
            ("picture", ""),
            ("paragraph", "stray"),
        ],
    ),
    "deepseek-ocr": (
        "ref_det",
        REF_DET,
        [("heading", 1, "Hello"), ("paragraph", "one"), ("heading", 2, "two"), ("formula", "x")],
    ),
    "unlimited-ocr": (
        "ref_det",
        UNLIMITED,
        [
            ("heading", 1, "Hello"),
            ("paragraph", "one"),
            ("picture", ""),
            ("caption", "Figure 1"),
            ("table", "a\tb"),
            ("formula", "x"),
            ("page_footer", "7"),
        ],
    ),
    "dots": (
        "resized_json",
        DOTS,
        [
            ("page_header", "Journal"),
            ("heading", 1, "Hello"),
            ("table", "1 < 2"),
            ("picture", ""),
            ("formula", "\\frac{a}{b}"),
            ("list_item", 1, "- *one*"),
            ("paragraph", "kept"),
        ],
    ),
    "qwen-html": (
        "resized_json",
        QWEN_HTML,
        [
            ("heading", 2, "A & B"),
            ("paragraph", "one two"),
            ("list_item", 1, "first"),
            ("list_item", 1, "second"),
            ("table", "x"),
            ("paragraph", "loose < text"),
            ("picture", ""),
            ("formula", "y"),
        ],
    ),
    "qwen-json": (
        "box_tokens",
        '```json\n[{"bbox_2d": [0, 0, 1000, 100], "text_content": "one"}, '
        '{"bbox_2d": [0, 100, 1000, 200], "label": "two words"},',
        [("paragraph", "one"), ("paragraph", "two words")],
    ),
    "cut-off-json": (
        "resized_json",
        '[{"bbox": [0, 0, 1000, 100], "category": "Text", "text": "one"}, '
        '{"bbox": [0, 1, 2, 3], "category": "Text", "text": "tw',
        [("paragraph", "one"), ("paragraph", "tw")],
    ),
    "mineru": (
        "md_tokens",
        "<|box_start|>0 0 1000 100<|box_end|><|ref_start|>title<|ref_end|><|rotate_up|><|md_start|># One<|md_end|>\n"
        "<|box_start|>0 100 1000 200<|box_end|><|ref_start|>table<|ref_end|><|md_start|><fcel>1<lcel><nl><|md_end|>\nloose",
        [("heading", 1, "One"), ("table", "1"), ("paragraph", "loose")],
    ),
    "dolphin-layout": (
        "resized_json",
        "[0,0,500,90][sec_1][PAIR_SEP][0,100,500,190][para][author][RELATION_SEP][0,200,500.5,290][tab][PAIR_SEP][0,300,1",
        [("heading", 2, ""), ("paragraph", ""), ("table", ""), ("paragraph", "[0,300,1")],
    ),
    "mineru-table": ("box_tokens", "<fcel>a<fcel>b<nl>after", [("caption", "after"), ("table", "a\tb")]),
    "paddleocr-vl": (
        "corner_tokens",
        "one line<|LOC_0|><|LOC_0|><|LOC_500|><|LOC_0|><|LOC_500|><|LOC_100|><|LOC_0|><|LOC_100|>rest",
        [("paragraph", "one line"), ("paragraph", "rest")],
    ),
    "nemotron-parse": (
        "xy_tokens",
        "<x_0.0><y_0.0># Title<x_1.0><y_0.1><class_Title><x_0.0><y_0.2>12<x_1.0><y_0.3><class_Page-footer>",
        [("heading", 1, "Title"), ("page_footer", "12")],
    ),
    "qwen3-markdown": (
        "box_tokens",
        "## 4.2 Results\n\n<!-- Image (115, 270, 475, 495) -->\n\nSource: an archive\n\n<!-- Table (100, 500, 900, 600) -->\n"
        "\\begin{table}\n\\caption{Prices}\n\\begin{tabular}{|l|r|}\n\\hline\nName & Price \\\\ \\hline\ncup & 5 \\\\\n"
        "\\end{tabular}\n\\end{table}\n\nAfter.",
        [
            ("heading", 2, "4.2 Results"),
            ("picture", ""),
            ("paragraph", "Source: an archive"),
            ("caption", "Prices"),
            ("table", "Name\tPrice\ncup\t5"),
            ("paragraph", "After."),
        ],
    ),
    "lighton-ocr-bbox": (
        "image_boxes",
        "# Report\n\n![image](image_1.png)100,200,900,400\n\n*Figure 1*\n\n| a | b |\n|---|---|\n| 1 | 2 |",
        [("heading", 1, "Report"), ("picture", "image"), ("paragraph", "*Figure 1*"), ("table", "a\tb\n1\t2")],
    ),
    "got": (
        "box_tokens",
        "\\title{\nMADRIX \\({ }^{\\circledR}\\) PLEXUS -\n}\n\\section*{Quick Start Guide \\& Manual}\n"
        "\\(5^{\\text {th }}\\) Edition\n"
        "\\begin{abstract}\nShort.\n\\end{abstract}\n\\subsection*{Imprint}\ninoage GmbH\n\\[\na=b\n\\]",
        [
            ("heading", 1, "MADRIX \\({ }^{\\circledR}\\) PLEXUS -"),
            ("heading", 2, "Quick Start Guide & Manual"),
            ("paragraph", "\\(5^{\\text {th }}\\) Edition"),
            ("paragraph", "Short."),
            ("heading", 3, "Imprint"),
            ("paragraph", "inoage GmbH"),
            ("formula", "a=b"),
        ],
    ),
    "nemotron-parse-table": (
        "xy_tokens",
        "<x_0.1><y_0.1>Table 1: Prices<x_0.9><y_0.2><class_Caption><x_0.1><y_0.2>\\begin{tabular}{cc}\nName & Price \\\\\n"
        "\\multicolumn{2}{c}{cups} \\\\\n\\end{tabular}<x_0.9><y_0.4><class_Table>"
        "<x_0.1><y_0.5>\\(a=b\\)<x_0.9><y_0.6><class_Inline-formula><x_0.1><y_0.6>Contents 1<x_0.9><y_0.7><class_TOC>",
        [
            ("caption", "Table 1: Prices"),
            ("table", "Name\tPrice\ncups"),
            ("formula", "a=b"),
            ("paragraph", "Contents 1"),
        ],
    ),
    "deepseek-ocr-captions": (
        "ref_det",
        "<|ref|>image<|/ref|><|det|>[[10, 10, 900, 300]]<|/det|>\n"
        "<|ref|>image_caption<|/ref|><|det|>[[10, 300, 900, 340]]<|/det|>\n"
        "<center>Figure 1: Sales</center>\n\n<|ref|>table_caption<|/ref|><|det|>[[10, 400, 900, 420]]<|/det|>\n"
        "<center>Table 1</center>\n<|ref|>table<|/ref|><|det|>[[10, 420, 900, 500]]<|/det|>\n"
        "<table><tr><td>a</td><td>b</td></tr></table>",
        [("picture", ""), ("caption", "Figure 1: Sales"), ("caption", "Table 1"), ("table", "a\tb")],
    ),
    "mineru-2.5-layout": (
        "box_tokens",
        "<|box_start|>100 050 900 100<|box_end|><|ref_start|>header<|ref_end|><|rotate_up|>\n"
        "<|box_start|>100 150 900 300<|box_end|><|ref_start|>text<|ref_end|><|rotate_up|><|txt_contd_tgt|>\n"
        "<|box_start|>100 350 900 500<|box_end|><|ref_start|>image_block<|ref_end|><|rotate_right|>\n"
        "<|box_start|>100 550 900 700<|box_end|><|ref_start|>table<|ref_end|><|rotate_up|>\n"
        "<|box_start|>100 750 900 800<|box_end|><|ref_start|>equation<|ref_end|><|rotate_up|>",
        [("page_header", ""), ("paragraph", ""), ("picture", ""), ("table", ""), ("formula", "")],
    ),
    "docling-core": (
        "doctags",
        "<doctag><picture><loc_104><loc_85><loc_413><loc_170><other><caption><loc_68><loc_56><loc_445><loc_80>Fig. 3. OTSL"
        "</caption></picture>\n<chart><loc_102><loc_37><loc_392><loc_148><bar_chart><ched>Number<ched>single<nl><fcel>1<fcel>0.06<nl></chart>\n"
        "<key_value_region><loc_30><loc_50><loc_434><loc_444><key_0><loc_31><loc_51><loc_49><loc_60>TO:<link_4></key_0>"
        "<value_4><loc_82><loc_51><loc_162><loc_61>Mrs. Sparrow</value_4></key_value_region>\n</doctag>",
        [
            ("picture", ""),
            ("caption", "Fig. 3. OTSL"),
            ("table", "Number\tsingle\n1\t0.06"),
            ("paragraph", "TO:"),
            ("paragraph", "Mrs. Sparrow"),
        ],
    ),
    "glm-ocr": (
        None,
        '## 2 Method\n\nWe use $x_1$.\n\n$$\nE = mc^2\n$$\n\n<table border="1"><tr><td colspan="2">a</td></tr>'
        "<tr><td>b</td><td>c</td></tr></table>",
        [("heading", 2, "2 Method"), ("paragraph", "We use $x_1$."), ("formula", "E = mc^2"), ("table", "a\nb\tc")],
    ),
    "hunyuan-ocr": ("pairs_in_text", "Total(0,0),(500,100)\n5 EUR", [("paragraph", "Total"), ("paragraph", "5 EUR")]),
    "plain": ("ref_det", "# Only *Markdown*", [("heading", 1, "Only *Markdown*")]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_models(name: str) -> None:
    markup, text, expected = FORMATS[name]
    assert shape(blocks(text, markup)) == expected


def test_boxes_are_in_points() -> None:
    first, second, third, _ = blocks(REF_DET, "ref_det")
    assert first.box == pytest.approx((0, 0, 500, 100.1), abs=0.1)
    assert second.box == pytest.approx((0, 100.1, 500, 400.4), abs=0.1)  # around both boxes of its content
    assert third.box == second.box
    assert {block.box for block in blocks(DOCTAGS, "doctags") if block.text in ("no box", "stray")} == {None}
    assert blocks(QWEN_HTML, "resized_json")[3].box == (0, 125, 500, 150)
    assert blocks(DOTS, "resized_json")[0].text_format == "markdown"
    boxes = [block.box for block in blocks(FORMATS["qwen3-markdown"][1], "box_tokens")]
    assert boxes == [None, (57.5, 270, 237.5, 495), None, None, (50, 500, 450, 600), None]
    assert blocks(FORMATS["lighton-ocr-bbox"][1], "image_boxes")[1].box == (50, 200, 450, 400)
    assert blocks(FORMATS["nemotron-parse-table"][1], "xy_tokens")[1].box == (50, 200, 450, 400)
    assert blocks(DOCTAGS, "doctags")[1].text_format == "plain"


WORDS = st.text("abcäß", min_size=1, max_size=4)
FRAGMENTS = st.sampled_from(
    [" ", "\n", "\n\n",
     "# ", "- ", "1. ", "  - ", "$$", "\n$$\n", "\\[", "\\]", "|", "\n|---|---|\n", "---\n", "```\n", "~~~\n",
     "<table>", "<tr>", "<td>", "</td>", "</tr>", "</table>", "<caption>", "<", ">", "*", "&", "{", "}", "[", "]", '"', "\t"]
)  # fmt: skip
TAGS = ("<table>", "<tr>", "<td>", "</td>", "</tr>", "</table>", "<caption>")


def letters(text: str) -> Counter[str]:
    for tag in TAGS:
        text = text.replace(tag, "")
    return Counter(character for character in text if character.isalnum())


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS | FRAGMENTS, max_size=30).map("".join))
def test_markdown_loses_no_letter(text: str) -> None:
    assert letters(" ".join(block.text for block in blocks(text))) == letters(text)


WITHOUT_TEXT_BETWEEN = ("resized_json", "pairs_in_text", "corner_tokens", "xy_tokens")
MARKUPS = ("doctags", "html", "ref_det", "md_tokens", *WITHOUT_TEXT_BETWEEN)
CONTENTS = st.lists(st.text('ab1 *_#-.$\n\\"<&', max_size=12), min_size=1, max_size=5)


def written(markup: str, contents: list[str]) -> str:
    """Return an answer with an element for each content, and the first again between two elements."""
    between = "" if markup in WITHOUT_TEXT_BETWEEN else contents[0]
    if markup == "resized_json":
        return json.dumps([{"bbox": [0, 0, 9, 9], "category": "Text", "text": content} for content in contents])
    forms = {
        "doctags": "<text><loc_1><loc_2><loc_3><loc_4>{}</text>",
        "ref_det": "<|ref|>text<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>{}",
        "md_tokens": "<|box_start|>1 2 3 4<|box_end|><|ref_start|>text<|ref_end|><|md_start|>{}<|md_end|>",
        "xy_tokens": "<x_0.1><y_0.1>{}<x_0.2><y_0.2><class_Text>",
        "pairs_in_text": "{}(1,2),(3,4)",
        "corner_tokens": "{}" + "<|LOC_1|>" * 8,
        "html": '<p data-bbox="1 2 3 4">{}</p>',
    }
    if markup == "html":
        contents, between = [escape(content) for content in contents], escape(between)
    return between.join(forms[markup].replace("{}", content) for content in contents)


@pytest.mark.parametrize("markup", MARKUPS)
@settings(max_examples=100, deadline=None)
@given(contents=CONTENTS)
def test_elements_lose_no_letter(markup: str, contents: list[str]) -> None:
    answer = written(markup, contents)
    repeats = [] if markup in WITHOUT_TEXT_BETWEEN else contents[:1] * (len(contents) - 1)
    found = " ".join(block.text for block in blocks(answer, "resized_json" if markup == "html" else markup))
    assert letters(found) == letters(" ".join([*contents, *repeats]))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([text for _, text, _ in FORMATS.values()]), st.integers(0, 400), st.integers(0, 400), st.data())
def test_broken_answers_give_blocks(text: str, first: int, second: int, data: st.DataObject) -> None:
    markup = data.draw(st.sampled_from([markup for markup, _, _ in FORMATS.values()]))
    broken = text[:first] + text[second:]
    assert bool(blocks(broken, markup)) or not any(character.isalnum() for character in broken)


def written_as(output_format: str, found: tuple[Block, ...], source: str = "a/b.pdf") -> str:
    return "".join(project(Projected(source, None, [PageRecord(1, 500, 1000, blocks=found)]), output_format))


def test_tables_as_csv_and_html() -> None:
    text = '<table><tr><th colspan="2">a, "b"</th></tr><tr><td>c &lt;</td><td>d</td></tr></table>\n\n|x|y|\n|-|-|\n|1|2|'
    assert written_as("csv", blocks(text)) == '"a, ""b"""\nc <,d\n\nx,y\n1,2\n'
    tables = '<table><tr><th colspan="2">a, "b"</th></tr><tr><td>c &lt;</td><td>d</td></tr></table>'
    assert tables in written_as("html", blocks(text))
    assert written_as("md", blocks(text)).endswith(f"{tables}\n\n| x | y |\n| --- | --- |\n| 1 | 2 |\n")
    assert written_as("csv", ()) == ""


def test_docling_json_round_trips() -> None:
    """docling-core, where it is installed, reads our JSON and writes the same items."""
    fields = json.loads(written_as("docling", (*blocks(DOCTAGS, "doctags"), *blocks(MARKDOWN))))
    assert [item["label"] for item in fields["texts"][:4]] == ["page_header", "section_header", "text", "list_item"]
    assert (fields["name"], fields["texts"][0]["content_layer"], fields["texts"][1]["level"]) == ("b", "furniture", 1)
    assert fields["texts"][3]["parent"] == {"$ref": "#/groups/0"}
    assert fields["groups"][0]["children"] == [{"$ref": "#/texts/3"}]
    document_types = pytest.importorskip("docling_core.types.doc")
    document = document_types.DoclingDocument.model_validate(fields)
    again = document.export_to_dict()
    for kind in ("texts", "tables", "pictures", "groups"):
        assert len(again[kind]) == len(fields[kind])
        for ours, theirs in zip(fields[kind], again[kind], strict=True):
            kept = {name: theirs[name] for name in ours if name != "data"}
            assert kept == {name: value for name, value in ours.items() if name != "data"}
    assert again["body"]["children"] == fields["body"]["children"]
    cells = [cell.text for cell in document.tables[0].data.table_cells]
    assert cells == ["Name", "cup", "5"]
    assert document.pages[1].size.width == 500
    text = document.export_to_markdown(escape_underscores=False)
    for part in ("# A *title*", "$$E = mc^2$$", "- an item that goes on", "2. a second"):
        assert part in text
    assert "Journal" not in text


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"#{' ' * 1_000_000}a #b", ["heading"]),
        (f"a | b\n-:{' ' * 1_000_000}x", ["paragraph"]),
        (f"a | b\n{' ' * 1_000_000}x", ["paragraph"]),
        (f"```{' ' * 1_000_000}!", ["paragraph"]),
        ("\\[\n" * 200_000, ["paragraph"]),
        ("\n" * 1_000_000 + "a", ["paragraph"]),
        (f"\\caption{' ' * 1_000_000}a", ["paragraph"]),
        (f"\\begin{{tabular}}{{c}}\\text{' ' * 1_000_000}a\\end{{tabular}}", ["table"]),
    ],
)
def test_hostile_answers_end(text: str, kinds: list[str]) -> None:
    """Work that grows with the square of these sizes would take hours."""
    assert [block.kind for block in blocks(text)] == kinds


@pytest.mark.parametrize(
    "element",
    [
        "$$a$$",
        r"\[a\]",
        r"\begin{equation}a\end{equation}",
        r"\begin{tabular}{c}a\end{tabular}",
        "<table><tr><td>a</td></tr></table>",
        "<page_number>1</page_number>",
        r"\caption{a}",
        r"\centering ",
    ],
)
def test_work_grows_with_the_length_of_a_line(element: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, work = markdown._Splitter._next, list[int]()

    def counted(splitter: markdown._Splitter, at: int) -> int:
        work.append(len(splitter.lines[at]))
        return whole(splitter, at)

    monkeypatch.setattr(markdown._Splitter, "_next", counted)
    kinds, sizes = list[list[str]](), list[int]()
    for count in (2_000, 8_000):
        kinds.append([block.kind for block in blocks(element * count)])
        sizes.append(sum(work))
        work.clear()
    assert len(kinds[1]) == 4 * len(kinds[0])
    assert sizes[1] < 5 * sizes[0]


def test_a_long_rest_of_a_line_loses_nothing() -> None:
    words = [f"word{number}" for number in range(2_000)]
    formula, paragraph, table, end = blocks(f"$$a$$ {' '.join(words)} <table><tr><td>{'b ' * 3_000}</td></tr></table> end")
    assert (formula.text, paragraph.text.split(), end.text) == ("a", words, "end")
    assert [cell.text.split() for cell in table.cells] == [["b"] * 3_000]


def test_objects_of_brackets_end() -> None:
    text = '{"bbox_2d": [1, 2, 3, 4], "text": "a"}'
    assert [block.kind for block in blocks(text + "[" * 500_000 + "x", "resized_json")] == ["paragraph"] * 2


@pytest.mark.parametrize("cells", ["", "<td>a" * MAX_CELLS])
def test_open_tables_are_read_once(monkeypatch: pytest.MonkeyPatch, cells: str) -> None:
    sizes, text = list[int](), "<table\n" * 5_000 + cells
    monkeypatch.setattr(markdown, "read_table", lambda table: sizes.append(len(table)) or read_table(table))
    assert "".join(block.text for block in blocks(text)).count("<table") == 5_000
    assert len(text) - 10 < sum(sizes) < 2 * len(text)


@pytest.mark.parametrize(
    ("line", "title"),
    [("# a", "a"), ("## a ##  ", "a"), ("# a#", "a#"), ("# ##", "##"), ("#", None), ("#a", None), ("#\ta  # b #", "a  # b")],
)
def test_headings(line: str, title: str | None) -> None:
    assert [block.text for block in blocks(line) if block.kind == "heading"] == ([] if title is None else [title])


LATEX = r"""\begin{table}[htbp]
\centering \small
\caption{Prices in \emph{euros} {and
more}}
\label{tab:a}
\resizebox{\textwidth}{!}{%
\begin{tabular}{|l|c|r|}
\toprule
\multirow{2}{*}{\textbf{Name}} & \multicolumn{2}{c|}{Price \& tax} \\ \cline{2-3}
 & net & gross % a comment & with a cell
\\ \midrule
cup & $x_1$ & {5} \\[2pt]
lid & \multicolumn{2}{c}{\multirow{2}{*}{none}} \\
box & \multicolumn{2}{c}{} \\ \bottomrule
\end{tabular}
}
\end{table}
after
"""


def test_latex_tables_have_cells_with_spans_and_a_header() -> None:
    caption, table, after = blocks(LATEX)
    assert (caption.kind, caption.text, after.kind, after.text) == ("caption", "Prices in euros and more", "paragraph", "after")
    assert table.cells == (
        Cell(0, 0, "Name", 2, 1, True),
        Cell(0, 1, "Price & tax", 1, 2, True),
        Cell(1, 1, "net", header=True),
        Cell(1, 2, "gross", header=True),
        Cell(2, 0, "cup"),
        Cell(2, 1, "$x_1$"),
        Cell(2, 2, "5"),
        Cell(3, 0, "lid"),
        Cell(3, 1, "none", 2, 2),
        Cell(4, 0, "box"),
    )


def test_latex_tables_on_one_line_as_got_writes_them() -> None:
    nested = r"\begin{tabular}{c} 2 \\ 3 \end{tabular}"
    text = rf"See \begin{{tabular}}{{|l|l|}} \hline a & b \\ \hline 1 & {nested} \\ \hline \end{{tabular}} and more"
    found = blocks(text)
    assert shape(found) == [("paragraph", "See"), ("table", "a\tb\n1\t2 3"), ("paragraph", "and more")]
    assert [cell.header for cell in found[1].cells] == [True, True, False, False]
    assert shape(blocks(r"\begin{longtable}{ll} a & b \\ \endhead c & d \\ \end{longtable}"))[0][0] == "table"


def test_a_cell_with_text_ends_the_span_above_it() -> None:
    (table,) = blocks(r"\begin{tabular}{cc} \multirow{3}{*}{a} & b \\ & c \\ d & e \end{tabular}")
    assert [(cell.text, cell.row, cell.row_span) for cell in table.cells] == [
        ("a", 0, 2),
        ("b", 0, 1),
        ("c", 1, 1),
        ("d", 2, 1),
        ("e", 2, 1),
    ]


@pytest.mark.parametrize(
    "text", [r"\begin{tabular}{c} a & b \\ never ends", r"\begin{tabular}{c} \end{tabular}", r"\begin{tabular}"]
)
def test_latex_without_a_whole_table_stays_text(text: str) -> None:
    assert shape(blocks(text)) == [("paragraph", text)]


LATEX_PIECES = [r"\begin{tabular}", r"\end{tabular}", "{c}", "{", "}", "&", "\\\\", r"\multirow{2}{*}{", r"\multicolumn{3}{c}{"]
LATEX_PIECES += [
    r"\hline",
    r"\midrule",
    "%",
    "\n",
    "a",
    "$",
    r"\(",
    r"\caption{",
    r"\begin{table}",
    r"\resizebox{1}{!}{",
    "[",
    "]",
    "\\",
]


@given(st.lists(st.sampled_from(LATEX_PIECES), max_size=40))
@settings(deadline=None)
def test_no_two_cells_of_a_latex_table_are_at_one_place(pieces: list[str]) -> None:
    for block in blocks("".join(pieces)):
        rows = (range(cell.row, cell.row + cell.row_span) for cell in block.cells)
        columns = (range(cell.column, cell.column + cell.column_span) for cell in block.cells)
        places = [(row, column) for down, across in zip(rows, columns, strict=True) for row in down for column in across]
        assert len(places) == len({*places})


@pytest.mark.parametrize("piece", LATEX_PIECES)
def test_hostile_latex_has_few_steps(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables without an end are looked for a few times only."""
    calls, whole = list[int](), markdown.table_end
    monkeypatch.setattr(markdown, "table_end", lambda *arguments: (calls.append(1), whole(*arguments))[1])
    blocks("\n".join([r"\begin{tabular}{c}"] * 2000) + piece * 2000)
    assert len(calls) <= 32


def test_latex_tables_without_cells_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, text = list[int](), "%\\begin{tabular}\n" * 2000 + "%\\end{tabular}\n" * 2000
    monkeypatch.setattr(markdown, "read_latex_table", lambda table: sizes.append(len(table)) or read_latex_table(table))
    assert [block.kind for block in blocks(text)] == ["paragraph"]
    assert sum(sizes) < len(text)


def test_a_cell_that_spans_columns_of_several_rows_covers_the_empty_ones_below() -> None:
    (table,) = blocks(r"\begin{tabular}{cccc} a & \multicolumn{2}{c}{\multirow{2}{*}{b}} & c \\ d & & & e \\ \end{tabular}")
    assert [(cell.text, cell.row, cell.column, cell.row_span, cell.column_span) for cell in table.cells] == [
        ("a", 0, 0, 1, 1), ("b", 0, 1, 2, 2), ("c", 0, 3, 1, 1), ("d", 1, 0, 1, 1), ("e", 1, 3, 1, 1),
    ]  # fmt: skip


FILE = """---
title: "A report"
tags:
  - x
---
Intro
=====

Some *text*
over two lines.
Part
----
1. one

    goes on

Below:

    indented
      code

| a | b |
|---|---|
| 1 | 2 |
"""


def test_markdown_of_files_has_front_matter_underlined_headings_and_indented_code() -> None:
    found = tuple(markdown.markdown_file_blocks(FILE))
    assert shape(found) == [
        ("heading", 1, "A report"),
        ("code", 'title: "A report"\ntags:\n  - x'),
        ("heading", 1, "Intro"),
        ("heading", 2, "Some *text* over two lines. Part"),
        ("list_item", 1, "1. one"),
        ("paragraph", "goes on"),
        ("paragraph", "Below:"),
        ("code", "indented\n  code"),
        ("table", "a\tb\n1\t2"),
    ]
    assert {(block.source, block.text_format, block.model) for block in found} == {("text_layer", "markdown", "")}


@pytest.mark.parametrize("text", ["---\na line\n---\n", "---\nkey: value\nno key here\n---\n", "---\nkey: value\n", "---", ""])
def test_rules_at_the_beginning_are_no_front_matter(text: str) -> None:
    assert "code" not in {block.kind for block in markdown.markdown_file_blocks(text)}


def test_models_write_lines_of_dashes_that_make_no_heading() -> None:
    assert shape(blocks("one\n---\ntwo\n\n    three")) == [("paragraph", "one"), ("paragraph", "two"), ("paragraph", "three")]


def test_plain_text_has_paragraphs_and_items() -> None:
    found = tuple(markdown.plain_text_blocks("one *a*\ntwo\n\n# three\n- four\nfive\n2) six\n\n\nseven"))
    assert shape(found) == [
        ("paragraph", "one *a* two"),
        ("paragraph", "# three"),
        ("list_item", 1, "- four five"),
        ("list_item", 1, "2) six"),
        ("paragraph", "seven"),
    ]
    assert {block.text_format for block in found} == {"plain"}
    assert [line.text for line in found[0].lines] == ["one *a*", "two"]
    page = PageRecord(1, way="text_layer", blocks=found)
    written = "".join(project(Projected("", None, [page]), "md"))
    assert r"one \*a\* two" in written
    assert r"\# three" in written
