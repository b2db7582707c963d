"""The text layer of a PDF's page is the draft of `ocr`: same answers, and what cannot be read is no draft."""

import numpy as np
import pytest
from pdf_files import pdf_of, stream
from PIL import Image
from sensorium import LLM, PdfPage
from sensorium.callers.errors import InputError
from sensorium.engine.drafts.depth import StepCosts
from sensorium.mm.media.pdf import pdf_pages, text_layer
from sensorium.mm.media.policy import MediaPolicy

pytest.importorskip("pypdfium2")


def page_of(lines, size=(300, 80)):
    """Return a PDF of one page with these lines in Helvetica."""
    shown = "".join(f"BT /F1 18 Tf 10 {size[1] - 24 - 22 * i} Td ({line}) Tj ET\n" for i, line in enumerate(lines))
    return pdf_of(
        {
            1: "<< /Type /Catalog /Pages 2 0 R >>",
            2: "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            3: f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {size[0]} {size[1]}] /Contents 4 0 R "
            "/Resources << /Font << /F1 5 0 R >> >> >>",
            4: stream("", shown),
            5: "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        }
    )


def test_the_text_of_a_page(tmp_path):
    data = page_of(["first line", "second line"])
    (tmp_path / "page.pdf").write_bytes(data)
    for file in (data, tmp_path / "page.pdf", str(tmp_path / "page.pdf")):
        assert text_layer(PdfPage(file, 1), MediaPolicy()).split("\n") == ["first line", "second line"]
    assert text_layer(PdfPage(page_of([]), 1), MediaPolicy()) == ""
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "page.tiff")
    assert text_layer(PdfPage(tmp_path / "page.tiff", 1), MediaPolicy()) == ""


@pytest.mark.parametrize(
    ("page", "limits"),
    [
        (PdfPage(page_of(["a"]), 2), {}),
        (PdfPage(b"%PDF-1.4 broken", 1), {}),
        (PdfPage(page_of(["a"], (30000, 30000)), 1), {}),
        (PdfPage(page_of(["a"]), 1), {"max_bytes": 10}),
    ],
)
def test_the_limits_of_pages_hold(page, limits):
    with pytest.raises(InputError):
        text_layer(page, MediaPolicy(**limits))


def test_the_time_of_all_pages_is_limited():
    (page,) = pdf_pages(page_of(["a"]))
    assert page.opened is not None
    page.opened.clock.add(1000)
    with pytest.raises(InputError, match="max_pages_seconds"):
        text_layer(page, MediaPolicy(max_pages_seconds=900))


def test_ocr_drafts_the_text_of_the_page(monkeypatch):
    data = page_of(["Hello world"], (200, 40))
    with LLM("tiny-vl", dtype="float32", batch_invariant=True, speculative_config={"num_speculative_tokens": 0}) as plain:
        (expected,) = plain.ocr([data])
    assert not expected.error
    assert expected.output.drafts == ()
    with LLM("tiny-vl", dtype="float32", batch_invariant=True) as llm:
        drafter = llm.engine.loop.core.scheduler.drafts.drafter
        drafter.costs, drafter._now = StepCosts((1.0,) * 16), lambda: 0.0
        monkeypatch.setattr("sensorium.pipelines.ocr.text_layer", lambda page, policy, tenant: expected.text)
        (page,) = llm.ocr([data])
        assert page.output.outputs[0].token_ids == expected.output.outputs[0].token_ids
        assert [stats.proposer for stats in page.output.drafts] == ["text"]
        assert page.output.drafts[0].num_accepted > 0

        def fails(page, policy):
            raise InputError("broken")

        monkeypatch.setattr("sensorium.pipelines.ocr.text_layer", fails)
        (page,) = llm.ocr([data])
        assert (page.text, page.error, page.output.drafts) == (expected.text, None, ())
