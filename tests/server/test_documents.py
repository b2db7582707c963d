"""/v1/documents on the shipped model."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading

import httpx
import pytest
from http_server import TINY, listening
from pdf_files import text_pdf
from PIL import Image
from sensorium.server.config import ServerConfig
from sensorium.server.endpoints import documents
from sensorium.server.state import Server
from waiting import assert_idle, wait_until

pypdfium2 = pytest.importorskip("pypdfium2")
LINE = TINY.parent / "media" / "line1.png"
ANSWER = json.loads((LINE.parent / "answers.json").read_text("utf-8"))["line1.png"]["answer"]
PDF = text_pdf([["# Title", "the text of the first page"], ["the text of the second page"]])


def post(http, data, name="a.pdf", **fields):
    return http.post("/v1/documents", files={"file": (name, data)}, data=fields)


def events(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = [part for part in response.text.split("\n\n") if part.startswith("event: ")]
    return [json.loads(part.split("data: ", 1)[1]) for part in parts]


def scan(pages):
    page, file = Image.open(LINE).convert("RGB"), io.BytesIO()
    page.save(file, "tiff", save_all=True, append_images=[page] * (pages - 1))
    return file.getvalue()


def test_json(http):
    found = post(http, PDF).json()
    assert (found["object"], found["model"], found["filename"], found["page_count"]) == ("document", "tiny-vl", "a.pdf", 2)
    assert [page["way"] for page in found["pages"]] == ["text_layer"] * 2
    assert [block["text"] for block in found["pages"][0]["blocks"]] == ["Title", "the text of the first page"]
    assert found["pages"][1]["blocks"][0]["box"] == pytest.approx([30, 28.66, 174.77, 42.69], abs=0.1)
    assert found["failed_pages"] == []


def test_markdown_and_text(http):
    response = post(http, PDF, response_format="md", pages="1")
    assert response.headers["content-type"] == "text/markdown; charset=utf-8"
    assert response.text == "<!-- page 1 -->\n\n# Title\n\nthe text of the first page\n"
    assert post(http, PDF, response_format="txt").text == "Title\n\nthe text of the first page\n\fthe text of the second page\n"


@pytest.mark.parametrize(
    ("name", "content_type", "start"),
    [
        ("html", "text/html", "<!DOCTYPE html>"),
        ("csv", "text/csv", ""),
        ("docling", "application/json", "{"),
        ("hocr", "application/xhtml+xml", "<?xml"),
        ("alto", "application/xml", "<?xml"),
    ],
)
def test_other_formats(http, name, content_type, start):
    response = post(http, PDF, response_format=name)
    assert response.headers["content-type"].partition(";")[0] == content_type
    assert response.headers["content-security-policy"] == "sandbox"
    assert response.text.startswith(start)
    assert ("Title" in response.text) is (name != "csv")  # the document has no table


def pages_of(data):
    """Return the texts and the sizes of the pages of a PDF."""
    with pypdfium2.PdfDocument(data) as pdf:
        return [(page.get_textpage().get_text_bounded(), page.get_size()) for page in pdf]


def test_searchable_pdfs(http):
    response = post(http, LINE.read_bytes(), "line.png", response_format="pdf")
    assert response.headers["content-type"] == "application/pdf"
    ((text, size),) = pages_of(response.content)
    with Image.open(LINE) as picture:
        assert (" ".join(text.split()), size) == (" ".join(ANSWER.split()), picture.size)
    assert pages_of(post(http, PDF, response_format="pdf").content) == pages_of(PDF)  # text layers get no second text


def test_searchable_pdfs_in_json_and_events_are_base64(http):
    fields = {"include[]": "pdf", "text_layer": "never", "max_tokens": "4"}
    document = post(http, LINE.read_bytes(), "line.png", **fields).json()
    assert base64.b64decode(document["contents"]["pdf"]).startswith(b"%PDF-")
    *_, done = events(post(http, PDF, stream="true", response_format="pdf"))
    assert pages_of(base64.b64decode(done["document"]["content"])) == pages_of(PDF)


def test_no_searchable_pdf_is_made_of_text(http):
    response = post(http, b"# A title\n\nSome text.\n", "a.md", response_format="pdf")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported")
    streamed = post(http, b"# A title\n\nSome text.\n", "a.md", response_format="pdf", stream="true").text
    assert json.loads(streamed.rpartition("data: ")[2])["error"]["code"] == "unsupported"


def test_a_format_that_cannot_be_made_leaves_the_others(http):
    document = post(http, b"# A title\n\nSome text.\n", "a.md", **{"include[]": ["txt", "pdf"]}).json()
    assert (document["pages"][0]["blocks"][0]["text"], list(document["contents"])) == ("A title", ["txt"])
    assert {name: error["code"] for name, error in document["content_errors"].items()} == {"pdf": "unsupported"}


def test_the_model_reads_pictures(http):
    assert post(http, LINE.read_bytes(), "line.png", response_format="txt").text == f"{ANSWER}\n"
    (page,) = post(http, text_pdf([["a page"]]), text_layer="never", max_tokens="2").json()["pages"]
    assert (page["way"], page["blocks"][0]["source"] if page["blocks"] else "model") == ("draft", "model")


def test_events(http):
    found = events(post(http, scan(3), "a.tiff", stream="true", response_format="txt"))
    assert [event["type"] for event in found] == ["document.page.done"] * 3 + ["document.done"]
    assert sorted(event["page"] for event in found[:3]) == [1, 2, 3]
    assert [(event["pages_done"], event["page_count"], event["way"]) for event in found[:3]] == [
        (n, 3, "reading") for n in (1, 2, 3)
    ]
    assert found[3]["document"]["content"] == "\f".join([f"{ANSWER}\n"] * 3)
    (page, done) = events(post(http, PDF, stream="true", pages="2"))
    assert (page["page"], page["page_count"], done["document"]["pages"][0]["page"]) == (2, 1, 2)


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize(
    ("data", "fields", "code", "param"),
    [
        (b"%PDF-1.7", {}, "invalid_media", None),
        (b"no\0picture", {}, "invalid_media", None),
        (PDF, {"pages": "9"}, "over_limit", "pages"),
        (PDF, {"pages": "x"}, "invalid_value", "pages"),
        (PDF, {"pages": ",".join(["1"] * 4096)}, "invalid_input", "pages"),
        (PDF, {"response_format": "docx"}, "invalid_input", "response_format"),
        (b"%PDF-1.7", {"response_format": "pdf"}, "invalid_media", None),
        (PDF, {"max_tokens": "0"}, "invalid_input", "max_tokens"),
        (PDF, {"model": "other"}, "model_not_found", "model"),
    ],
)
def test_errors(http, data, fields, code, param, stream):
    response = post(http, data, **fields, stream=stream)
    error = response.json()["error"]
    assert (response.status_code in (400, 404), error["code"], error["param"]) == (True, code, param)


def test_errors_show_the_beginning_of_a_long_value(http):
    error = post(http, PDF, pages=",".join(["9"] * 2000)).json()["error"]
    assert (error["code"], error["param"], error["message"].count("9,") < 110) == ("over_limit", "pages", True)


def test_a_page_that_fails_is_named(http):
    found = post(http, LINE.read_bytes()[:300], "a.png").json()
    assert (found["failed_pages"], found["pages"][0]["error"]["code"]) == ([1], "invalid_input")
    assert http.post("/v1/documents", data={"pages": "1"}).status_code in (400, 415)


def test_limits_on_pages(tiny):
    server = tiny[1]
    limited = Server(server.llm, ServerConfig(max_document_pages=1), "tiny-vl")
    with listening(limited) as url, httpx.Client(base_url=url, timeout=240) as http:
        error = post(http, PDF).json()["error"]
        assert (error["code"], error["param"]) == ("over_limit", "max_document_pages")
        assert "max_pages" not in error["message"]
        assert post(http, text_pdf([["one"]]), response_format="txt").text == "one\n"


def test_limits_on_characters(tiny):
    server = tiny[1]
    limited = Server(server.llm, ServerConfig(max_document_characters=100), "tiny-vl")
    pdf = text_pdf([["one", "two"], ["three", "four"], []])
    with listening(limited) as url, httpx.Client(base_url=url, timeout=240) as http:
        found = post(http, pdf).json()
        assert (found["failed_pages"], found["pages"][1]["error"]["code"]) == ([2], "over_limit")
        assert post(http, pdf, pages="2-").json()["failed_pages"] == []


def test_large_answers_are_written_in_threads(http, monkeypatch):
    """The event loop does not stand still meanwhile."""
    loops = []

    def note(function):
        def call(*args):
            loops.append(asyncio._get_running_loop())
            return function(*args)

        return call

    monkeypatch.setattr(documents.JSONResponse, "render", note(documents.JSONResponse.render))
    monkeypatch.setattr(documents, "to_event", note(documents.to_event))
    assert post(http, PDF).json()["page_count"] == 2
    assert events(post(http, PDF, stream="true"))[-1]["type"] == "document.done"
    assert loops == [None, None]


def test_reading_stops_when_the_client_leaves(tiny, monkeypatch):
    url, server = tiny
    begun, request = [], server.engine.request
    monkeypatch.setattr(server.engine, "request", lambda *args, **options: begun.append(None) or request(*args, **options))
    with (
        httpx.Client(base_url=url, timeout=240) as http,
        http.stream("POST", "/v1/documents", files={"file": ("a.tiff", scan(100))}, data={"stream": "true"}) as response,
    ):
        assert next(line for line in response.iter_lines() if line.startswith("event: ")) == "event: document.page.done"
    wait_until(lambda: not any(thread.name.startswith("sensorium-pages") for thread in threading.enumerate()))
    number = len(begun)
    assert 0 < number < 100
    assert_idle(server.llm)
    assert len(begun) == number


def test_the_document_describes_the_form(http):
    operation = http.get("/openapi.json").json()["paths"]["/v1/documents"]["post"]
    form = operation["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert {"file", "response_format", "pages", "stream"} <= form["properties"].keys()
    assert {"application/json", "text/markdown", "text/event-stream"} <= operation["responses"]["200"]["content"].keys()


def picture(event):
    kind, text = event["image"].split(",")
    assert kind == "data:image/jpeg;base64"
    return Image.open(io.BytesIO(base64.b64decode(text)))


def test_events_have_the_pictures_of_pages_on_request(http):
    first, second, _ = events(post(http, PDF, stream="true", page_image_size="200"))
    assert [picture(event).size for event in (first, second)] == [(200, 150)] * 2
    assert first["image_error"] is None
    dark = [min(picture(event).convert("L").getdata()) for event in (first, second)]
    assert max(dark) < 128, "the text is drawn"
    page, _ = events(post(http, scan(1), "a.tiff", stream="true", page_image_size="64"))
    with Image.open(LINE) as line:
        width, height = line.size
    assert picture(page).size == (64, round(64 * height / width))
    assert "image" not in events(post(http, PDF, stream="true"))[0]


def test_pages_without_a_picture_say_why(http):
    text, _ = events(post(http, b"# A heading\n\nand some text", "a.md", stream="true", page_image_size="200"))
    assert (text["image"], text["image_error"], text["error"]) == (None, None, None)
    broken, _ = events(post(http, LINE.read_bytes()[:300], "a.png", stream="true", page_image_size="200"))
    assert (broken["image"], broken["image_error"]["code"], broken["error"]["code"]) == (None, "invalid_input", "invalid_input")


def test_one_reading_gives_several_formats(http):
    data = {"include[]": ["md", "txt"]}
    found = http.post("/v1/documents", files={"file": ("a.pdf", PDF)}, data=data).json()
    assert found["contents"] == {name: post(http, PDF, response_format=name).text for name in ("md", "txt")}
    assert len(found["pages"]) == 2
    assert "contents" not in post(http, PDF).json()


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"page_image_size": "200"}, "invalid_value", "page_image_size"),
        ({"page_image_size": "63", "stream": "true"}, "invalid_input", "page_image_size"),
        ({"page_image_size": "2049", "stream": "true"}, "invalid_input", "page_image_size"),
        ({"include[]": ["md"], "response_format": "md"}, "invalid_value", "include"),
        ({"include[]": ["docx"]}, "invalid_input", "include[0]"),
        ({"response_format": "docx"}, "invalid_input", "response_format"),
    ],
)
def test_errors_of_pictures_and_formats(http, fields, code, param):
    response = post(http, PDF, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)


def test_pictures_need_the_key(tiny):
    with listening(Server(tiny[1].llm, ServerConfig(api_key="secret"), "tiny-vl")) as url, httpx.Client(base_url=url) as http:
        assert post(http, PDF, stream="true", page_image_size="200").status_code == 401
