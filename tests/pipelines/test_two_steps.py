"""Pages that a model reads in two steps: regions of scripted answers in the publishers' forms, and random checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import build_checkpoint
from PIL import Image, ImageDraw
from scripted_model import ScriptedModel
from sensorium import LLM
from sensorium.callers.errors import ErrorInfo, InputError
from sensorium.engine.elements import Element
from sensorium.mm.media.page_facts import PageFacts, TextLine
from sensorium.mm.media.policy import DEFAULT_POLICY
from sensorium.pipelines.documents import readers, region_reader
from sensorium.pipelines.documents.blocks import Block, Line, PageRecord
from sensorium.pipelines.documents.options import ReadOptions
from sensorium.pipelines.documents.page_task import PageTask
from sensorium.pipelines.documents.readers import ModelReader
from sensorium.pipelines.documents.regions import layout_regions, region_picture
from sensorium.pipelines.documents.stop import StopSignal
from sensorium.pipelines.ocr_prompts import PROMPTS
from sensorium.pipelines.two_steps import TWO_STEPS, find_two_steps

WIDTH, HEIGHT = 1000, 800
MINERU = {
    "\nLayout Detection:": (
        "<|box_start|>100 050 900 100<|box_end|><|ref_start|>title<|ref_end|><|rotate_up|>\n"
        "<|box_start|>100 200 900 400<|box_end|><|ref_start|>table<|ref_end|><|rotate_up|>\n"
        "<|box_start|>110 210 300 300<|box_end|><|ref_start|>text<|ref_end|><|rotate_up|>\n"
        "<|box_start|>050 500 950 990<|box_end|><|ref_start|>list<|ref_end|><|rotate_up|>\n"
        "<|box_start|>100 500 200 700<|box_end|><|ref_start|>text<|ref_end|><|rotate_right|>\n"
        "<|box_start|>300 500 900 600<|box_end|><|ref_start|>equation<|ref_end|><|rotate_up|>\n"
        "<|box_start|>300 700 900 900<|box_end|><|ref_start|>image<|ref_end|><|rotate_up|>\n"
        "<|box_start|>300 910 900 950<|box_end|><|ref_start|>aside_text<|ref_end|><|rotate_up|><|im_end|>"
    ),
    "\nText Recognition:": ["Annual report", "turned text", "[Non-Text]"],
    "\nTable Recognition:": "<fcel>a<fcel>b<nl><fcel>1<fcel>2<nl><|im_end|>",
    "\nFormula Recognition:": "\\[\nE = mc^2\n\\]",
}
DOLPHIN = {
    "Parse the reading order of this document.": (
        "[100,40,900,80][sec_0][PAIR_SEP][100,160,900,320][tab][PAIR_SEP][100,400,900,480][para][author][RELATION_SEP]"
        "[100,560,900,720][fig][PAIR_SEP][100,740,900,790][fnote]"
    ),
    "Read text in the image.": ["Title", "A paragraph", "a note"],
    "Parse the table in the image.": "<table><tr><td>a</td><td>b</td></tr></table>",
}


def mineru(answers: dict[str, Any] = MINERU) -> ScriptedModel:
    return ScriptedModel(answers, [name for name in PROMPTS if name.startswith("mineru")], "box_tokens", (HEIGHT, WIDTH))


def dolphin(answers: dict[str, Any] = DOLPHIN) -> ScriptedModel:
    names = [name for name in PROMPTS if name.startswith("dolphin")]
    return ScriptedModel(answers, names, "resized_json", (HEIGHT, WIDTH), (HEIGHT, WIDTH))


class FakeLinesReader:
    """Stands for the reader of printed lines."""

    digest, pages = "lines 1", 0

    def read(self, pages: Sequence[PageTask], policy: Any, stop: StopSignal) -> list[PageRecord]:
        self.pages += 1
        title, words = Line("Printed title", (50, 20, 450, 40)), Line("Printed words", (50, 200, 450, 240))
        blocks = (
            Block("heading", title.text, (50, 20, 450, 40), (title,), level=2),
            Block("table", "", (50, 80, 450, 160)),
            Block("paragraph", words.text, (50, 200, 450, 240), (words,)),
        )
        return [page.record(blocks) for page in pages]

    def line_length(self, *args: object) -> float:
        return 1e6


@pytest.fixture
def page() -> PageTask:
    """A picture of a page with marks, at two pixels a point."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    ImageDraw.Draw(image).rectangle((100, 400, 199, 559), fill="red")
    file = BytesIO()
    image.save(file, "PNG")
    return PageTask(file.getvalue(), 1, PageFacts(WIDTH / 2, HEIGHT / 2, marks=100), "reading", "", 2.0)


