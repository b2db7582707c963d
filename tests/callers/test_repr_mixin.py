"""`ReprMixin`: a repr of one line for terminals, and escaped HTML tables for notebooks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sensorium.callers.errors import ErrorInfo
from sensorium.callers.repr_mixin import ReprMixin
from sensorium.engine.outputs import CompletionOutput, RequestOutput
from sensorium.mm.types import FramePlan, ItemPlan, Media
from sensorium.pipelines.embed import Embedding
from sensorium.pipelines.ocr import Page

EVIL = "<script>alert('1')</script>\n&amp;"
PLAN = ItemPlan("video", 0, (480, 640), (8, 34, 46), 3000, 3000, 1 << 20, frames=FramePlan((0, 8), (0.0, 0.5), 16, 2.0))
OUTPUT = RequestOutput(
    "7",
    EVIL * 100,
    list(range(5000)),
    [CompletionOutput(0, EVIL, list(range(300)), finish_reason="stop")],
    error=ErrorInfo("invalid_media", EVIL),
    items=(PLAN,) * 50,
    timings={"prefill": 1.0},
)


def test_the_repr_is_short_and_contains_the_answer():
    text = repr(OUTPUT)
    assert len(text) < 1500
    assert "\n" not in text
    assert text.startswith("RequestOutput(request_id='7', prompt=\"<script>")
    assert "prompt_token_ids=<5000 integers>, outputs=[CompletionOutput(index=0, text=" in text
    assert "... 46 more" in text
    assert "ItemPlan(modality='video', index=0, size=(480, 640), grid=(8, 34, 46), num_tokens=3000" in text
    vector = Embedding(torch.zeros(4096), None, OUTPUT)
    assert repr(vector) == "Embedding(vector=<float32 [4096]>)"
    assert repr(Page("TOTAL", None, OUTPUT)) == "Page(text='TOTAL')"
    assert repr(Media("cat.png", max_pixels=9)) == "Media(data='cat.png', max_pixels=9)"


def test_tables_escape_all_text():
    for value in (OUTPUT, Page(EVIL, ErrorInfo("internal", EVIL), OUTPUT)):
        table = value._repr_html_()
        assert "<script" not in table
        assert "&lt;script&gt;alert(" in table
        assert "&amp;amp;" in table
        assert table.count("<table>") == table.count("</table>")
        assert len(table) < 10_000


def test_fields_without_a_value_are_left_out():
    @dataclass(frozen=True, repr=False)
    class Result(ReprMixin):
        text: str = ""
        more: dict[str, int] = field(default_factory=dict)
        hidden: int = field(default=3, repr=False)
        none: str | None = "x"

    assert repr(Result(none=None, hidden=4)) == "Result()"
    assert repr(Result("a" * 500, {"b": 1})) == f"Result(text='{'a' * 79}..., more={{'b': 1}})"
