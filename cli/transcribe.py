"""`sensorium transcribe`: transcribe audio files and print text or JSON."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .common import add_file_arguments, add_model_arguments, engine_options, print_when_done

if TYPE_CHECKING:
    from ..pipelines.transcribe import Segment, Transcript

EXAMPLE = "sensorium transcribe talk.flac --model ORG/NAME --timestamps --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_arguments(parser, "an audio file")
    add_model_arguments(parser)
    parser.add_argument("--language", metavar="NAME", help='the language spoken, as "en" or "English" (default: detected)')
    parser.add_argument("--task", default="transcribe", help="transcribe, or translate into English (default: transcribe)")
    parser.add_argument("--timestamps", action="store_true", help="also print when each segment was spoken")
    parser.add_argument("--context", metavar="TEXT", default="", help="names and words to expect")


def run(args: argparse.Namespace) -> int:
    """Return 2 if a file could not be transcribed; the other files are still transcribed."""
    from ..engine.llm import LLM
    from ..pipelines.tasks import as_completed
    from ..pipelines.transcribe import transcribe_tasks

    llm = LLM(**engine_options(args))
    tasks = transcribe_tasks(llm, args.files, args.language, args.task, timestamps=args.timestamps, context=args.context)
    return print_when_done(args, as_completed(llm, tasks), lambda transcript: (json_fields(transcript), text(transcript)))


def json_fields(transcript: Transcript) -> dict[str, object]:
    segments = transcript.segments
    return {
        "text": transcript.text,
        "language": transcript.language,
        "segments": None if segments is None else [{"start": s.start, "end": s.end, "text": s.text} for s in segments],
        "finish_reason": transcript.finish_reason,
        "error": transcript.error,
    }


def text(transcript: Transcript) -> str:
    """Return the text, with timestamps as one line per segment."""
    return transcript.text if transcript.segments is None else "\n".join(map(segment_line, transcript.segments))


def segment_line(segment: Segment) -> str:
    return f"[{segment.start:.2f} - {'' if segment.end is None else f'{segment.end:.2f}'}] {segment.text}"