def read(
    model: ScriptedModel, question: str, page: PageTask, lines: FakeLinesReader | None, monkeypatch: pytest.MonkeyPatch
) -> PageRecord:
    monkeypatch.setattr(readers, "find_lines_reader", lambda name: lines)
    reader = ModelReader(model, ReadOptions(question=question, max_tokens=64), run=model.run)  # type: ignore[arg-type]
    (record,) = reader.read([page], DEFAULT_POLICY, StopSignal())
    return record


def shape(record: PageRecord) -> list[tuple[str, str, Any]]:
    return [(block.kind, block.text, block.box) for block in record.blocks]


def test_mineru(page: PageTask, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mineru()
    record = read(model, "mineru-two-step", page, None, monkeypatch)
    assert shape(record) == [
        ("heading", "Annual report", (50, 20, 450, 40)),
        ("table", "a\tb\n1\t2", (50, 80, 450, 160)),
        ("paragraph", "turned text", (50, 200, 100, 280)),
        ("formula", "E = mc^2", (150, 200, 450, 240)),
        ("picture", "", (150, 280, 450, 360)),
    ]
    assert (record.error, record.doubt, record.blocks[0].model) == (None, None, "scripted")
    layout, *regions = model.requests
    assert (layout[1]["resized_height"], layout[1]["resized_width"]) == (1036, 1036)
    assert [prompt.split()[0] for prompt, _ in regions] == ["Text", "Table", "Text", "Formula", "Text"]
    sizes = [part["image"].size for _, part in regions]
    assert sizes == [(800, 40), (800, 160), (160, 100), (600, 80), (600, 32)]  # the third is turned by a quarter
    assert [params.presence_penalty for params in model.params] == [0, 1, 1, 1, 1, 1]
    assert [params.frequency_penalty for params in model.params] == [0, 0.05, 0.005, 0.05, 0.05, 0.05]


def test_dolphin(page: PageTask, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dolphin()
    record = read(model, "dolphin-two-step", page, None, monkeypatch)
    assert [(kind, text) for kind, text, _ in shape(record)] == [
        ("heading", "Title"), ("table", "a\tb"), ("paragraph", "A paragraph"), ("picture", ""), ("footnote", "a note"),
    ]  # fmt: skip
    assert record.blocks[1].box == (50, 80, 450, 160)
    assert (model.requests[0][1]["resized_height"], model.requests[0][1]["resized_width"]) == (HEIGHT, WIDTH)
    steps = TWO_STEPS["dolphin-two-step"]
    assert steps.layout_size is not None
    assert [steps.layout_size(*size) for size in ((2200, 1700), (3200, 20))] == [(1600, 1236), (4480, 28)]


@pytest.mark.parametrize(
    "layout",
    [
        "I see a photograph.",
        "[0,0,900,700][distorted_page]",
        "[0,0,900,700][para][PAIR_SEP][10,10,900,700][para][PAIR_SEP][0,710,900,790][para]",
    ],
)
def test_a_page_without_a_layout_is_read_in_one_piece(layout: str, page: PageTask, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"Parse the reading order of this document.": layout, "Read text in the image.": "All of it"}
    model = dolphin(answers)
    record = read(model, "dolphin-two-step", page, None, monkeypatch)
    assert [(kind, text) for kind, text, _ in shape(record)] == [("paragraph", "All of it")]


@pytest.mark.parametrize(("question", "first"), [("paddleocr-two-step", "OCR:"), ("glm-two-step", "Text Recognition:")])
def test_regions_of_printed_lines(question: str, first: str, page: PageTask, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {first: ["Title", "words"], "Table Recognition:": "<fcel>a<nl>"}
    model, lines = ScriptedModel(answers, list(PROMPTS)), FakeLinesReader()
    record = read(model, question, page, lines, monkeypatch)
    assert [(block.kind, block.level, block.text) for block in record.blocks] == [
        ("heading", 2, "Title"), ("table", 0, "a"), ("paragraph", 0, "words"),
    ]  # fmt: skip
    assert [prompt for prompt, _ in model.requests] == [first, "Table Recognition:", first]
    assert model.drafts == ["Printed title", "", "Printed words"]
    assert [params.repetition_penalty for params in model.params] == [1.1 if "glm" in question else 1.0] * 3
    with pytest.raises(InputError) as caught:
        read(model, question, page, None, monkeypatch)
    assert (caught.value.info.code, caught.value.info.param) == ("unsupported", "question")


@pytest.mark.parametrize(("has_layer", "device"), [(True, "cpu"), (False, "cpu"), (False, "cuda")])
def test_drafts_of_regions(has_layer: bool, device: str, page: PageTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the lines of the text layer, or the printed lines on a CPU, which are read once. The layout has none."""
    model, lines = (
        mineru(),
        FakeLinesReader(),
    )
    model.config.torch_device.type = device
    text = (TextLine("a title of the layer", (60, 22, 200, 38), 12.0),)
    facts = PageFacts(WIDTH / 2, HEIGHT / 2, num_chars=20, lines=text) if has_layer else page.facts
    task = PageTask(page.data, 1, facts, "reading", "", 2.0)
    assert not read(model, "mineru-two-step", task, lines, monkeypatch).error
    expected = {(True, "cpu"): "a title of the layer", (False, "cpu"): "Printed title", (False, "cuda"): ""}
    assert model.drafts == ["", expected[has_layer, device], "", "", "", ""]
    assert lines.pages == (not has_layer and device == "cpu")


@pytest.mark.parametrize("prompt", ["\nLayout Detection:", "\nTable Recognition:"])
def test_an_error_of_a_step_is_the_error_of_its_page(prompt: str, page: PageTask, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mineru()
    model.errors[prompt] = ErrorInfo("out_of_memory", "too little memory", modality="image", index=0)
    record = read(model, "mineru-two-step", page, None, monkeypatch)
    assert record.error == ErrorInfo("out_of_memory", "too little memory")
    assert record.blocks == ()


def test_answers_that_end_badly_are_doubted(page: PageTask, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {**MINERU, "\nText Recognition:": ["I cannot read this image.", "b", "c"]}
    model = mineru(answers)
    assert read(model, "mineru-two-step", page, None, monkeypatch).doubt


def test_regions_that_are_not_read() -> None:
    def region(label: str, *box: float) -> Element:
        return Element(label, box=box)  # type: ignore[arg-type]

    text, table = region("text", 0, 0, 10, 10), region("table", 0, 20, 100, 60)
    steps = TWO_STEPS["mineru-two-step"]
    given = [text, text, table, region("text", 1, 21, 99, 30), region("text", 0, 50, 100, 90), region("list", 0, 0, 99, 99)]
    assert layout_regions([*given, Element("text"), region("text", 5, 5, 5, 9)], steps) == [text, table, given[4]]


@pytest.mark.parametrize(
    ("box", "size"),
    [((0, 0, 100, 50), (100, 50)), ((0, 0, 700, 7), (1400, 28)), ((5, 5, 9, 7), (56, 28)), ((990, 790, 2000, 2000), (28, 28))],
)
def test_pictures_of_regions(box: tuple[int, int, int, int], size: tuple[int, int]) -> None:
    picture = region_picture(np.zeros((800, 1000, 3), np.uint8), Element("text", box=box))
    assert picture is not None
    assert picture.size == size
    assert region_picture(np.zeros((800, 1000, 3), np.uint8), Element("text", box=(1000, 0, 1200, 9))) is None


def test_names_need_their_prompts() -> None:
    for name, steps in TWO_STEPS.items():
        assert steps.names <= PROMPTS.keys()
        assert find_two_steps(name, sorted(steps.names)) is steps
        with pytest.raises(InputError) as caught:
            find_two_steps(name, ["olmocr"])
        assert caught.value.info.param == "question"
    assert find_two_steps("Read the text.", ()) is None


@pytest.mark.parametrize(("family", "question"), [("qwen2_vl", "mineru-two-step"), ("qwen2_5_vl", "dolphin-two-step")])
def test_a_random_checkpoint(
    family: str, question: str, page: PageTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layout has no regions, so the page is read in one piece; then with regions in place of those of the layout."""
    monkeypatch.setattr(readers, "find_lines_reader", lambda name: None)
    with LLM(build_checkpoint(tmp_path, family), max_model_len=2048, dtype="float32") as llm:
        files = [page.data, page.data[:200]]
        whole, broken = llm.read(files, question=question, max_tokens=8, use_tqdm=False)
        boxes = {"title": (0, 0, 900, 100), "table": (0, 100, 900, 300), "fig": (0, 300, 900, 600), "text": (0, 600, 900, 700)}
        regions = [Element(label, box=box) for label, box in boxes.items()]
        monkeypatch.setattr(region_reader, "layout_regions", lambda elements, steps: regions)
        (parts,) = llm.read(page.data, question=question, max_tokens=8, use_tqdm=False)
        with pytest.raises(InputError) as caught:
            llm.ocr(page.data, question=question)
    assert caught.value.info.param == "question"
    assert [(record.way, record.error) for record in (*whole.pages, *parts.pages)] == [("reading", None)] * 2
    assert {block.box for block in whole.pages[0].blocks} == {(0, 0, WIDTH, HEIGHT)}
    assert {block.box for block in parts.pages[0].blocks} == set(boxes.values())
    assert whole.pages[0].doubt
    assert len(broken.failed) == 1
