"""Elements of answers in each format; forms are those of the model cards."""

import pickle

import pytest
from sensorium.processors.elements import tagged
from sensorium.processors.elements.element import Cell, ImageScale
from sensorium.processors.elements.formats import FORMATS, NUMBERED
from sensorium.processors.elements.marked_text import MAX_CHARACTERS, MAX_ELEMENTS, MAX_LABEL, NUMBERED_FORMATS, MarkedText
from sensorium.processors.elements.tables import MAX_CELLS

SCALE = ImageScale((100, 200), (50, 100))  # height, width
WHOLE = (0.0, 0.0, 200.0, 100.0)


def found(form, text, *scales):
    return MarkedText(form, text, scales or (SCALE,)).elements()


def box(*numbers):
    return pytest.approx(numbers, abs=0.05)


BOXES = [
    ("box_tokens", '```json\n[{"bbox_2d": [100, 200, 300, 400], "label": "cup"}]\n```', "cup", box(20, 20, 60, 40)),
    (
        "box_tokens",
        '{"objects": [{"bbox_2d": [300, 400, 100, 200], "label": "cup"}, {"bbox_2d": [1',
        "cup",
        box(20, 20, 60, 40),
    ),
    (
        "box_tokens",
        "<|object_ref_start|>cup<|object_ref_end|><|box_start|>(100,200),(300,400)<|box_end|><|im_end|>",
        "cup",
        box(20, 20, 60, 40),
    ),
    (
        "box_tokens",
        "<|box_start|>100 200 300 400<|box_end|><|ref_start|>title<|ref_end|><|rotate_up|>",
        "title",
        box(20, 20, 60, 40),
    ),
    (
        "md_tokens",
        "<|box_start|>100 200 300 400<|box_end|><|ref_start|>title<|ref_end|><|md_start|># One<|md_end|>",
        "title",
        box(20, 20, 60, 40),
    ),
    ("resized_json", '[{"bbox_2d": [10, 20, 30, 40], "label": "cup"}]', "cup", box(20, 40, 60, 80)),
    ("resized_json", '[{"bbox": [0, 0, 500, 500], "category": "Picture"}]', "Picture", WHOLE),
    ("resized_json", "[10,20,30,40][para][author][PAIR_SEP]", "para", box(20, 40, 60, 80)),
    (
        "resized_json",
        '<body><div class="image" data-bbox="10 20 30 40"><img data-bbox="1 1 2 2"/></div>',
        "image",
        box(20, 40, 60, 80),
    ),
    ("box_tokens", "<ol data-bbox='100 200 300 400'><li>1 &lt; 2</li></ol>", "li", box(20, 20, 60, 40)),
    ("box_tokens", "text\n<!-- Image (100, 200, 300, 400) -->\ntext", "image", box(20, 20, 60, 40)),
    ("image_boxes", "text ![cup](image_1.png)100,200,300,400\n\nA cup, 5,6,7,8", "image", box(20, 20, 60, 40)),
    ("ref_box", "<ref>cup</ref><box>[[100, 200, 300, 400]]</box>", "cup", box(20, 20, 60, 40)),
    ("ref_det", "<|ref|>cup<|/ref|><|det|>[[0, 0, 999, 999]]<|/det|>", "cup", WHOLE),
    ("ref_det", "<|det|>h1 title [0, 0, 999, 999]<|/det|>Hello", "h1 title", WHOLE),
    ("loc_tokens", "<loc0256><loc0512><loc0768><loc1023> cup ; dog", "cup", box(100, 25, 199.8, 75)),
    ("doctags", "<doctag><picture><loc_50><loc_100><loc_150><loc_200></picture></doctag>", "picture", box(20, 20, 60, 40)),
]


@pytest.mark.parametrize(("form", "text", "label", "expected"), BOXES)
def test_boxes(form, text, label, expected):
    (one,) = found(form, text)
    assert (one.label, one.box, one.points, one.image) == (label, expected, (), 0)


def test_content_of_boxes_between_tags():
    place = "<|box_start|>{} 200 300 400<|box_end|><|ref_start|>{}<|ref_end|><|md_start|>"
    text = f"{place.format(100, 'text')}a < b\nc<|md_end|>\n{place.format(200, 'image')}<|md_end|>\n"
    text += f"{place.format(0, 'table')}<fcel>1<lcel><nl><fcel>2<ecel><nl><|md_end|>\n{place.format(1, 'text')}cut<|im_end|>"
    first, second, third, last = found("md_tokens", text)
    assert (first.text, second.text, last.text) == ("a < b\nc", "", "cut")
    assert [one.label for one in (first, second, third, last)] == ["text", "image", "table", "text"]
    assert third.cells == (Cell(0, 0, "1", 1, 2), Cell(1, 0, "2"), Cell(1, 1, ""))


