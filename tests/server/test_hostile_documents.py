"""Broken and harmful files over /v1/documents: each has its text, or an error that says why, and the server goes on."""

from __future__ import annotations

import httpx
import pytest
from hostile_files import FILES, GOOD
from waiting import assert_idle

pytest.importorskip("pypdfium2")
READ = ("text.pdf", "page.pdf", "fields.pdf")  # bytes have no name, and the model reads the page


def test_each_file_has_its_text_or_says_why_not(tiny):
    with httpx.Client(base_url=tiny[0], timeout=240) as http:
        for name, file in FILES.items():
            response = http.post("/v1/documents", files={"file": (name, file.data)}, data={"max_tokens": "4"})
            document = response.json()
            if file.file_error is not None and name not in READ:
                assert (response.status_code, document["error"]["code"]) == (400, file.file_error), name
                continue
            assert response.status_code == 200, name
            (page,) = document["pages"]
            if name not in READ:
                assert (page["error"] and page["error"]["code"]) == file.page_error, name
                assert " ".join(block["text"] for block in page["blocks"]) == (file.text or ""), name
                assert (page["doubt"] is not None) is file.is_doubted, name
        assert http.post("/v1/documents", files={"file": ("good.pdf", GOOD)}).json()["failed_pages"] == []
    assert_idle(tiny[1].llm.llm)
