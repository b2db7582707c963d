"""Words an error for the command line: its advice, and the flag of the argument at fault."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ..callers.errors import ErrorInfo, one_line
from ..callers.wording import ADVICE

_ADVICE: Mapping[str, str] = {
    "base_with_adapter": "`sensorium serve BASE --adapter FOLDER`",
    "change_template": "give another --chat-template",
    "check_url": "check the URL, or give a file",
    "convert_audio": "convert it to WAV or FLAC, or pipe raw PCM into `sensorium transcribe --live -`",
    "fetch_yourself": "fetch it yourself and give the file",
    "give_bytes_or_allow": "fetch it yourself and give the file",
    "give_item": "give it with --image, --video or --audio",
    "give_pdf": "give it to `sensorium ocr`, with a name that ends with .pdf",
    "give_template": "give --chat-template",
    "give_template_or_prompt": "give --chat-template",
    "give_url": "give one, or a file",
    "give_url_or_path": "give http, https, data or file URLs, or a path",
    "media_on_gpu": "`sensorium serve --media-device cuda` processes them on a GPU",
    "shrink_item": "make it smaller",
    "transcribe_or_prompt": "use `sensorium transcribe`",
    "translation": "--task translate",
    "use_chat": "use `sensorium chat`",
    "use_embed": "use /v1/embeddings of `sensorium serve`",
    "use_encode": "use LLM.encode in Python",
}


def words_of(args: argparse.Namespace) -> Mapping[str, str]:
    """Return the words for the names in a message: advice, and the options of a command for the arguments that they set."""
    flags = {name: f"--{name.replace('_', '-')}" for name in vars(args)} | getattr(args, "spellings", {})
    return {**ADVICE, **_ADVICE, **flags, **{f"{name}=": f"{flag} " for name, flag in flags.items()}}


def message_of(info: ErrorInfo, args: argparse.Namespace) -> str:
    """Return an error's message in the words of the command line."""
    return one_line(info.worded(words_of(args)))
