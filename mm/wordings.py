"""Replaces advice for Python in error messages by what a client of the server or a user of the command line can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Interface = Literal["http", "cli"]

_PHRASES: Mapping[str, Mapping[Interface, str]] = {
    "call transcribe, or give a rendered prompt": {
        "http": "send audio to /v1/audio/transcriptions",
        "cli": "use `sensorium transcribe`",
    },
    "pass chat_template= or give a rendered prompt": {
        "http": "start the server with --chat-template, or send a rendered prompt to /v1/completions",
        "cli": "give --chat-template",
    },
    "pass chat_template=": {"http": "start the server with --chat-template", "cli": "give --chat-template"},
    "pass another chat_template": {
        "http": "start the server with another --chat-template",
        "cli": "give another --chat-template",
    },
    "use generate or chat": {"http": "use /v1/chat/completions or /v1/completions", "cli": "use `sensorium chat`"},
    "use score, or encode with PoolingParams(token_ids=...) for the logits of single tokens": {
        "http": "use /score or /v1/embeddings"
    },
    'use encode(..., pooling_task="token_classify")': {"http": "no endpoint returns classes of tokens"},
    "score needs one; use classify": {"http": "/score needs one; use /classify"},
    "use llm.embed, llm.score or PoolingParams(token_ids=...)": {"http": "use /v1/embeddings or /score"},
    "use llm.embed": {"http": "use /v1/embeddings", "cli": "use /v1/embeddings of `sensorium serve`"},
    "use llm.encode": {"http": "use LLM.encode in Python", "cli": "use LLM.encode in Python"},
    "call wake_up() first": {"http": "send the request again when GET /ready answers 200"},
    'call encode_media, or load the model without parts="encoder"': {"http": "start the server without --parts encoder"},
    "give it in multi_modal_data": {
        "http": "send sound to /v1/audio/transcriptions, or other media in messages to /v1/chat/completions",
        "cli": "give it with --image, --video or --audio",
    },
    "task='translate' is not supported": {"http": "translation is not supported"},
    "but multi_modal_data holds": {"http": "but the request holds"},
    'make it smaller (max_pixels, fps, num_frames) or pass fit="context"': {
        "http": 'make it smaller (max_pixels, fps, num_frames of mm_processor_kwargs) or send fit="context"',
        "cli": "make it smaller",
    },
    "give sensorium.pdf_pages(file) in Python, or the file in a part of type file": {
        "http": "give it in a part of type file",
        "cli": "give it to `sensorium ocr`, with a name that ends with .pdf",
    },
    "as bytes, a Path or a data: URL": {"http": "as a data: URL"},
    "data or file URLs, bytes or a path": {"http": "or data URLs", "cli": "data or file URLs, or a path"},
    "fetch it yourself and give bytes": {
        "http": "fetch it yourself and send a data: URL",
        "cli": "fetch it yourself and give the file",
    },
    "give one, or bytes": {"http": "give one, or a data: URL", "cli": "give one, or a file"},
    "check the URL, or give bytes": {"http": "check the URL, or send a data: URL", "cli": "check the URL, or give a file"},
    "give bytes, or see media: allow_private_hosts": {
        "http": "send a data: URL, or see media: allow_private_hosts",
        "cli": "fetch it yourself and give the file",
    },
    ", or give raw PCM as (np.frombuffer(data, np.int16), rate)": {
        "http": "",
        "cli": ", or pipe raw PCM into `sensorium transcribe --live -`",
    },
    "LLM(..., media_device='cuda') processes them": {
        "http": "`sensorium serve --media-device cuda` processes them",
        "cli": "`sensorium serve --media-device cuda` processes them",
    },
    "beam search is LLM.beam_search(prompts, BeamSearchParams(beam_width=...))": {"http": "the server has no beam search"},
    '{"type": "image", "image": item}, or into a prompt\'s multi_modal_data': {
        "http": '{"type": "image_url", "image_url": {"url": "data:..."}}'
    },
    "vectors have length 1 unless pooling_params=PoolingParams(normalize=False)": {"http": "vectors always have length 1"},
    'timestamps="word" gives': {"http": "timestamp_granularities[]=word with response_format=verbose_json gives"},
    "LLM(base, adapter=folder)": {"cli": "`sensorium serve BASE --adapter FOLDER`"},
}
"""Phrase of a message -> the words in its place. A phrase stands before those that it contains."""
_PARAMS = {
    "multi_modal_data": "prompt",
    "prompt_token_ids": "prompt",
    "limit_mm_per_prompt": "messages",
    "task": "model",  # of /v1/audio/translations
}
"""Parameters that a request over HTTP has in a field of another name."""


def in_words_of(interface: Interface, text: str) -> str:
    """Return a message with the advice that suits an interface."""
    for phrase, words in _PHRASES.items():
        text = text.replace(phrase, words.get(interface, phrase))
    return text


def field_of(param: str | None) -> str | None:
    """Return the field over HTTP of a parameter at fault."""
    return param if param is None else _PARAMS.get(param, param)
