"""What a page holds: text lines with boxes, doubtful characters, pictures and ink."""

import io

import numpy as np
import pytest
from pdf_files import encrypted_pdf, pdf_of, stream, text_pdf
from PIL import Image, ImageDraw
from sensorium.callers.errors import InputError
from sensorium.mm.media.isolate import run_isolated
from sensorium.mm.media.page_facts import count_marks, page_facts, page_pixels
from sensorium.mm.media.policy import MediaPolicy

pytest.importorskip("pypdfium2")
POLICY = MediaPolicy()


def facts(data, number=1, policy=POLICY):
    (page,) = page_facts(data, [number], policy)
    return page


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_lines_have_the_boxes_that_the_file_gives_them():
    page = facts(text_pdf([["first line", "second line"]]))
    assert [line.text for line in page.lines] == ["first line", "second line"]
    assert (page.width, page.height, page.num_chars) == (400, 300, 19)
    for line, baseline in zip(page.lines, (40, 60), strict=True):
        left, top, right, bottom = line.box
        assert left == pytest.approx(30, abs=1.5)
        assert top < baseline - 5
        assert baseline <= bottom < baseline + 5  # below the baseline are only descenders
        assert 30 + 12 * 2 < right < 30 + 12 * len(line.text)


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_boxes_are_those_of_the_page_as_it_is_shown(rotation):
    data = text_pdf([["Turned"]], page=f"/Rotate {rotation}")
    page = facts(data)
    assert (page.width, page.height) == ((400, 300) if rotation % 180 == 0 else (300, 400))
    left, top, right, bottom = page.lines[0].box
    assert max(right - left, bottom - top) < 60
    dark = np.argwhere(page_pixels(data, 1, MediaPolicy(pdf_dpi=72)).numpy().min(axis=2) < 128)
    assert left - 1 <= dark[:, 1].min() <= dark[:, 1].max() <= right + 1
    assert top - 1 <= dark[:, 0].min() <= dark[:, 0].max() <= bottom + 1


def test_a_crop_box_moves_the_boxes():
    page = facts(text_pdf([["Moved"]], page="/CropBox[20 100 320 290]"))
    assert (page.width, page.height) == (300, 190)
    left, top, _, bottom = page.lines[0].box
    assert left == pytest.approx(10, abs=1.5)
    assert top < 30 <= bottom + 1


def test_a_wide_gap_divides_a_line():
    shown = "BT /F1 12 Tf 30 200 Td (left) Tj 150 0 Td (right part) Tj ET"
    page = facts(_page(shown))
    assert [line.text for line in page.lines] == ["left", "right part"]


def test_hidden_private_and_outside_characters_are_counted():
    assert facts(text_pdf([["hidden text"]], text_mode=3)).invisible
    assert not facts(text_pdf([["shown text"]])).invisible
    outside = facts(_page("BT /F1 12 Tf 30 200 Td (in) Tj 600 0 Td (outside) Tj ET"))
    assert (outside.num_chars, outside.num_outside) == (9, 7)
    private = facts(_page("BT /F1 12 Tf 30 200 Td (abcd) Tj ET", to_unicode="<62> <E123>"))
    assert (private.num_chars, private.num_private) == (4, 1)
    bullet = facts(_page("BT /F1 12 Tf 30 200 Td (b item) Tj ET", to_unicode="<62> <F0B7>"))
    assert (bullet.lines[0].text, bullet.num_private) == ("• item", 0)
    unknown = facts(_page("BT /F1 12 Tf 30 200 Td (abcd) Tj ET", to_unicode="<62> <0007>"))
    assert unknown.num_unprintable == 1


def _page(shown, to_unicode="", resources="", more=None):
    """Return a page of 400 x 300 points. `to_unicode`: another meaning of one code."""
    codes = "1 begincodespacerange <00> <FF> endcodespacerange"
    table = f"/CIDInit /ProcSet findresource begin begincmap {codes}\n1 beginbfchar {to_unicode} endbfchar endcmap end"
    return pdf_of(
        {
            1: "<</Type/Catalog/Pages 2 0 R>>",
            2: "<</Type/Pages/Kids[3 0 R]/Count 1>>",
            3: f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 400 300]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>{resources}>>>>",
            4: stream("", shown),
            5: f"<</Type/Font/Subtype/Type1/BaseFont/Helvetica{'/ToUnicode 6 0 R' if to_unicode else ''}>>",
            6: stream("", table),
            **(more or {}),
        }
    )


