"""Documents on the page at `/` in headless Chromium."""

from __future__ import annotations

import base64
import io
import json

import httpx
import pytest
from http_server import MEDIA
from pdf_files import text_pdf
from PIL import Image
from waiting import assert_idle, wait_until

pypdfium2 = pytest.importorskip("pypdfium2")
pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
PDF = text_pdf([["# Title", "the text of the first page"], ["the text of the second page", "and a last page"]])
HOSTILE = "<img src=x onerror=hacked=1><script>hacked=1</script>"


def drop(page, name, data, kind="application/pdf"):
    script = """([name, text, type]) => {
        const files = new DataTransfer();
        files.items.add(new File([Uint8Array.from(atob(text), (one) => one.charCodeAt(0))], name, { type }));
        document.dispatchEvent(new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true }));
    }"""
    page.evaluate(script, [name, base64.b64encode(data).decode(), kind])


def texts(page, selector):
    return page.locator(selector).all_inner_texts()


def saved(page, name):
    with page.expect_download() as download:
        page.get_by_role("button", name=name, exact=True).click()
    return download.value.suggested_filename, download.value.path().read_bytes()


def test_a_pdf_is_dropped_read_and_shown(page, tiny):
    drop(page, "a b.pdf", PDF)
    page.locator(".block-box").first.wait_for()
    assert texts(page, ".thumbs button > span:nth-child(2)") == ["1", "2"]
    image = page.locator(".sheet img")
    assert image.evaluate("(one) => one.decode().then(() => [one.naturalWidth, one.naturalHeight])") == [1400, 1050]
    assert page.locator(".blocks h3").inner_text() == "Title"
    assert [text.split()[0] for text in texts(page, ".kinds li")] == ["heading", "paragraph"]
    colors = [
        page.locator(f".{part}").first.evaluate(f"(one) => getComputedStyle(one).{value}")
        for part, value in (("block-box", "stroke"), ("kinds .swatch", "backgroundColor"))
    ]
    assert colors[0] == colors[1]
    paragraph = page.locator(".block").nth(1)
    assert paragraph.inner_text() == "the text of the first page"
    box, frame = page.locator(".block-box").nth(1), page.locator(".sheet .frame").bounding_box()
    (found,) = [block["box"] for block in read(tiny, "json")["pages"][0]["blocks"] if block["order"] == 1]
    assert (box.bounding_box()["x"] - frame["x"]) / frame["width"] == pytest.approx(found[0] / 400, abs=0.01)
    box.hover()
    assert "over" in paragraph.get_attribute("class").split()
    box.click()
    assert paragraph.evaluate("(one) => one === document.activeElement && one.classList.contains('chosen')")
    paragraph.press("Home")
    assert "chosen" in page.locator(".block-box").first.get_attribute("class").split()
    page.locator(".thumbs button").first.press("ArrowDown")
    assert texts(page, ".block")[0] == "the text of the second page and a last page"
    assert page.locator(".thumbs [aria-current=page]").get_attribute("aria-label") == "Page 2"
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


def read(tiny, output_format):
    response = httpx.post(
        f"{tiny[0]}/v1/documents", files={"file": ("a b.pdf", PDF)}, data={"response_format": output_format}, timeout=240
    )
    return response.json() if output_format == "json" else response.content


def texts_of_pdf(data):
    with pypdfium2.PdfDocument(data) as pdf:
        return [page.get_textpage().get_text_bounded() for page in pdf]