@pytest.mark.parametrize(("side", "angle"), [("up", 0), ("right", 90), ("down", 180), ("left", 270)])
def test_rotation_of_the_content_of_boxes(side, angle):
    """MinerU turns the image of a box by this angle, against the clock, before it reads the box."""
    place = "<|box_start|>{} 200 300 400<|box_end|><|ref_start|>text<|ref_end|>"
    text = f"{place.format(0)}<|rotate_{side}|><|txt_contd|>\n{place.format(100)}\n{place.format(200)}<|rotate_up|>"
    assert [one.angle for one in found("box_tokens", text)] == [angle, None, 0]
    assert [one.angle for one in found("md_tokens", f"{place.format(0)}<|rotate_{side}|><|md_start|>a<|md_end|>")] == [angle]
    assert found("ref_box", "<ref>cup</ref><box>[[0, 0, 5, 5]]</box><|rotate_right|>")[0].angle is None


def test_an_answer_that_is_one_table():
    (one,) = found("box_tokens", "<fcel>a<fcel>b<nl><ucel><ecel><nl>")
    assert (one.label, one.box, one.cells) == ("table", None, (Cell(0, 0, "a", 2, 1), Cell(0, 1, "b"), Cell(1, 1, "")))
    assert found("box_tokens", "A cell is written as <fcel>a<nl>.") == ()


def test_every_format_has_a_case():
    others = {"pairs_in_text", "point_tags", "pointing_tags", "xy_tokens", "corner_tokens"}
    assert {form for form, *_ in BOXES} | others == set(FORMATS)
    assert set(NUMBERED) == NUMBERED_FORMATS


SPANS = [
    ("box_tokens", 'a {"bbox_2d": [1, 2, 3, 4], "label": "b"} c'),
    ("resized_json", 'a <p data-bbox="1 2 3 4">b</p> c'),
    ("ref_box", "a <ref>b</ref><box>[[1, 2, 3, 4]]</box> c"),
    ("box_tokens", "a <|box_start|>1 2 3 4<|box_end|><|ref_start|>b<|ref_end|> c"),
    ("md_tokens", "a <|box_start|>1 2 3 4<|box_end|><|ref_start|>b<|ref_end|><|rotate_up|><|md_start|>b<|md_end|> c"),
    ("doctags", "a <text><loc_1><loc_2><loc_3><loc_4>b</text> c"),
    ("xy_tokens", "a <x_0.1><y_0.1>b<x_0.2><y_0.2><class_Text> c"),
]


@pytest.mark.parametrize(("form", "text"), SPANS)
def test_spans_of_elements(form, text):
    (one,) = found(form, text)
    assert text[slice(*one.span)] == text[2:-2]
    assert "span" not in one.fields()


def test_several_boxes_and_labels():
    text = "<ref>cups</ref><box>[[0, 0, 500, 500], [500, 500, 1000, 1000]]</box> and <ref>dog</ref><box>[[1, 2, 3]]</box>"
    assert [one.label for one in found("ref_box", text)] == ["cups", "cups"]
    text = "<|box_start|>1 2 3 4<|box_end|>\n<|box_start|>5 6 7 8<|box_end|><|ref_start|>text<|ref_end|>"
    assert [one.label for one in found("box_tokens", text)] == ["", "text"]


@pytest.mark.parametrize(
    "text",
    [
        '<point x="10.0" y="20.5" alt="cup">cup</point>',
        '<points coords="1 1 100 205">cup</points>',
    ],
)
def test_a_point(text):
    (one,) = found("point_tags", text)
    assert (one.label, one.box, one.points) == ("cup", None, (pytest.approx((20, 20.5)),))


def test_several_points():
    found_points = [
        one.points[0] for one in found("point_tags", '<points x1="10" y1="20" x2="30" y2="40" alt="cups">cups</points>')
    ]
    assert found_points == [pytest.approx((20, 20)), pytest.approx((60, 40))]
    (one,) = found("box_tokens", '{"point_2d": [100, 200], "label": "cup"}')
    assert one.points == (pytest.approx((20, 20)),)


