"""Words an error for clients of the server: its advice, and the field of the argument at fault."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..callers.errors import ErrorInfo
from ..callers.wording import ADVICE

_ADVICE: Mapping[str, str] = {
    "beam_search": "set use_beam_search for n beams",
    "change_template": "start the server with another --chat-template",
    "check_url": "check the URL, or send a data: URL",
    "convert_audio": "convert it to WAV or FLAC",
    "fetch_yourself": "fetch it yourself and send a data: URL",
    "give_bytes_or_allow": "send a data: URL, or see media: allow_private_hosts",
    "give_data": "as a data: URL",
    "give_item": "send sound to /v1/audio/transcriptions, or other media in messages to /v1/chat/completions",
    "give_pdf": "give it in a part of type file",
    "give_template": "start the server with --chat-template",
    "give_template_or_prompt": "start the server with --chat-template, or send a rendered prompt to /v1/completions",
    "give_url": "give one, or a data: URL",
    "give_url_or_path": "give http, https, or data URLs",
    "items_in_messages": 'put each item into its message, as in {"type": "image_url", "image_url": {"url": "data:..."}}',
    "load_whole": "start the server without --parts encoder",
    "media_on_gpu": "`sensorium serve --media-device cuda` processes them on a GPU",
    "score_needs_one_class": "/score needs one; use /classify",
    "shrink_item": 'make it smaller (max_pixels, fps, num_frames of mm_processor_kwargs) or send fit="context"',
    "transcribe_or_prompt": "send audio to /v1/audio/transcriptions",
    "translation": "translation",
    "use_chat": "use /v1/chat/completions or /v1/completions",
    "use_classify": "use /classify",
    "use_embed": "use /v1/embeddings",
    "use_encode": "use LLM.encode in Python",
    "use_pooling": "use /v1/embeddings or /score",
    "use_score": "use /score",
    "use_score_or_logits": "use /score or /v1/embeddings",
    "use_token_classify": "no endpoint returns classes of tokens",
    "vector_length": "vectors always have length 1",
    "wake_up": "send the request again when GET /ready answers 200",
    "word_times": "timestamp_granularities[]=word with response_format=verbose_json gives the times of words",
}
_WORDS = {**ADVICE, **_ADVICE, "multi_modal_data": "the request", "max_pages": "--max-document-pages of the server"}
_OF_PYTHON = {
    **{"None": "null", "True": "true", "False": "false", "a NoneType": "null"},
    **{"an int": "an integer", "a float": "a number", "a str": "a string", "a dict": "an object", "a bool": "a boolean"},
}
_PYTHON = re.compile(
    r"""(?<!\w)'(?:[^'\\]|\\.)*'|(?<!\w)"(?:[^"\\]|\\.)*" """.strip()
    + rf"|\b(?:{'|'.join(_OF_PYTHON)})\b"
    + r"|(?P<sign>-?)\b2\*\*(?P<power>\d{1,2})\b(?P<less> - 1)?"
)
"""Texts in quotes, and Python's words outside of them."""
_FIELDS = {
    "multi_modal_data": "prompt",
    "prompt_token_ids": "prompt",
    "limit_mm_per_prompt": "messages",
    "task": "model",  # of /v1/audio/translations
    "max_pages": "max_document_pages",  # of the server's configuration
}
"""Parameters that a request over HTTP, or the server, has by another name."""


def in_json(text: str) -> str:
    """Return a message with JSON's words and whole numbers in place of Python's. Values in quotes stay as they are."""

    def word(match: re.Match[str]) -> str:
        if match["sign"] is not None:
            number = 2 ** int(match["power"])
            return str((-number if match["sign"] else number) - (1 if match["less"] else 0))
        return _OF_PYTHON.get(match[0], match[0])

    return _PYTHON.sub(word, text)


def message_of(info: ErrorInfo) -> str:
    """Return an error's message in the words of the server."""
    return info.worded(_WORDS)


def field_of(param: str | None) -> str | None:
    """Return the field over HTTP of a parameter at fault."""
    return param if param is None else _FIELDS.get(param, param)
