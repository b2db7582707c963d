"""`sensorium transcribe --live`: transcribe the microphone, a pipe, or a file as fast as it plays."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO

from ..callers.errors import ConfigError, InputError
from ..mm.media import gate
from ..mm.media.audio import check_sample_rate
from ..mm.media.policy import MediaPolicy
from ..mm.parse import MediaSource
from .common import engine_options
from .output import print_error, to_json
from .sources import Source, check_files
from .wording import message_of

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..pipelines.speech.live_input import LiveEvent
    from ..pipelines.speech.live_session import LiveAudio

PCM_RATE = 16_000  # hertz of a pipe and of the microphone without --rate
_BLOCK = 0.1  # seconds
_ENCODED = {b"fLaC": "FLAC", b"OggS": "Ogg", b"RIFF": "WAV", b"ID3": "MP3", b"\x1aE\xdf\xa3": "Matroska"}  # first bytes
_CLEAR = "\r\x1b[K"  # go to the start of the terminal's line, and empty it
# options for files only
_REFUSED = ("output_dir", "resume", "aligner", "word_timestamps", "max_tokens", "max_line_width", "max_line_count")


def run(args: argparse.Namespace) -> int:
    """Print final texts as lines. On a terminal, the open text is shown below them. Ctrl-C ends the stream."""
    from ..pipelines.llm import LLM

    if args.rate is not None and args.files and args.files[0] != "-":
        raise ConfigError("--rate is for a pipe and the microphone; a file states its own rate")
    if len(args.files) > 1:
        raise ConfigError(f"--live takes one source, not {len(args.files)}; run the command once for each")
    option = next((name for name in _REFUSED if getattr(args, name)), None)
    option = "beam_size" if args.beam_size > 1 else option
    if option is not None or args.format not in ("text", "json"):
        name = "format" if option is None else option.replace("_", "-")
        raise ConfigError(f"--{name} is for files and has no effect with --live; leave it out (--format may be text or json)")
    source, rate = args.files[0] if args.files else None, args.rate or PCM_RATE
    blocks: Iterator[object] | None = None
    check_sample_rate(rate, MediaPolicy())
    if source is None:
        blocks = microphone(rate)
    elif source == "-":
        blocks = pipe(rate)
    else:
        check_files([Source(source, source)], every=True)
    llm = LLM(**engine_options(args))
    if blocks is None:
        rate, blocks = file_rate(llm), file(llm, args.files[0])
    options = {
        "language": args.language,
        "task": args.task,
        "context": args.context,
        "boost": args.boost,
        "vad": not args.no_vad,
        **speaker_options(args),
    }
    errors: list[Exception] = []
    with llm.live_audio(rate, **options) as session, _finish_on_interrupt(session) as stopped:
        feeder = threading.Thread(target=_feed, args=(session, blocks, stopped, errors), daemon=True)
        feeder.start()
        for event in session.events():
            _show(args, event)
    for error in errors:
        raise error
    return 0


def speaker_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that separate speakers, for files and live streams."""
    from ..pipelines.speech.options import read_speakers

    known = [text.partition("=")[::2] for text in args.known_speaker]
    return {
        "speakers": False if args.speakers is None else read_speakers(args.speakers),
        "speaker_model": args.speaker_model,
        "known_speaker_names": [name for name, _ in known],
        "known_speaker_references": [file for _, file in known],
    }


def file_rate(llm: LLM) -> int:
    from ..pipelines.speech.arguments import check_model

    return check_model(llm.engine, "transcribe")


def microphone(rate: int) -> Iterator[bytes]:
    """Yield blocks of PCM from the default input device."""
    try:
        sounddevice: Any = import_module("sounddevice")
    except (ImportError, OSError) as error:  # without the package, or without the library PortAudio
        reason = (
            f"the microphone needs sounddevice ({error}): pip install sounddevice, and PortAudio from the system's packages"
        )
        raise ConfigError(f"{reason}; or pipe audio in: ffmpeg ... -f s16le - | sensorium transcribe --live -") from None
    return _read_device(sounddevice, rate)