def test_points_in_several_images_and_in_videos():
    wide = ImageScale((100, 1000), (50, 100), 1)
    text = 'Counting the <points coords="1 1 100 205\t2 2 500 1000 3 000 1001">cups</points> shows 2.'
    first, second = found("point_groups", text, SCALE, wide)
    assert (first.label, first.image, first.track, first.time, first.points) == (
        "cups",
        0,
        1,
        None,
        (pytest.approx((20, 20.5)),),
    )
    assert (second.image, second.track, second.points) == (1, 2, ((500, 100),))
    text = '<tracks coords="0.0 1 100 205;0.5 1 200 205 2 300 300;3.5 1 300 205">cup</tracks>'
    tracked = found("point_groups", text, ImageScale((100, 200), (50, 100), is_video=True))
    assert [(one.time, one.track, one.points[0][0]) for one in tracked] == [
        (0, 1, 20),
        (0.5, 1, 40),
        (0.5, 2, 60),
        (3.5, 1, 60),
    ]
    assert found("point_groups", text, *[ImageScale((100, 200), (50, 100), is_video=True)] * 2) == ()
    (one,) = found("point_groups", '<point x="10.0" y="20.5" alt="cup">cup</point>')
    assert (one.points, one.track) == ((pytest.approx((20, 20.5)),), None)
    assert found("point_groups", '<points coords="3 1 100 205">cup</points>', SCALE, wide) == ()
    assert found("point_tags", '<points coords="1 1 100 205">cup</points>', SCALE, wide) == ()


def test_points_boxes_and_polygons_in_tags():
    text = '<point mention="a &amp; b"> (100,200) </point> and <POINT_BOX mention=cup t=1.5> (0, 0) (500,500) </POINT_BOX>'
    point, cup = found("pointing_tags", text)
    assert (point.label, point.box, point.points) == ("a & b", None, (pytest.approx((20, 20)),))
    assert (cup.label, cup.box, cup.points) == ("cup", (0, 0, 100, 50), ())
    assert (point.time, cup.time) == (None, 1.5)
    (last,) = found("pointing_tags", f'<think>perhaps {text}</think>\n<point t="2"> (3,4) </point>')
    assert (last.points, last.time) == (((0.6, 0.4),), 2.0)
    assert not found("pointing_tags", f"<think>{text}</think>")
    corners = "(0,0) (1000,0) (1000,500)"
    text = (
        f'<collection mention="cars"> <polygon> {corners} </polygon> <point> (1,2) </point> </collection><point>(3,4)</point>'
    )
    first, second, third = found("pointing_tags", text)
    assert (first.label, first.box, first.points) == ("cars", (0, 0, 200, 50), ((0, 0), (200, 0), (200, 50)))
    assert (second.label, third.label) == ("cars", "")
    for broken in (
        "<point> (1,2)",
        "<point> (1) </point>",
        "<point_box> (1,2) </point_box>",
        "<polygon> (1,2) (3,4) </polygon>",
    ):
        assert not found("pointing_tags", broken)


def test_corners_of_lines():
    corners = "".join(f"<|LOC_{number}|>" for number in (0, 0, 500, 0, 500, 100, 0, 100))
    first, second = found("corner_tokens", f"one line{corners}<|TEXT_START|>two<|TEXT_END|><|LOC_BEGIN|>{corners}<|LOC_END|>")
    assert (first.text, second.text) == ("one line", "two")
    assert first.points == ((0, 0), (100, 0), (100, 10), (0, 10))
    assert first.box == (0, 0, 100, 10)


def test_text_before_coordinates():
    first, second = found("pairs_in_text", "Total(0,0),(500,100)\n5 EUR (10, 20), (30, 40)")
    assert [first.text, second.text] == ["Total", "5 EUR"]
    assert first.box == (0, 0, 100, 10)


def test_text_of_layout_elements():
    text = (
        "<|ref|>title<|/ref|><|det|>[[0, 0, 999, 99]]<|/det|>\n# Hello\n\n<|ref|>text<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>Bye"
    )
    assert [(one.label, one.text) for one in found("ref_det", text)] == [("title", "# Hello"), ("text", "Bye")]
    table = '[{"bbox": [1, 2, 3, 4], "category": "Table", "text": "<table><tr><td>1 &lt; 2</td></tr></table>"}]'
    assert found("resized_json", table)[0].cells == (Cell(0, 0, "1 < 2"),)
    formula = '[{"bbox": [1, 2, 3, 4], "category": "Formula", "text": "\\\\frac{a}{b}"}]'
    assert found("resized_json", formula)[0].text == "\\frac{a}{b}"


