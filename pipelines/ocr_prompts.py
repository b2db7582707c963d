"""Prompts that document models were trained with, by the name that `LLM.ocr(question=...)` takes.

Sources: the publishers' toolkits (olmocr, mineru-vl-utils, dots.ocr, Dolphin-v2, glmocr) and model cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..callers.errors import InputError
from .two_steps import TWO_STEPS


@dataclass(frozen=True)
class OcrPrompt:
    """A prompt beside one image. `text_first`: the text is before the image.

    `system`: the system message, None for none. An empty one matters to templates that write a token after it.
    `template_kwargs`: variables that make the chat template write control tokens; texts cannot contain any.
    """

    text: str
    text_first: bool = False
    system: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def messages(self, image: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the conversation for the content part of an image."""
        parts = [image, {"type": "text", "text": self.text}]
        user = {"role": "user", "content": parts[::-1] if self.text_first else parts}
        return [{"role": "system", "content": self.system}, user] if self.system is not None else [user]


_OLMOCR = """\
Attached is one page of a document that you must process. Just return the plain text representation of this document as if you \
were reading it naturally. Convert equations to LateX and tables to HTML.
If there are any figures or charts, label them with the following markdown syntax \
![Alt text describing the contents of the figure](page_startx_starty_width_height.png)
Return your output as markdown, with a front matter section on top specifying values for the primary_language, \
is_rotation_valid, rotation_correction, is_table, and is_diagram parameters."""
_DOTS = """\
Please output the layout information from the PDF image, including each layout element's bbox, its category, and the \
corresponding text content within the bbox.

1. Bbox format: [x1, y1, x2, y2]

2. Layout Categories: The possible categories are ['Caption', 'Footnote', 'Formula', 'List-item', 'Page-footer', \
'Page-header', 'Picture', 'Section-header', 'Table', 'Text', 'Title'].

3. Text Extraction & Formatting Rules:
    - Picture: For the 'Picture' category, the text field should be omitted.
    - Formula: Format its text as LaTeX.
    - Table: Format its text as HTML.
    - All Others (Text, Title, etc.): Format their text as Markdown.

4. Constraints:
    - The output text must be the original text from the image, with no translation.
    - All layout elements must be sorted according to human reading order.

5. Final Output: The entire output must be a single JSON object.
"""
_SYSTEM = "You are a helpful assistant."

PROMPTS: Mapping[str, OcrPrompt] = {
    "deepseek-grounding": OcrPrompt("Convert the document to markdown. ", template_kwargs={"grounding": True}),
    "docling": OcrPrompt("Convert this page to docling."),
    "dolphin-code": OcrPrompt("Read code in the image."),
    "dolphin-formula": OcrPrompt("Read formula in the image."),
    "dolphin-layout": OcrPrompt("Parse the reading order of this document."),
    "dolphin-table": OcrPrompt("Parse the table in the image."),
    "dolphin-text": OcrPrompt("Read text in the image."),
    "dots-layout": OcrPrompt(_DOTS),
    "glm-formula": OcrPrompt("Formula Recognition:"),
    "glm-table": OcrPrompt("Table Recognition:"),
    "glm-text": OcrPrompt("Text Recognition:"),
    "hunyuan-spotting": OcrPrompt("检测并识别图片中的文字，将文本坐标格式化输出。", system=""),
    "mineru-formula": OcrPrompt("\nFormula Recognition:", system=_SYSTEM),
    "mineru-layout": OcrPrompt("\nLayout Detection:", system=_SYSTEM),
    "mineru-table": OcrPrompt("\nTable Recognition:", system=_SYSTEM),
    "mineru-text": OcrPrompt("\nText Recognition:", system=_SYSTEM),
    "olmocr": OcrPrompt(_OLMOCR, text_first=True),
    "paddleocr-chart": OcrPrompt("Chart Recognition:"),
    "paddleocr-formula": OcrPrompt("Formula Recognition:"),
    "paddleocr-table": OcrPrompt("Table Recognition:"),
    "paddleocr-text": OcrPrompt("OCR:"),
    "unlimited-parsing": OcrPrompt("document parsing."),
}


def find_prompt(question: str, trained: Sequence[str]) -> OcrPrompt:
    """Return the prompt of a name, or the question itself.

    Args:
        trained: names of the prompts that the model was trained with.

    Raises:
        InputError: the name is that of another prompt, or of a reading in two steps.
    """
    if question in TWO_STEPS:
        names = ", ".join(sorted(TWO_STEPS[question].names))
        reason = f"<<param=>>{question!r} reads a page with several prompts, which only read does"
        raise InputError(f"{reason}; give one of these prompts: {names}", param="question")
    if question in PROMPTS and question not in trained:
        how = f"give one of {', '.join(trained)}, or a question" if trained else "give a question"
        reason = f"<<param=>>{question!r} names a prompt that models of this architecture were not trained with"
        raise InputError(f"{reason}; {how}", param="question")
    return PROMPTS.get(question, OcrPrompt(question))
