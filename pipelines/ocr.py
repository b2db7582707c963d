"""Images to text, through the model's chat template."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..callers.errors import ErrorInfo, InputError, media_error
from ..engine.frontend.request import RequestInput
from ..engine.frontend.request_handle import RequestHandle
from ..engine.outputs import RequestOutput
from ..engine.sampling_params import SamplingParams
from ..mm.media.pdf import share_files, text_layer
from ..mm.media.policy import PdfPage
from ..mm.tenants import tenant_of
from ..mm.types import Media
from .doubt import TextResult, with_logprobs
from .embed import request_options
from .files import NamedItem, images_and_pages
from .message_parts import media_part
from .ocr_prompts import OcrPrompt, find_prompt
from .run import Task, answer, error_of_task
from .validation import as_items, check_type

if TYPE_CHECKING:
    from ..engine.engine import Engine

QUESTION = "Read the text."


@dataclass(frozen=True, repr=False)
class Page(TextResult):
    """The text of one image. `doubt` says why it is probably wrong; good pages have None there.

    Args:
        text: empty if there is an error.
        error: why there is no text, or None.
        output: the request's output, with tokens and timings.
        source: the path or URL of the image, with "#page=N" for a page of a PDF. Bytes and pixels have no path.
    """

    text: str
    error: ErrorInfo | None
    output: RequestOutput = field(repr=False)
    source: str = ""

    min_avg_logprob: ClassVar[float] = -0.5


@dataclass(frozen=True)
class OcrOptions:
    """Options of `ocr`.

    Args:
        question: the prompt beside each image; models trained for OCR document the one that suits them best. A key of
            `ocr_prompts.PROMPTS` stands for that prompt, if models of the architecture know it (`llm.ocr_prompts`).
        max_tokens: maximum number of tokens per image; ignored if `sampling_params` are given.
        sampling_params: None for greedy sampling.
        chat_template: replaces the checkpoint's, as in `LLM.chat`.
        cache_salt: requests with different salts share no cache.

    Raises:
        InputError: an option has a wrong type.
    """

    question: str = QUESTION
    max_tokens: int | None = 1024
    sampling_params: SamplingParams | None = None
    chat_template: str | os.PathLike[str] | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        check_type("question", self.question, str)
        check_type("chat_template", self.chat_template, str, os.PathLike, type(None))
        check_type("sampling_params", self.sampling_params, SamplingParams, type(None))
        check_type("cache_salt", self.cache_salt, str, type(None))

    @property
    def params(self) -> SamplingParams:
        return with_logprobs(self.sampling_params or SamplingParams(temperature=0.0, max_tokens=self.max_tokens))


ReadDraft = Callable[[], str]
"""Returns the probable answer about an image. It runs in a thread of the input queue. If it fails, there is no draft."""


@dataclass(frozen=True)
class _ImageTask:
    """An image to be read. `read_draft`: None if the draft is the text layer of a page, or if there is none."""

    index: int
    item: NamedItem
    read_draft: ReadDraft | None


def ocr_tasks(
    engine: Engine, images: object, options: OcrOptions, read_drafts: Sequence[ReadDraft | None] = ()
) -> list[Task[Page]]:
    """Return one task per image or page, in order; they run as one batch. One that fails gives a Page with `error`.

    Args:
        images: an image or a list of images: paths, URLs, encoded bytes, PIL images, pixels, or `Media` of one of these. A
            PDF gives each of its pages; a folder or a pattern such as "scans/*.png" gives its images and the pages of its
            PDFs, by name. The pages of a local PDF, one after the other, read the file once.
        read_drafts: a function per image that returns its draft; no image may have several pages then. With () or None, the
            text layer of a page is its draft.

    Raises:
        InputError: there is no image, or the question names another model's prompt. The task raises it if the checkpoint has
            no chat template.
    """
    items = as_items("images", images, "image")
    prompt, params = find_prompt(options.question, engine.ocr_prompts), options.params
    named = list(images_and_pages(items, engine.config.media))
    shared = share_files(item.item for item in named)
    pages = (NamedItem(item.source, image) for item, image in zip(named, shared, strict=True))
    drafts = read_drafts or repeat(None, len(named))
    image_tasks = [_ImageTask(index, page, draft) for index, (page, draft) in enumerate(zip(pages, drafts, strict=True))]
    return [partial(_read_page, engine, image_task, prompt, params, options) for image_task in image_tasks]


async def _read_page(
    engine: Engine, image_task: _ImageTask, prompt: OcrPrompt, params: SamplingParams, options: OcrOptions
) -> Page:
    index, item = image_task.index, image_task.item
    if issubclass(type(item.item), InputError):  # not isinstance: the class of a broken item may not be readable
        request = RequestHandle(RequestInput(partial(_raise, media_error(item.item, "image", index)), params))  # type: ignore[arg-type]
    else:
        messages = prompt.messages(media_part("image", item.item))
        chosen = request_options(options.chat_template, options.cache_salt)
        request = engine.request(messages, params, chat_template_kwargs=prompt.template_kwargs, **chosen)
        page, draft = item.item.data if isinstance(item.item, Media) else item.item, image_task.read_draft
        if isinstance(page, PdfPage) and draft is None:  # a right draft saves steps
            draft = partial(text_layer, page, engine.config.media, tenant_of(options.cache_salt))
        if draft is not None and not engine.stats.no_drafts:
            request.input = replace(request.input, read_draft=draft)
    output = await answer(request)
    error = error_of_task(output, index)
    return Page("" if error else output.outputs[0].text.strip(), error, output, item.source)


def _raise(error: Any) -> NoReturn:
    raise error