def test_the_padding_of_a_page_is_taken_off():
    scale = ImageScale((400, 200), (200, 200))  # shrunk to 200 x 100, 50 columns of padding at each side
    text = "<x_0.25><y_0.1># Title<x_0.75><y_0.5><class_Title><x_0.5><y_0.5>no end"
    (one,) = found("xy_tokens", text, scale)
    assert (one.label, one.text, one.box) == ("Title", "# Title", box(0, 40, 200, 200))
    (small,) = found("xy_tokens", text, ImageScale((100, 100), (200, 200)))  # keeps its size
    assert small.box == box(0, 0, 100, 50)


DOCTAGS = (
    "<doctag><section_header_level_1><loc_0><loc_0><loc_500><loc_50>1 < 2</section_header_level_1>\n"
    "<otsl><loc_0><loc_100><loc_500><loc_200><caption><loc_0><loc_100><loc_500><loc_120>Prices</caption>"
    "<ched>Name<lcel><nl><fcel>cup<fcel>5<nl><ucel><ecel><nl></otsl>\n"
    "<text><loc_0><loc_300><loc_500><loc_400>not closed"
)


def test_doctags():
    header, table, caption, last = found("doctags", DOCTAGS)
    assert [header.label, table.label, caption.label] == ["section_header_level_1", "table", "caption"]
    assert (header.text, caption.text, last.text) == ("1 < 2", "Prices", "not closed")
    assert table.box == (0, 20, 200, 40)
    assert table.cells == (
        Cell(0, 0, "Name", column_span=2, header=True),
        Cell(1, 0, "cup", row_span=2),
        Cell(1, 1, "5"),
        Cell(2, 1, ""),
    )
    (plain,) = found("corner_tokens", "<fcel>a<fcel>b<nl>")
    assert [cell.text for cell in plain.cells] == ["a", "b"]


def test_cells_below_a_cell_of_several_rows():
    rows = '<table><tr><th rowspan="2">a</th><td colspan=2>b</td></tr><tr><td>c</td><td>d</td></tr></table>'
    (one,) = found("ref_det", f"<|ref|>table<|/ref|><|det|>[[0, 0, 1, 1]]<|/det|>{rows}")
    assert [(cell.row, cell.column, cell.text) for cell in one.cells] == [(0, 0, "a"), (0, 1, "b"), (1, 1, "c"), (1, 2, "d")]
    assert one.cells[0].header


