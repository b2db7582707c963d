"""`sensorium transcribe`: transcribe audio files and print text or JSON."""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ..callers.errors import ConfigError
from . import live
from .common import add_file_arguments, add_model_arguments, engine_options, positive_int
from .output import Report, print_results, to_json
from .output_folder import OutputFolder
from .progress import AudioProgress
from .sources import check_files, read_sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..pipelines.speech.options import FileOptions
    from ..pipelines.transcribe import Segment, Transcript

EXAMPLE = "sensorium transcribe talk.flac --model DIR --timestamps"
SHIPPED_HEARS = (
    "the shipped model understands only synthetic English speech: numbers, dates, times and short commands; "
    "pass --model for other audio"
)
SHIPPED_MODEL = Path(__file__).resolve().parents[1] / "assets" / "tiny-asr"

LINE_LENGTH = 42  # characters of a line of subtitles
FORMATS = ("text", "json", "srt", "vtt", "tsv", "md", "rttm", "stm", "diarized_json")
OF_SPEAKERS = ("rttm", "stm", "diarized_json")
_SUBTITLES = ("srt", "vtt")
_TIMED = ("srt", "vtt", "tsv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_arguments(parser, "an audio file", "*")
    add_model_arguments(parser, str(SHIPPED_MODEL))
    language_help = 'the language spoken, as "en", "en-US" or "English", or "auto" to detect it in each window (default: once)'
    parser.add_argument("--language", metavar="NAME", help=language_help)
    help_text = "transcribe, or translate into English (default: transcribe)"
    parser.add_argument("--task", choices=("transcribe", "translate"), default="transcribe", help=help_text)
    help_text = "format of the transcripts; srt, vtt and tsv need a model with timestamps (default: text)"
    parser.add_argument("--format", choices=FORMATS, default="text", help=help_text)
    help_text = "transcribe while it is spoken: the microphone, - for a pipe of s16le samples, or a file at its speed"
    parser.add_argument("--live", action="store_true", help=help_text)
    help_text = "with --live: hertz of the samples of a pipe or the microphone (default: 16000)"
    parser.add_argument("--rate", metavar="HZ", type=positive_int, help=help_text)
    parser.add_argument("--no-vad", action="store_true", help="transcribe the whole audio, not only speech")
    parser.add_argument("--timestamps", action="store_true", help="also print when each segment was spoken")
    help_text = "beams of a beam search; 1 is greedy (default: 1)"
    parser.add_argument("--beam-size", metavar="N", type=positive_int, default=1, help=help_text)
    help_text = "also compute when each word was spoken: printed with --json, and used to cut subtitles"
    parser.add_argument("--word-timestamps", action="store_true", help=help_text)
    parser.add_argument("--aligner", metavar="DIR", help="folder of a CTC model that computes the times of words")
    parser.add_argument("--output-dir", metavar="DIR", type=Path, help="write one file per input into this folder")
    help_text = "with --output-dir: skip inputs that an earlier run has finished with the same options"
    parser.add_argument("--resume", action="store_true", help=help_text)
    help_text = "characters of a line of subtitles (default: 42)"
    parser.add_argument("--max-line-width", metavar="N", type=positive_int, help=help_text)
    help_text = "lines of a subtitle; longer ones are cut, at the end of a sentence if possible (default: not cut)"
    parser.add_argument("--max-line-count", metavar="N", type=positive_int, help=help_text)
    help_text = 'audio track of each file: its number from 0, its language, or "default" (the default)'
    parser.add_argument("--track", metavar="N", default="default", help=help_text)
    help_text = 'channel: its number from 0, "left", "right", "mix" (the default), or "each": every channel is one speaker'
    parser.add_argument("--channel", metavar="N", default="mix", help=help_text)
    help_text = "tell speakers apart; their number, or the fewest and the most, if known"
    parser.add_argument("--speakers", metavar="N | MIN-MAX", nargs="?", const="true", help=help_text)
    help_text = "folder with the networks that tell speakers apart (default: those in the packages whisperx and resemblyzer)"
    parser.add_argument("--speaker-model", metavar="DIR", help=help_text)
    help_text = "a speaker's name and a clip of 2 to 10 s of the voice; give one for each known speaker"
    parser.add_argument("--known-speaker", metavar="NAME=FILE", action="append", default=[], help=help_text)
    parser.add_argument("--context", metavar="TEXT", default="", help="names and words to expect")
    help_text = "phrase that is likely to be said, such as a name, and its weight (default: 3); may be repeated"
    parser.add_argument("--boost", metavar="PHRASE[=WEIGHT]", action="append", type=boosted_phrase, default=[], help=help_text)
    help_text = "maximum number of tokens per file (default: as many as the model takes)"
    parser.add_argument("--max-tokens", metavar="N", type=positive_int, help=help_text)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for arguments that are wrong or contradict each other, before a model is loaded."""
    if args.speakers is not None:
        from ..pipelines.speech.options import read_speakers

        read_speakers(args.speakers)  # first, because it may have taken a file's name
    if not args.live and not args.files:
        raise ConfigError("there is nothing to transcribe; name an audio file, or give --live for the microphone")
    if args.rate is not None and not args.live:
        raise ConfigError("--rate is for --live; a file states its own rate")
    if args.live and (args.track, args.channel) != ("default", "mix"):
        raise ConfigError("--track and --channel are for files; leave them out with --live")
    if (args.track, args.channel) != ("default", "mix"):
        from ..mm.media.policy import AudioSelection

        AudioSelection(args.track, "mix" if args.channel == "each" else args.channel)
    _check_speakers(args)
    times_words = args.word_timestamps or args.speakers is not None or args.channel == "each"
    if args.aligner is not None and not times_words:
        raise ConfigError("--aligner is for --word-timestamps and --speakers; give one of them, or leave it out")
    if args.aligner is not None and not Path(args.aligner).is_dir():
        raise ConfigError(f"--aligner {args.aligner} is not a folder; give one with a CTC model", param="aligner")
    if args.json and not args.live and args.format not in ("text", "json"):
        raise ConfigError(f"--json and --format {args.format} exclude each other; give one of them")
    for name in ("max_line_width", "max_line_count"):
        if getattr(args, name) is not None and not args.live and args.format not in _SUBTITLES:
            advice = f"is for --format {' and '.join(_SUBTITLES)}; give one of them, or leave it out"
            raise ConfigError(f"--{name.replace('_', '-')} {advice}", param=name)
    if args.resume and not args.live and args.output_dir is None:
        raise ConfigError("--resume needs --output-dir, where an earlier run wrote its files; give it")


def _check_speakers(args: argparse.Namespace) -> None:
    if args.format in OF_SPEAKERS and args.speakers is None and args.channel != "each":
        raise ConfigError(f"--format {args.format} has the speakers; give --speakers, or --channel each", param="speakers")
    for text in args.known_speaker:
        if not all(part.strip() for part in (text.partition("=")[0], text.partition("=")[2])):
            raise ConfigError(f"--known-speaker {text!r} must be NAME=FILE", param="known_speaker")


def run(args: argparse.Namespace) -> int:
    """Return 2 if a file could not be transcribed; the other files are still transcribed."""
    check_arguments(args)
    if args.model == str(SHIPPED_MODEL):
        print(f"sensorium: note: {SHIPPED_HEARS}", file=sys.stderr)
    if args.live:
        return live.run(args)
    from ..engine.llm import LLM
    from ..pipelines.run import as_completed
    from ..pipelines.speech.boost import read_boost
    from ..pipelines.speech.options import check_beam_size
    from ..pipelines.speech.subtitles import WRITERS, SubtitleLayout
    from ..pipelines.transcribe import transcribe_tasks

    check_beam_size(args.beam_size)
    read_boost(args.boost)
    sources = read_sources(args.files, "audio")
    args.json = args.json or args.format == "json"
    if not args.json and args.output_dir is None:  # these report each file
        check_files(sources, every=False)
    folder = None if args.output_dir is None else OutputFolder(args, sources, "json" if args.json else args.format)
    if folder is None and args.format in (*_TIMED, *OF_SPEAKERS) and len(sources) > 1:
        raise ConfigError(f"--format {args.format} takes one file, not {len(sources)}; give --output-dir")
    if folder is not None and args.resume:
        sources = folder.without_finished()
        if not sources:
            print("sensorium: note: an earlier run has finished all files with these options", file=sys.stderr)
            return 0
    llm = LLM(**engine_options(args))
    items = [source.item for source in sources]
    layout = SubtitleLayout(args.max_line_width or LINE_LENGTH, args.max_line_count)
    projection = WRITERS.get(args.format)

    def write(transcript: Transcript) -> str:
        return text(transcript, args.timestamps) if projection is None else projection(transcript.timeline, layout)

    as_json, args.json = args.json, args.json and folder is None

    def report(index: int, transcript: Transcript) -> Report:
        fields = json_fields(transcript)
        if folder is None:
            return fields, write(transcript)
        if transcript.error and not transcript.text:
            return fields, ""
        shown = to_json({"file": sources[index].name, **fields}, args) if as_json else write(transcript)
        return fields, str(folder.write(sources[index], shown, transcript.error))

    with AudioProgress() as progress:
        tasks = transcribe_tasks(llm.engine, items, speech_options(args, progress.add))
        done = as_completed(llm.engine, tasks, use_tqdm=False, limit=2 * llm.config.max_num_seqs)
        pairs = ((index, (index, result)) for index, result in done)
        return print_results(args, [source.name for source in sources], pairs, lambda pair: report(*pair))


def speech_options(args: argparse.Namespace, on_progress: Callable[[float], None]) -> FileOptions:
    from ..engine.sampling_params import SamplingParams
    from ..pipelines.speech.options import TEMPERATURES, FileOptions

    timed = args.timestamps or args.format in _TIMED
    return FileOptions(
        language=args.language,
        task=args.task,
        timestamps="word" if args.word_timestamps else "segment" if timed else "none",
        context=args.context,
        boost=args.boost,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=args.max_tokens),
        vad=not args.no_vad,
        temperature=TEMPERATURES,
        aligner=args.aligner,
        beam_size=args.beam_size,
        track=args.track,
        channel=args.channel,
        on_progress=on_progress,
        **live.speaker_options(args),
    )


def boosted_phrase(text: str) -> str | tuple[str, float]:
    """Return a phrase, with its weight if the text ends with one."""
    phrase, _, weight = text.rpartition("=")
    try:
        return (phrase, float(weight)) if phrase else text
    except ValueError:
        return text


def json_fields(transcript: Transcript) -> dict[str, object]:
    return {**transcript.to_dict(), "error": transcript.error}


def text(transcript: Transcript, timed: bool = True) -> str:
    """Return the text, with timestamps as one line per segment, or, if not `timed`, as one line per turn of a speaker."""
    if transcript.segments is None:
        return transcript.text
    if timed or transcript.turns is None:
        return "\n".join(map(segment_line, transcript.segments))
    from ..pipelines.speech.merge import join_texts

    runs = groupby(transcript.segments, key=lambda segment: segment.speaker)
    return "\n".join(f"{speaker or 'unknown'}: {join_texts([segment.text for segment in run])}" for speaker, run in runs)


def segment_line(segment: Segment) -> str:
    speaker = "" if segment.speaker is None else f"{segment.speaker}: "
    return f"[{segment.start:.2f} - {'' if segment.end is None else f'{segment.end:.2f}'}] {speaker}{segment.text}"