def test_a_document_is_searched_saved_and_kept(page, tiny):
    page.set_input_files("#choose", files=[{"name": "a b.pdf", "mimeType": "application/pdf", "buffer": PDF}])
    page.locator(".block-box").first.wait_for()
    query, found = page.get_by_label("Search all pages"), page.locator(".search output")
    query.fill("  PAGE ")
    query.press("Enter")
    assert (found.inner_text(), texts(page, "mark")) == ("1 of 3 on 2 pages", ["page"])
    assert page.locator(".thumbs button").evaluate_all("(all) => all.map((one) => one.dataset.hits)") == ["1", "2"]
    page.get_by_role("button", name="Next", exact=True).click()
    assert (found.inner_text(), texts(page, "mark"), texts(page, "mark.now")) == ("2 of 3 on 2 pages", ["page"] * 2, ["page"])
    assert page.locator(".block-box.hit").count() == 1
    query.press("Shift+Enter")
    query.press("Shift+Enter")
    assert found.inner_text() == "3 of 3 on 2 pages"
    query.fill("no such (word")
    page.locator(".search output", has_text="no hits").wait_for()
    assert page.locator("mark").count() == 0
    assert saved(page, "md") == ("a b.md", read(tiny, "md"))
    assert saved(page, "txt") == ("a b.txt", read(tiny, "txt"))
    name, data = saved(page, "pdf")
    assert (name, texts_of_pdf(data)) == ("a b.pdf", texts_of_pdf(PDF))
    name, text = saved(page, "json")
    assert (name, json.loads(text)["pages"]) == ("a b.json", read(tiny, "json")["pages"])
    wait_until(lambda: page.evaluate("import('/page/history.js').then(({ all }) => all()).then((kept) => kept.length)"))
    page.reload()
    page.locator("#model", has_text="tiny-vl").wait_for()
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name="a b.pdf", exact=True).click()
    page.locator(".block-box").first.wait_for()
    assert page.locator(".thumbs img").count() == 2
    assert texts_of_pdf(saved(page, "pdf")[1]) == texts_of_pdf(PDF)
    page.get_by_role("button", name="Ask about it").click()
    page.get_by_role("button", name="Remove a b.pdf").wait_for()


def test_a_searchable_pdf_of_a_scan_is_saved(page):
    """The model has read the text of the PDF, which the TIFF does not have."""
    line, file = Image.open(MEDIA / "line1.png").convert("RGB"), io.BytesIO()
    line.save(file, "tiff")
    drop(page, "a.tiff", file.getvalue(), "image/tiff")
    page.locator(".block").first.wait_for()
    name, data = saved(page, "pdf")
    (text,) = texts_of_pdf(data)
    assert (name, text.split()) == ("a.pdf", page.locator(".block").first.inner_text().split())


def jpeg(size):
    file = io.BytesIO()
    Image.new("RGB", size, "white").save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def block(order, kind, text, box=(10, 10, 90, 30), **fields):
    return {"order": order, "kind": kind, "text": text, "text_format": "plain", "box": box, **fields}


def record(number, *blocks, **fields):
    page = {
        "page": number,
        "size": [100, 200],
        "way": "reading",
        "reason": "it has no text layer",
        "error": None,
        "doubt": None,
    }
    return page | {"blocks": blocks} | fields


CELLS = [
    {"row": 0, "column": 0, "text": HOSTILE, "header": True, "row_span": 1, "column_span": 2},
    {"row": 1, "column": 0, "text": "one", "header": False, "row_span": 1, "column_span": 1},
    {"row": 1, "column": 1, "text": "two", "header": False, "row_span": 1, "column_span": 1},
]
ERROR = {"code": "invalid_input", "message": f"broken {HOSTILE}"}
BLOCKS = [
    block(0, "paragraph", f"**{HOSTILE}** [a](javascript:hacked=1) one", text_format="markdown"),
    block(1, "table", "", cells=CELLS),
    block(2, "picture", "", box=None),
]
RECORDS = [
    record(1, *BLOCKS, doubt=f"noisy {HOSTILE}"),
    record(2, error=ERROR),
    record(3, way="blank", reason="it shows no marks"),
]


def answer_with(page, records):
    """Let the server answer with these pages."""
    events = []
    for index, one in enumerate(reversed(records)):  # pages may end in any order
        event = {"type": "document.page.done", "pages_done": index + 1, "page_count": len(records)}
        picture = {"image": None if one["error"] else jpeg((100, 200)), "image_error": one["error"]}
        events.append(event | picture | {name: one[name] for name in ("page", "way", "error")})
    document = {"id": "doc-1", "object": "document", "pages": records, "contents": {"md": HOSTILE, "txt": HOSTILE}}
    document["content_errors"] = {"pdf": ERROR}
    events.append({"type": "document.done", "document": document})
    text = ": waiting\n\n" + "".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events)
    page.route("**/v1/documents", lambda route: route.fulfill(body=text, content_type="text/event-stream"))