MALFORMED = [
    "", "No cup {here}, [1, 2] and <point>.", '{"bbox_2d": [1, 2, 3]}', '{"bbox_2d": [1, NaN, 3, 1e999]}', '{"bbox_2d": "a"}',
    '{"bbox_2d": [true, 1, 2, 3], "label": 5}', '{"bbox_2d": [' + "9" * 5000 + ", 1, 2, 3]}", "{" * 5000, '{"a":' * 5000,
    "[" * 100_000, "<box>[[1, 2]]</box>", "<ref>", "<|det|><|ref|><|/det|>", "<loc0001><loc0002>", '<point x="1">', "</text>",
    "<text><loc_1><loc_2>", "<x_0.1><y_0.1><class_Text>", "<|LOC_1|><|LOC_2|>", "<lcel><ucel><nl><xcel>", "(1,2),(3",
    '<td rowspan="9999" colspan="9999">' * 3,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_malformed_text_never_raises(form):
    for text in MALFORMED:
        assert all(one.box is None or one.box == (0, 0, 0, 0) for one in found(form, text) if not one.cells), text


@pytest.mark.parametrize("form", FORMATS)
def test_the_number_of_elements_is_bounded(form):
    whole = next((text for name, text, *_ in BOXES if name == form), "a(1,2),(3,4)")
    assert len(found(form, whole * (MAX_ELEMENTS + 5))) <= MAX_ELEMENTS


def test_answers_about_several_images_have_none():
    text = '{"bbox_2d": [1, 2, 3, 4]}'
    assert found("box_tokens", text)
    assert not found("box_tokens", text, SCALE, SCALE)
    assert not MarkedText("box_tokens", text).elements()


def test_content_of_several_boxes_is_read_once(monkeypatch):
    """Its text and cells belong to the first box, so that an answer of many boxes and a large table stays small."""
    read = []
    monkeypatch.setattr(tagged, "read_table", lambda text, real=tagged.read_table: read.append(text) or real(text))
    boxes, table = ", ".join(["[1, 2, 3, 4]"] * 400), "<table><tr>" + "<td>a</td>" * 50 + "</tr></table>"
    first, *others = found("ref_det", f"<|ref|>table<|/ref|><|det|>[{boxes}]<|/det|>{table}")
    assert (len(first.cells), first.text, len(others)) == (50, table, 399)
    assert not any(one.cells or one.text for one in others)
    assert sum(map(len, read)) == len(table)


def test_the_cells_and_labels_of_an_answer_are_bounded():
    table = "<|det|>1, 2, 3, 4<|/det|><table>" + "<td>" * (MAX_CELLS // 2 + 5)
    answer = found("ref_det", f"<|ref|>{'long ' * 200}<|/ref|>{table * 3}")
    assert [len(one.cells) for one in answer] == [MAX_CELLS // 2 + 5, MAX_CELLS // 2 - 5, 0]
    assert {len(one.label) for one in answer} == {MAX_LABEL}


def test_many_small_tables_of_large_cells_cover_little():
    """Each table ends before its cells of several rows cover more slots than its text could fill."""
    (one,) = found("ref_det", "<|det|>1, 2, 3, 4<|/det|>" + '<td rowspan="99" colspan="99">' * 100)
    assert len(one.cells) == 2
    (one,) = found("ref_det", "<|det|>1, 2, 3, 4<|/det|>" + '<td rowspan="9">' * 100)
    assert len(one.cells) == 100


BOX = "<|det|>1, 2, 3, 4<|/det|>"
POINT = '<point x="10.0" y="20.5">cup</point>'
POINTING = '<point mention="cup">(1,2)</point>'
HOSTILE = [
    ("ref_det", f"{BOX}<td colspan= ", f"><|ref|>cup<|/ref|>{BOX}"),
    ("ref_det", f"{BOX}<td colspan ", f"><|ref|>cup<|/ref|>{BOX}"),
    ("point_tags", '<point x=" ', f">{POINT}"),
    ("point_tags", "<point x1", f">{POINT}"),
    ("pointing_tags", "<point mention=  ", f">{POINTING}"),
    ("pointing_tags", "<collection>", POINTING),
    ("pointing_tags", "<polygon>(1,2)", POINTING),
    ("doctags", "<a", "><cup><loc_50><loc_100><loc_150><loc_200></cup>"),
    ("xy_tokens", "<x_0.1><y_0.1><class_a", "><x_0.1><y_0.1>text<x_0.2><y_0.2><class_cup>"),
    ("point_groups", '<points coords="\t', '1 1 100 205">cup</points>'),
    ("point_groups", '<points coords=";\n', '1 1 100 205">cup</points>'),
    ("point_groups", '<points coords=";;', '1 1 100 205">cup</points>'),
    ("point_groups", '<points coords="1 ', ';1 1 100 205">cup</points>'),
]


@pytest.mark.parametrize(("form", "start", "end"), HOSTILE)
def test_work_is_linear_in_the_answer(form, start, end):
    """The last character of `start` fills the answer. The cup after it is found; a quadratic search would not end."""
    assert found(form, start.ljust(MAX_CHARACTERS - len(end), start[-1]) + end)[-1].label == "cup"


@pytest.mark.parametrize("between", ["", "\t", "\t\t", " \t", "\t ", ":\n", "; ", ", \t\n"])
def test_whitespace_before_a_group(between):
    separator = between or ";"
    places = found("point_groups", f'<points coords="{between}1 1 100 205{separator}1 2 300 400">cup</points>')
    assert [one.track for one in places] == [1, 2]


def test_text_is_decoded_on_access():
    def fail():
        raise KeyError(7)

    decoded = []
    lazy = MarkedText("box_tokens", lambda: decoded.append(1) or '{"bbox_2d": [1, 2, 3, 4]}', (SCALE,))
    assert not decoded
    assert len(lazy.elements()) == 1
    assert pickle.loads(pickle.dumps(lazy)).elements() == lazy.elements()
    assert MarkedText("box_tokens", fail, (SCALE,)).elements() == ()


def test_a_page_ends_where_its_resize_ends() -> None:
    """A page of 2560 x 3000 becomes 1664 x 1949: the height is 1949.99... before it is cut off."""
    text = "<x_0.0><y_0.023925781>End<x_1.0><y_0.975585937><class_Text>"
    (found,) = MarkedText("xy_tokens", text, (ImageScale((3000, 2560), (2048, 1664)),)).elements()
    assert found.box == pytest.approx((0, 0, 2560, 3000), abs=0.01)