def test_pictures_and_marks():
    image = {7: stream("/Type/XObject/Subtype/Image/Width 1/Height 1/ColorSpace/DeviceGray/BitsPerComponent 8", "a")}
    page = facts(_page("q 200 0 0 300 0 0 cm /I Do Q", resources="/XObject<</I 7 0 R>>", more=image))
    assert page.picture_share == pytest.approx(0.5, abs=0.01)
    drawn = facts(_page("BT /F1 12 Tf 30 200 Td (text) Tj ET 20 20 60 5 re f 20 60 60 5 re f 200 20 5 60 re f"))
    assert drawn.marks == 3  # those of the text do not count
    assert facts(_page("")).marks == 0


def test_ink_of_pictures():
    blank = Image.new("L", (600, 800), 250)
    assert facts(png(blank)).marks == 0
    noise = np.random.default_rng(0).normal(245, 4, (800, 600)).clip(0, 255).astype(np.uint8)
    shaded = (noise * np.linspace(0.7, 1, 600)).astype(np.uint8)  # paper in bad light
    assert count_marks(np.stack([shaded] * 3, axis=2), ()) == 0
    shaded[100:103, 100:102] = 0  # dust
    assert count_marks(np.stack([shaded] * 3, axis=2), ()) == 0
    ImageDraw.Draw(blank).text((300, 400), "7", fill=0, font_size=14)
    assert facts(png(blank)).marks == 1
    light = Image.new("L", (600, 800), 20)
    ImageDraw.Draw(light).text((300, 400), "7", fill=255, font_size=14)
    assert facts(png(light)).marks == 1


@pytest.mark.parametrize(("ink", "paper"), [(200, 240), (220, 255), (240, 200)])
@pytest.mark.parametrize(("size", "height"), [((600, 800), 12), ((2480, 3508), 42)])
def test_faint_ink_is_seen(ink, paper, size, height):
    page = Image.new("L", size, paper)
    ImageDraw.Draw(page).text((size[0] // 2, size[1] // 2), "7", fill=ink, font_size=height)
    assert facts(png(page)).marks == 1
    scan = {7: stream(f"/Type/XObject/Subtype/Image/Width 600/Height 800{_GREY}", _shown_words(ink, paper))}
    drawn = facts(_page("q 300 0 0 300 0 0 cm /I Do Q", resources="/XObject<</I 7 0 R>>", more=scan))
    assert drawn.marks > 0


_GREY = "/ColorSpace/DeviceGray/BitsPerComponent 8"


def _shown_words(ink, paper):
    page = Image.new("L", (600, 800), paper)
    ImageDraw.Draw(page).text((100, 400), "Words of a page", fill=ink, font_size=30)
    return page.tobytes().decode("latin-1")


@pytest.mark.parametrize("deviation", [0, 2, 4])
@pytest.mark.parametrize("quality", [None, 30, 75])
def test_scans_of_blank_pages(deviation, quality):
    noise = np.random.default_rng(0).normal(0, deviation, (800, 600)) + np.linspace(200, 245, 600)  # paper in bad light
    page = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
    file = io.BytesIO()
    page.save(file, "PNG" if quality is None else "JPEG", quality=quality or 75)
    assert facts(file.getvalue()).marks == 0
    dusty = page.copy()
    dusty.paste(0, (100, 100, 102, 103))
    assert facts(png(dusty)).marks == 0


def test_a_long_text_layer_is_cut(monkeypatch):
    monkeypatch.setattr("sensorium.mm.media.page_facts.MAX_CHARS", 5)
    page = facts(text_pdf([["first line"]]))
    assert ([line.text for line in page.lines], page.num_cut) == (["first"], 5)
    monkeypatch.setattr("sensorium.mm.media.page_facts.MAX_CHARS", 10)
    assert facts(text_pdf([["first line"]])).num_cut == 0


def test_pages_run_in_a_codec_worker():
    data = text_pdf([["one"], ["two"], []])
    pages = run_isolated(page_facts, data, [1, 2, 3], POLICY)
    assert [[line.text for line in page.lines] for page in pages] == [["one"], ["two"], []]
    assert [page.marks for page in pages] == [0, 0, 0]


@pytest.mark.parametrize(
    ("data", "number", "policy"),
    [
        (text_pdf([["a"]]), 2, POLICY),
        (encrypted_pdf(b"secret"), 1, POLICY),
        (b"%PDF-1.4 broken", 1, POLICY),
        (b"\0 no picture", 1, POLICY),
        (text_pdf([["a"]], size=(30000, 30000)), 1, POLICY),
        (text_pdf([["a"]]), 1, MediaPolicy(max_decoded_bytes=1000)),
    ],
)
def test_the_limits_of_pages_hold(data, number, policy):
    with pytest.raises(InputError):
        page_facts(data, [number], policy)