def test_pages_say_what_is_wrong_and_nothing_of_them_runs(page):
    answer_with(page, RECORDS)
    drop(page, f"{HOSTILE[:28]}.pdf", PDF)
    page.locator(".block").first.wait_for()
    assert page.locator(".thumbs button").evaluate_all("(all) => all.map((one) => one.ariaLabel)") == [
        "Page 1, doubted",
        "Page 2, not read",
        "Page 3, blank",
    ]
    assert page.locator(".thumbs [aria-current=page]").get_attribute("aria-label") == "Page 1, doubted"
    assert HOSTILE in page.locator(".doubt").inner_text()
    assert page.get_by_text("There is no searchable PDF: broken").inner_text().endswith(HOSTILE)
    assert page.get_by_role("button", name="pdf", exact=True).count() == 0
    assert page.locator(".block strong").inner_text() == HOSTILE
    assert page.locator(".block-box").count() == 2
    assert texts(page, ".block th") == [HOSTILE]
    assert page.locator(".block th").evaluate("(cell) => cell.colSpan") == 2
    page.get_by_label("Search all pages").fill("one")
    page.locator(".search output", has_text="of 4").wait_for()
    page.get_by_label("Search all pages").fill("onetwo")
    page.locator(".search output", has_text="no hits").wait_for()
    page.get_by_label("Page 2").click()
    assert HOSTILE in page.locator(".facts-of-page .wrong").inner_text()
    assert HOSTILE in page.locator(".sheet .wrong").inner_text()
    page.get_by_label("Page 3").click()
    assert page.locator(".facts-of-page").inner_text() == "Blank page: it shows no marks."
    assert page.locator(".document :is(script, a, img[src='x'])").count() == 0
    assert page.evaluate("typeof hacked") == "undefined"


def test_a_text_file_has_no_pictures_and_stays_text(page):
    drop(page, "a.md", f"# {HOSTILE}\n\n[a](javascript:hacked=1) text".encode(), "text/markdown")
    page.locator(".block").first.wait_for()
    assert page.locator(".document :is(img, script, a[href^=javascript])").count() == 0
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator(".sheet .frame .quiet").count() == 1
    assert page.get_by_role("button", name="pdf", exact=True).count() == 0
    assert page.get_by_text("There is no searchable PDF").count() == 0


def test_reading_is_stopped(page, tiny):
    line, file = Image.open(MEDIA / "line1.png").convert("RGB"), io.BytesIO()
    line.save(file, "tiff", save_all=True, append_images=[line] * 99)
    drop(page, "a.tiff", file.getvalue(), "image/tiff")
    page.locator(".thumbs img").first.wait_for()
    page.get_by_role("button", name="Stop").click()
    page.locator(".document .wrong", has_text="Stopped.").wait_for()
    done, total = page.locator(".progress span").inner_text().split(" pages")[0].split(" of ")
    assert 0 < int(done) < int(total) == 100
    assert int(done) == page.locator(".thumbs button").count()
    assert page.locator(".search").is_hidden()
    wait_until(lambda: not tiny[1].llm.llm.engine.loop._names)
    assert_idle(tiny[1].llm.llm)


def test_a_narrow_page_has_one_column(open_page, tiny):
    page = open_page(tiny[0], viewport={"width": 390, "height": 800})
    page.locator("#model", has_text="tiny-vl").wait_for()
    answer_with(page, RECORDS)
    drop(page, "a.pdf", PDF)
    page.locator(".block").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    place = "(all) => all.map((one) => one.getBoundingClientRect()).map(({ left, top }) => [left, top])"
    lefts, tops = zip(*page.locator(".panes > *").evaluate_all(place), strict=True)
    assert len(set(lefts)) == 1
    assert list(tops) == sorted(set(tops))


def test_a_server_without_documents_takes_pdfs_as_images(page, tiny):
    served = httpx.get(f"{tiny[0]}/v1/models").json()
    served["data"][0]["capabilities"]["documents"] = False
    page.route("**/v1/models", lambda route: route.fulfill(json=served))
    page.reload()
    page.locator("#model", has_text="tiny-vl").wait_for()
    assert page.locator("#documents").is_hidden()
    drop(page, "a.pdf", PDF)
    page.get_by_role("button", name="Remove a.pdf").wait_for()
    drop(page, "a.txt", b"text", "text/plain")
    assert page.get_by_role("alert").inner_text() == "a.txt is not an image, video, audio file or PDF."
    assert page.locator(".document").count() == 0
