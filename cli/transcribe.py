"""`sensorium transcribe`: what is said in sound files, as text or JSON. Knows no model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .files import add_files, add_model, print_finished

if TYPE_CHECKING:
    from ..pipelines.transcribe import Segment, Transcript

EXAMPLE = "sensorium transcribe talk.flac --model DIR --timestamps --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_files(parser, "a sound")
    add_model(parser)
    parser.add_argument("--language", metavar="NAME", help='spoken, as "en" or "English" (default: found out)')
    parser.add_argument("--task", default="transcribe", help="transcribe, or translate to English (default: transcribe)")
    parser.add_argument("--timestamps", action="store_true", help="also say when each segment was spoken")
    parser.add_argument("--context", metavar="TEXT", default="", help="names and words to expect")


def run(args: argparse.Namespace) -> int:
    """2 if a file could not be written down; the others are all the same."""
    from ..engine.llm import LLM
    from ..pipelines.asking import finished
    from ..pipelines.transcribe import transcripts

    llm = LLM(args.model, dtype=args.dtype, device=args.device)
    asked = transcripts(llm, args.files, args.language, args.task, timestamps=args.timestamps, context=args.context)
    return print_finished(args, finished(llm, asked), lambda one: (known(one), text(one)))


def known(one: Transcript) -> dict[str, object]:
    parts = None if one.segments is None else [{"start": s.start, "end": s.end, "text": s.text} for s in one.segments]
    return {
        "text": one.text,
        "language": one.language,
        "segments": parts,
        "finish_reason": one.finish_reason,
        "error": one.error,
    }


def text(one: Transcript) -> str:
    """A line per segment where there are times."""
    return one.text if one.segments is None else "\n".join(map(line, one.segments))


def line(part: Segment) -> str:
    return f"[{part.start:.2f} - {'' if part.end is None else f'{part.end:.2f}'}] {part.text}"
