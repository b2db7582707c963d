"""Images to text, through the model's chat template."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ..engine.sampling_params import SamplingParams
from ..engine.types import RequestOutput
from ..mm.errors import ErrorInfo
from ..mm.media.pdf import share_files
from .doubt import TextResult, with_logprobs
from .message_parts import media_part
from .ocr_prompts import OcrPrompt, find_prompt
from .tasks import Task, error_of_task
from .validation import as_items, check_type

if TYPE_CHECKING:
    from ..engine.llm import LLM

QUESTION = "Read the text."


@dataclass(frozen=True, repr=False)
class Page(TextResult):
    """The text of one image. `doubt` says why it is probably wrong; good pages have None there.

    Args:
        text: empty if there is an error.
        error: why there is no text, or None.
        output: the request's output, with tokens and timings.
    """

    text: str
    error: ErrorInfo | None
    output: RequestOutput = field(repr=False)

    min_avg_logprob: ClassVar[float] = -0.5


def ocr_tasks(
    llm: LLM,
    images: object,
    question: str = QUESTION,
    max_tokens: int | None = 1024,
    sampling_params: SamplingParams | None = None,
    chat_template: str | os.PathLike[str] | None = None,
) -> list[Task[Page]]:
    """Return one task per image, in order; they run as one batch. An image that fails gives a Page with `error`.

    Args:
        images: an image or a list of images: paths, URLs, encoded bytes, PIL images, pixels, or `Media` of one of these. The
            pages of a local PDF, one after the other, read the file once.
        question: the prompt beside each image; models trained for OCR document the one that suits them best. A key of
            `ocr_prompts.PROMPTS` stands for that prompt, if models of the architecture know it (`llm.ocr_prompts`).
        max_tokens: maximum number of tokens per image; ignored if `sampling_params` are given.
        sampling_params: None for greedy sampling.
        chat_template: replaces the checkpoint's, as in `LLM.chat`.

    Raises:
        InputError: an argument has a wrong type. The task raises it if the checkpoint has no chat template.
    """
    items = as_items("images", images, "image")
    check_type("question", question, str)
    check_type("chat_template", chat_template, str, os.PathLike, type(None))
    check_type("sampling_params", sampling_params, SamplingParams, type(None))
    prompt = find_prompt(question, llm.ocr_prompts)
    params = with_logprobs(sampling_params or SamplingParams(temperature=0.0, max_tokens=max_tokens))
    return [_ocr_task(llm, i, image, prompt, params, chat_template) for i, image in enumerate(share_files(items))]


def _ocr_task(
    llm: LLM, index: int, image: object, prompt: OcrPrompt, params: SamplingParams, template: str | os.PathLike[str] | None
) -> Task[Page]:
    messages = prompt.messages(media_part("image", image))
    output = yield llm.request(messages, params, chat_template=template, chat_template_kwargs=prompt.template_kwargs)
    error = error_of_task(output, index)
    return Page("" if error else output.outputs[0].text.strip(), error, output)
