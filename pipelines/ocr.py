"""Pictures to the text that is written in them, through a model's own chat template. Knows no family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..engine.sampling_params import SamplingParams
from ..engine.types import RequestOutput
from ..mm.parse import is_several
from .asking import Asking
from .parts import media_part
from .wishes import check

if TYPE_CHECKING:
    from ..engine.llm import LLM

QUESTION = "Read the text."


@dataclass(frozen=True)
class Page:
    """What is written in one picture, or in `error` why there is no text. `output`: the answer as the engine gave it.

    `finish_reason`: of the answer; "length" of a text that is cut off where no more tokens are allowed.
    """

    text: str
    error: str | None
    output: RequestOutput

    @property
    def finish_reason(self) -> str | None:
        return self.output.outputs[0].finish_reason


def pages(
    llm: LLM,
    pictures: object,
    question: str = QUESTION,
    max_tokens: int | None = 1024,
    sampling_params: SamplingParams | None = None,
    chat_template: str | None = None,
) -> list[Asking[Page]]:
    """Read one picture or a list of them, in one batch, in the order given. A picture that cannot be read has an error.

    Args:
        pictures: each a path, URL, encoded bytes, PIL image, pixels, or a `Media` of one of these.
        question: what the model is asked of each; models trained for reading have one that suits them best.
        max_tokens: of each answer, where `sampling_params` (None: greedy) are not given.
        chat_template: Jinja source instead of the checkpoint's own.

    Raises:
        InputError: an argument of another type and, as the first job is asked for, a checkpoint without a chat template.
    """
    check("question", question, str)
    check("chat_template", chat_template, str, type(None))
    check("sampling_params", sampling_params, SamplingParams, type(None))
    given: Sequence[object] = list(pictures) if is_several("image", pictures) else [pictures]  # type: ignore[call-overload]
    params = sampling_params or SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [_page(llm, picture, question, params, chat_template) for picture in given]


def _page(llm: LLM, picture: object, question: str, params: SamplingParams, template: str | None) -> Asking[Page]:
    content = [media_part("image", picture), {"type": "text", "text": question}]
    output = yield llm.job([{"role": "user", "content": content}], params, chat_template=template)
    return Page("" if output.error else output.outputs[0].text.strip(), output.error, output)