def _read_device(sounddevice: Any, rate: int) -> Iterator[bytes]:
    size = round(_BLOCK * rate)
    with sounddevice.RawInputStream(samplerate=rate, channels=1, dtype="int16") as device:
        while True:
            yield bytes(device.read(size)[0])


def pipe(rate: int) -> Iterator[bytes]:
    """Yield blocks of PCM (int16, little-endian, mono) from stdin until it ends."""
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("- reads samples from stdin, which is a terminal; pipe s16le samples into the command")
    return _read_pcm(sys.stdin.buffer, 2 * round(_BLOCK * rate))


def _read_pcm(stdin: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield blocks of whole samples. Raise InputError if they begin as an encoded file does."""
    raw: BinaryIO = getattr(stdin, "raw", stdin)  # a buffered reader's lock, held by this thread, would abort Python's exit
    rest, is_first = b"", True
    while read := raw.read(size):
        block = rest + read
        encoded = next((name for start, name in _ENCODED.items() if block.startswith(start)), None)
        if is_first and encoded is not None:
            how = "decode it (ffmpeg -i ... -f s16le -), or give it without --live"
            raise InputError(f"stdin begins as {encoded}, but --live - takes raw samples (16 bits, little-endian, mono); {how}")
        complete, is_first = len(block) // 2 * 2, False
        rest = block[complete:]
        if complete:
            yield block[:complete]
    if rest:
        yield rest


def file(llm: LLM, path: str) -> Iterator[object]:
    """Yield the blocks of an audio file at the speed at which it plays."""
    rate = file_rate(llm)
    started, size, count = time.monotonic(), round(_BLOCK * rate), 0
    for samples in gate.audio_blocks(MediaSource("audio", 0, path), rate, llm.config.media):
        for block in samples.split(size):
            count += len(block)
            time.sleep(max(0.0, started + count / rate - time.monotonic()))
            yield block


def _feed(session: LiveAudio, blocks: Iterator[object], stopped: threading.Event, errors: list[Exception]) -> None:
    try:
        for block in blocks:
            while not stopped.is_set() and not _push(session, block):
                stopped.wait(_BLOCK)
            if stopped.is_set():
                return
    except Exception as error:
        if not stopped.is_set():  # else the session was finished while a block was pushed
            errors.append(error)
    finally:
        session.finish()


def _push(session: LiveAudio, block: object) -> bool:
    """Return False if the buffer is full."""
    try:
        session.push(block)
    except InputError as error:
        if error.info.code != "overloaded":
            raise
        return False
    return True


@contextmanager
def _finish_on_interrupt(session: LiveAudio) -> Iterator[threading.Event]:
    """Make the first Ctrl-C finish the stream, so that its last text is printed. The second one ends the command."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    previous = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, previous)
        stopped.set()
        session.finish()

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        stopped.set()
        signal.signal(signal.SIGINT, previous)


def _show(args: argparse.Namespace, event: LiveEvent) -> None:
    on_terminal = sys.stdout.isatty()
    if args.json or args.format == "json":
        print(to_json(vars(event), args), flush=True)
    elif event.kind == "final" and event.error is None:
        print(f"{_CLEAR if on_terminal else ''}{_final_lines(event, args.timestamps)}", flush=True)
    elif event.kind == "partial" and on_terminal:
        width = shutil.get_terminal_size().columns - 1
        print(f"{_CLEAR}{event.text[-width:]}", end="", flush=True)
    if event.error is not None:
        print_error(message_of(event.error, args))


def _final_lines(event: LiveEvent, timed: bool) -> str:
    """Return a final text, with one line for each segment if these have speakers."""
    parts = [(event.start, event.end, "", event.text)]
    if event.turns is not None and event.segments:
        parts = [(part.start, part.end or part.start, f"{part.speaker or 'unknown'}: ", part.text) for part in event.segments]
    return "\n".join(f"[{start:.2f} - {end:.2f}] {who}{text}" if timed else f"{who}{text}" for start, end, who, text in parts)
