"""`sensorium chat`: ask one question about images, videos and audio, and print the answer as it is generated."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from .common import (
    add_model_arguments,
    engine_options,
    exit_code,
    exit_on_interrupt,
    path_or_url,
    positive_int,
    warn_truncated,
    with_option_names,
)

EXAMPLE = 'sensorium chat --model Qwen/Qwen2.5-VL-3B-Instruct --image a.png --image b.png "What differs?"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", help="the question")
    add_model_arguments(parser)
    for modality, item in {"image": "an image", "video": "a video", "audio": "an audio file"}.items():
        help_text = f"{item}, as a path or URL; may be repeated"
        parser.add_argument(f"--{modality}", metavar="FILE", type=path_or_url, action="append", default=[], help=help_text)
    help_text = "maximum number of tokens of the answer (default: 512)"
    parser.add_argument("--max-tokens", metavar="N", type=positive_int, default=512, help=help_text)
    help_text = "sampling temperature, 0 is greedy (default: the checkpoint's)"
    parser.add_argument("--temperature", metavar="T", type=float, help=help_text)
    help_text = "maximum number of tokens of prompt and answer together"
    parser.add_argument("--max-model-len", metavar="N", type=positive_int, help=help_text)


def run(args: argparse.Namespace) -> int:
    from ..engine.llm import LLM

    llm = LLM(**engine_options(args), max_model_len=args.max_model_len)
    printed = 0  # characters
    with exit_on_interrupt(print):
        for output in llm.stream(messages(args), replace(llm.default_params, **sampling_options(args))):
            if output.error:
                print(f"sensorium: error: {with_option_names(output.error.message, args)}", file=sys.stderr)
                return exit_code([output.error])
            text = output.outputs[0].text
            sys.stdout.write(text[printed:])
            sys.stdout.flush()
            printed = len(text)
    print()
    if output.outputs[0].finish_reason == "length":
        warn_truncated(args, "the answer")
    return 0


def messages(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one user message: images, videos, audio, then the question."""
    from ..pipelines.message_parts import media_part

    parts = [media_part(modality, file) for modality in ("image", "video", "audio") for file in getattr(args, modality)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": args.question}]}]


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters given on the command line; the others keep the checkpoint's defaults."""
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return {name: value for name, value in options.items() if value is not None}
