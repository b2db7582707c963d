"""How models read a page in two steps: one request finds its regions, then a request of its own reads each region.

Sources: the publishers' programs: mineru-vl-utils (`two_step_extract`), Dolphin-v2 (`demo_page.py`), PaddleX (the pipeline
PaddleOCR-VL) and glmocr (`config.yaml`). The last two find regions with a detection model of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..callers.errors import InputError


@dataclass(frozen=True)
class TwoSteps:
    """How a model reads a page in two steps.

    Args:
        layout: name of the prompt that finds regions (see `ocr_prompts.PROMPTS`); None: the reader of printed lines finds them.
        prompts: names of the prompts that read a region, by the kind of its block. Other kinds have that of "paragraph".
        layout_size: from the height and width of a page, returns those at which the layout prompt gets it; None: unchanged.
        penalties: sampling parameters of the regions of a kind; other kinds have those of "paragraph".
        containers: labels of regions that consist of others, which are left out.
        most_overlapping: share of the regions that may overlap; with more, the page is read in one piece. None: all of them.
    """

    layout: str | None
    prompts: Mapping[str, str]
    layout_size: Callable[[int, int], tuple[int, int]] | None = None
    penalties: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    containers: tuple[str, ...] = ()
    most_overlapping: float | None = None

    @property
    def names(self) -> set[str]:
        """The names of all prompts."""
        return {*self.prompts.values(), *([] if self.layout is None else [self.layout])}


def _mineru_size(height: int, width: int) -> tuple[int, int]:
    return 1036, 1036


def _dolphin_size(height: int, width: int) -> tuple[int, int]:
    """Return a size whose sides are at most 1600 and at least 28 pixels."""
    scale = min(1.0, 1600 / max(height, width))
    scale *= max(1.0, 28 / max(scale * min(height, width), 1e-6))
    return max(int(height * scale), 28), max(int(width * scale), 28)


_PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 0.05}

TWO_STEPS: Mapping[str, TwoSteps] = {
    "dolphin-two-step": TwoSteps(
        "dolphin-layout",
        {"paragraph": "dolphin-text", "table": "dolphin-table", "formula": "dolphin-formula", "code": "dolphin-code"},
        layout_size=_dolphin_size,
        most_overlapping=0.25,
    ),
    "glm-two-step": TwoSteps(
        None,
        {"paragraph": "glm-text", "table": "glm-table", "formula": "glm-formula"},
        penalties={"paragraph": {"repetition_penalty": 1.1}},
    ),
    "mineru-two-step": TwoSteps(
        "mineru-layout",
        {"paragraph": "mineru-text", "table": "mineru-table", "formula": "mineru-formula"},
        layout_size=_mineru_size,
        penalties={"paragraph": _PENALTIES, "table": {**_PENALTIES, "frequency_penalty": 0.005}},
        containers=("list", "equation_block", "image_block", "inline_formula"),
    ),
    "paddleocr-two-step": TwoSteps(
        None, {"paragraph": "paddleocr-text", "table": "paddleocr-table", "formula": "paddleocr-formula"}
    ),
}
"""Names that `read` takes as its question."""


def find_two_steps(question: str, trained: Sequence[str]) -> TwoSteps | None:
    """Return the two steps that a question names; None for any other question.

    Args:
        trained: names of the prompts that the model was trained with.

    Raises:
        InputError: the model was not trained with these prompts.
    """
    two_steps = TWO_STEPS.get(question)
    if two_steps is None or two_steps.names <= set(trained):
        return two_steps
    known = [name for name, other in TWO_STEPS.items() if other.names <= set(trained)]
    how = f"give {' or '.join(known)}, or a question" if known else "give a question"
    reason = f"<<param=>>{question!r} names prompts that models of this architecture were not trained with"
    raise InputError(f"{reason}; {how}", param="question")
