"""`sensorium transcribe`: transcribe audio files and print text or JSON."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..mm.errors import ConfigError
from .common import add_file_arguments, add_model_arguments, engine_options, positive_int
from .output import print_results
from .sources import read_sources

if TYPE_CHECKING:
    from ..pipelines.transcribe import Segment, Transcript

EXAMPLE = "sensorium transcribe talk.flac --model DIR --timestamps"

FORMATS = ("text", "json", "srt", "vtt", "tsv", "md")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_arguments(parser, "an audio file")
    add_model_arguments(parser)
    parser.add_argument("--language", metavar="NAME", help='the language spoken, as "en" or "English" (default: detected)')
    parser.add_argument("--task", default="transcribe", help="transcribe, or translate into English (default: transcribe)")
    help_text = "how to print a text; srt, vtt and tsv need a model with timestamps (default: text)"
    parser.add_argument("--format", choices=FORMATS, default="text", help=help_text)
    parser.add_argument("--no-vad", action="store_true", help="read the whole audio, not only speech")
    parser.add_argument("--timestamps", action="store_true", help="also print when each segment was spoken")
    parser.add_argument("--context", metavar="TEXT", default="", help="names and words to expect")
    help_text = "maximum number of tokens per file (default: as many as the model takes)"
    parser.add_argument("--max-tokens", metavar="N", type=positive_int, help=help_text)


def run(args: argparse.Namespace) -> int:
    """Return 2 if a file could not be transcribed; the other files are still transcribed."""
    from ..engine.llm import LLM
    from ..engine.sampling_params import SamplingParams
    from ..pipelines.speech.arguments import TEMPERATURES
    from ..pipelines.speech.subtitles import WRITERS
    from ..pipelines.tasks import as_completed
    from ..pipelines.transcribe import transcribe_tasks

    if args.json and args.format not in ("text", "json"):
        raise ConfigError(f"--json and --format {args.format} exclude each other; give one of them")
    sources = read_sources(args.files, "audio")
    if args.format in ("srt", "vtt", "tsv") and len(sources) > 1:
        raise ConfigError(f"--format {args.format} takes one file, not {len(sources)}; run the command once for each")
    llm = LLM(**engine_options(args))
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    items = [source.item for source in sources]
    args.json = args.json or args.format == "json"
    timed = args.timestamps or args.format in ("srt", "vtt", "tsv")
    given = (items, args.language, args.task, timed, args.context, params)
    tasks = transcribe_tasks(llm, *given, vad=not args.no_vad, temperature=TEMPERATURES)
    return print_results(
        args,
        sources,
        as_completed(llm, tasks, most=2 * llm.config.max_num_seqs),
        lambda transcript: (json_fields(transcript), WRITERS.get(args.format, text)(transcript)),
    )


def json_fields(transcript: Transcript) -> dict[str, object]:
    segments = transcript.segments
    return {
        "text": transcript.text,
        "language": transcript.language,
        "segments": None
        if segments is None
        else [asdict(one) | {"compression_ratio": one.compression_ratio} for one in segments],
        "finish_reason": transcript.finish_reason,
        "avg_logprob": transcript.avg_logprob,
        "compression_ratio": transcript.compression_ratio,
        "duration": transcript.duration,
        "speech_spans": transcript.speech_spans,
        "skipped": transcript.skipped,
        "doubt": transcript.doubt,
        "error": transcript.error,
    }


def text(transcript: Transcript) -> str:
    """Return the text, with timestamps as one line per segment."""
    return transcript.text if transcript.segments is None else "\n".join(map(segment_line, transcript.segments))


def segment_line(segment: Segment) -> str:
    return f"[{segment.start:.2f} - {'' if segment.end is None else f'{segment.end:.2f}'}] {segment.text}"
