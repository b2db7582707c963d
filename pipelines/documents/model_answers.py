"""Reads from the answers of models about pages what they have beside their text: tokens, errors, doubts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...callers.errors import ErrorInfo, SensoriumError, error_reason, is_out_of_memory
from ...mm.media.pdf import holds_pictures, is_pdf
from ...mm.media.policy import PdfFile, page_of
from .page_task import PageTask

if TYPE_CHECKING:
    from ..ocr import Page

FINISH_DOUBTS = {"length": "it was cut off at the token limit", "repetition": "it repeats itself, and was ended"}
"""The doubts about answers with these finish reasons."""


def model_name(path: str) -> str:
    """Return the last part of a model's path or id."""
    return path.rstrip("/").rpartition("/")[2]


def tokens_of(result: Page) -> list[tuple[str, float]]:
    """Return the text and the log probability of each token of an answer."""
    answer = result.output.outputs[0]
    steps = zip(answer.token_ids, answer.logprobs or (), strict=False)
    return [(step[token].decoded_token or "", step[token].logprob) for token, step in steps if token in step]


def error_of(result: Page) -> ErrorInfo:
    """Return the error of an answer as that of its page: without the number of the image in the prompt."""
    assert result.error is not None
    return replace(result.error.without_item(), modality=None, index=None)


def info_of(error: Exception) -> ErrorInfo:
    """Return any exception as the reason for which a page has no text."""
    if isinstance(error, SensoriumError):
        return error.info
    return ErrorInfo("out_of_memory" if is_out_of_memory(error) else "internal", error_reason(error))


def image_of(page: PageTask) -> object:
    """Return a page as an image of a prompt."""
    has_pages = is_pdf(page.data) or holds_pictures(page.data)
    return page_of(PdfFile(page.data), page.number) if has_pages else page.data
