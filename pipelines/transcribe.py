"""Transcribes audio of any length, with language and timestamps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..callers.errors import ErrorInfo, InputError, media_error
from ..engine.errors import error_info
from ..engine.outputs import CompletionOutput, RequestOutput
from ..mm.media import gate
from ..mm.media.policy import AudioSelection
from ..mm.parse import MediaSource, item_errors
from ..mm.speech import SpeechRequest
from ..mm.types import EmbeddingItem, MediaHeader
from .files import NamedItem, named_items
from .run import Task, error_of_task, gather
from .speech.arguments import check_file_options, expected_words, known_language, times_for_speakers
from .speech.boost import boost_arguments
from .speech.decode import Aligner, Decoding, SpokenLanguage, WindowInput, detect_language, transcribe_window
from .speech.forced_alignment import CtcAligner
from .speech.frames import FrameAligner
from .speech.merge import TextMerger, join_texts, merge_overlap
from .speech.options import FileOptions, SpeechOptions
from .speech.results import Transcript, TranscriptionInfo
from .speech.segments import Attempt, Segment, WindowResult, WindowText, Word, main_language, segments
from .speech.skipped import SegmentMerger, WindowTranscriber
from .speech.speakers import SpeakerJob, add_speakers, join_channels, listening, speaker_job
from .speech.vad import make_detector
from .speech.windows import Window, WindowReader
from .speech.word_times import AttentionAligner
from .speech.words import put_in_order
from .validation import as_items, check_functions

if TYPE_CHECKING:
    from ..engine.engine import Engine

__all__ = ["Attempt", "Segment", "Transcript", "TranscriptionInfo", "WindowResult", "Word", "segments", "transcribe_tasks"]
_log = logging.getLogger("sensorium")
_MAX_WINDOW = 60  # seconds; many windows are in memory at a time
_MAX_CONTEXT = 800  # characters of preceding text in a prompt
_FOLLOWED, _FOLLOWED_SECONDS = 4, 15.0  # windows at a time, and their longest, if each has its own language
_OVERLAP = 2.0  # seconds that two sequential windows share if they are cut inside speech
_PAUSE = 0.3  # minimum seconds of a pause in which they share none
_MAX_CHANNELS = 16  # of an item whose channels are speakers
_EARLY, _LATE = 0.6, 0.2  # seconds before and after a place inside speech in which such a window begins


@dataclass(frozen=True)
class _Job:
    """Values that the items of one call share.

    Args:
        words: to expect.
        size: samples of the longest window.
        max_concurrent_windows: limit for one file.
        find_end: finds when the words of a window were spoken, and with them the speech that a text skips; None: it cannot.
        speakers: tells speakers apart by their voices; None: it is not asked for.
    """

    options: FileOptions
    decoding: Decoding
    language: str | None
    words: str
    rate: int
    size: int
    max_concurrent_windows: int
    find_end: AttentionAligner | None
    speakers: SpeakerJob | None


def transcribe_tasks(engine: Engine, audio: object, options: FileOptions) -> list[Task[Transcript]]:
    """Return one task per audio item, in order; they run as one batch. A failed item gives a Transcript with `error`.

    Args:
        audio: an item or a list: paths, folders, patterns, URLs, encoded bytes, samples at the model's rate, `(samples, rate)`.

    Raises:
        ConfigError: the model does not transcribe speech.
        InputError: this model cannot honour an option.
    """
    items = list(named_items(as_items("audio", audio, "audio"), "audio"))
    check_file_options(engine, options)
    reports = {name: getattr(options, name) for name in ("on_progress", "on_text", "on_window", "on_segments")}
    on_progress, on_text, on_window, on_segments = check_functions(**reports)
    options = replace(options, on_progress=on_progress, on_text=on_text, on_window=on_window, on_segments=on_segments)
    assert engine.speech is not None
    if options.tells_speakers:
        options = replace(options, timestamps=times_for_speakers(engine, options))
    is_timed = options.sequential or options.times != "none"
    make = partial(make_request, engine, options.task, is_timed)
    decoding = Decoding(
        make,
        options,
        aligner=word_aligner(engine, options, options.aligner) if options.times == "word" else None,
        beam_size=options.beam_size,
        timestamped_request=timestamped_request(engine, options),
        boost=boost_arguments(engine, options.boosted),
    )
    words, rate = expected_words(engine, options), engine.speech.decode_spec.rate
    limits = window_size(engine), _windows_per_file(engine, len(items))
    if options.follows_language:
        limits = min(limits[0], round(_FOLLOWED_SECONDS * rate)), limits[1]
    finders = _end_finder(engine, options), speaker_job(engine, options)
    job = _Job(options, decoding, known_language(engine, options), words, rate, *limits, *finders)
    return [partial(_transcribe_named, engine, i, item, job) for i, item in enumerate(items)]


def _windows_per_file(engine: Engine, num_files: int) -> int:
    """Return how many windows of a file may run at a time, so that all files together run 2 * `max_num_seqs` windows."""
    return max(1, -(-2 * engine.config.max_num_seqs // max(1, num_files)))


def word_aligner(engine: Engine, options: SpeechOptions, folder: str | Path | None = None) -> Aligner | None:
    """Return the aligner of words: the CTC model in a folder, or else the model itself; None if it cannot time words."""
    assert engine.speech is not None
    if folder is not None:
        return CtcAligner(Path(folder), engine.speech.decode_spec.rate)
    frames = engine.speech.frame_rule()
    return _end_finder(engine, options) if frames is None else FrameAligner(frames)


def _end_finder(engine: Engine, options: SpeechOptions) -> AttentionAligner | None:
    assert engine.speech is not None
    rule = engine.speech.alignment()
    if rule is None:
        return None
    return AttentionAligner(rule, partial(make_request, engine, options.task, False), options.cache_salt)


def make_request(engine: Engine, task: str, timed: bool, language: str | None, context: str) -> SpeechRequest:
    assert engine.speech is not None
    return engine.speech.transcription_request(language, task, timed and engine.speech.has_timestamps, context)


def timestamped_request(engine: Engine, options: SpeechOptions) -> Callable[[str | None, str], SpeechRequest] | None:
    """Return the request with timestamps that is tried, before sampling, if the greedy answer repeats itself.

    None if there are no further temperatures, or if the model has no timestamps.
    """
    assert engine.speech is not None
    samples_later = len(options.temperatures) > 1 and options.temperatures[0] == 0
    return partial(make_request, engine, options.task, True) if samples_later and engine.speech.has_timestamps else None


def window_size(engine: Engine) -> int:
    """Return the samples of the longest window: the model's limit or `_MAX_WINDOW`, or less to leave room for the answer."""
    assert engine.speech is not None
    spec = engine.speech.decode_spec
    size = min(spec.max_audio_samples or _MAX_WINDOW * spec.rate, _MAX_WINDOW * spec.rate)
    if "audio" in engine.speech.placeholder_ids:
        while (
            engine.speech.geometry(MediaHeader("audio", samples=size)).num_embeds > engine.max_model_len // 2
            and size > spec.rate
        ):
            size //= 2
    return size


class _FinalSegments:
    """Merges the segments of an item's windows, which come in order, and returns those that are final."""

    def __init__(self, rate: int, times: str) -> None:
        self._rate, self._times, self._merger = rate, times, SegmentMerger()
        self._window_end = self._word_end = 0.0
        self._number = 0

    def add(self, text: WindowText, end: float) -> list[Segment]:
        """Add a window that ends at this second."""
        placed = [place_segment(part, text, self._rate) for part in text.segments or ()]
        _, parts, following = self._merger.add(text.result.text, placed, text.result.overlap)
        final, self._window_end = self._ordered(parts, following), end
        return final

    def finish(self) -> list[Segment]:
        return self._ordered(self._merger.add("", [], 0.0)[1], None)

    def _ordered(self, parts: list[Segment], following: float | None) -> list[Segment]:
        if self._times == "none":
            return []
        if self._times == "word":
            parts = put_in_order(parts, self._window_end, self._word_end, following)
            self._word_end = max([self._word_end, *(word.end for part in parts for word in part.words or ())])
        first, self._number = self._number + 1, self._number + len(parts)
        return [replace(part, id=number) for number, part in enumerate(parts, first)]


class _FinalTexts:
    """Reports an item's windows, which come in order, and their text and segments as soon as these are final.

    Attributes:
        output: the output of the last window, or None if there is none yet.
    """

    def __init__(self, index: int, options: FileOptions, rate: int) -> None:
        self._report, self._report_window = partial(options.on_text, index), partial(options.on_window, index)
        self._report_segments = partial(options.on_segments, index)
        self._merger, self._segments = TextMerger(), _FinalSegments(rate, options.times)
        self._rate = rate
        self.output: RequestOutput | None = None

    def add(self, part: WindowText) -> WindowText:
        """Report a window. Return its text without samples and tokens, so that memory does not grow with the audio."""
        self._report_window(part.result)
        segments = self._segments.add(part, _window_end(part, self._rate))
        self._send(self._merger.add(part.result.text, part.result.overlap), segments)
        if part.window is None or part.window.next_start >= part.window.end:
            self.finish()
        self.output, output = part.output, RequestOutput(part.output.request_id, None, [], [])
        window = part.window and replace(part.window, samples=torch.empty(0), pauses=())
        return replace(part, window=window, output=part.output if part.output.error else output, token_times=None)

    def finish(self) -> None:
        self._send(self._merger.finish(), self._segments.finish())

    def _send(self, text: str, segments: Sequence[Segment]) -> None:
        if segments:
            self._report_segments(tuple(segments))
        if text:
            self._report(text)


def _window_end(text: WindowText, rate: int) -> float:
    return text.result.end if text.window is None else text.window.end / rate


async def _transcribe_named(engine: Engine, index: int, item: NamedItem, job: _Job) -> Transcript:
    if job.options.each_channel:
        transcript = await _transcribe_channels(engine, index, item.item, job)
    else:
        transcript = await _transcribe_item(engine, index, item.item, job)
    for warning in transcript.warnings:
        _log.warning("%s: %s", item.source or f"audio {index}", warning)
    return replace(transcript, source=item.source)


async def _transcribe_channels(engine: Engine, index: int, item: object, job: _Job) -> Transcript:
    """Transcribe each channel of an item as one speaker. The text is reported when all channels are known."""
    options, transcripts = job.options, list[Transcript]()

    quiet = replace(options, known_speaker_names=(), on_text=_ignore, on_window=_ignore, on_segments=_ignore)
    while len(transcripts) < _MAX_CHANNELS:
        part = replace(job, options=replace(quiet, speakers=False, channel=len(transcripts)))
        transcript = await _transcribe_item(engine, index, item, part)
        if transcripts and transcript.error is not None and transcript.error.param == "channel":  # there is no such channel
            break
        transcripts.append(transcript)
        if transcript.error is not None:
            break
    joined = join_channels(transcripts, options.known_speaker_names)
    if joined.error is None:
        for window in joined.windows:
            options.on_window(index, window)
        options.on_segments(index, joined.segments or ())
        options.on_text(index, joined.text)
    return joined


def _ignore(index: int, report: object) -> None:
    """Take a report that is made later, when speakers are known."""


def _sound_of(source: MediaSource, default: AudioSelection) -> AudioSelection:
    """Return which sound of an item is transcribed: its own options take precedence over those of the call.

    Raises:
        MediaError: an option is not one of sound, or has a wrong value.
    """
    names, chosen = [field.name for field in fields(AudioSelection)], dict[str, Any](source.options)
    with item_errors("audio", source.index):
        for name in chosen:
            if name not in names:
                reason = f"transcribe takes the options {' and '.join(names)} of a Media, not <<param>>; leave it out"
                raise InputError(reason, param=name)
        return replace(default, **chosen)


async def _transcribe_item(engine: Engine, index: int, item: object, job: _Job) -> Transcript:
    """Transcribe an item. Windows run while the item is read, so a fault may be found after some of them have run."""
    assert engine.speech is not None
    (only,) = engine.speech.languages if len(engine.speech.languages) == 1 else (None,)
    language = SpokenLanguage(job.language, None if job.language is None else 1.0, spoken=only)
    nothing, options = RequestOutput(str(index), None, [], [CompletionOutput(0, "", [], finish_reason="stop")]), job.options
    try:
        if isinstance(item, InputError):
            raise media_error(item, "audio", index)
        (source,) = engine.speech.parser().parse({"audio": [item]})["audio"]
        sound = _sound_of(source, AudioSelection(options.track, options.channel))
        if source.data is None or isinstance(source.data, EmbeddingItem):
            if options.tells_speakers:
                reason = "it is given as encoder rows, which do not tell <<param>> apart; give samples or a file"
                raise media_error(InputError(reason, param="speakers"), "audio", index)
            text = await transcribe_window(engine, WindowInput(item, None, job.words), job.decoding, language)
            transcript = _transcript(index, [text], text.output, language, job)
            options.on_window(index, text.result)
            options.on_segments(index, transcript.segments or ())
            options.on_text(index, text.result.text)
            return transcript
        warnings = list[str]()
        with closing(gate.audio_blocks(source, job.rate, engine.config.media, sound, warnings.append)) as blocks:
            detector = None if options.vad is False else make_detector(options.vad, job.rate)
            faults, diarizer = list[ErrorInfo](), None if job.speakers is None else job.speakers.diarizer()
            texts = _FinalTexts(index, options if diarizer is None else replace(options, on_segments=_ignore), job.rate)
            read_blocks = _until_fault(blocks, faults, index)
            if diarizer is not None:
                read_blocks = listening(read_blocks, diarizer, engine, job.rate)
            reader = WindowReader(read_blocks, job.rate, job.size, detector)
            if options.follows_language and not options.sequential:
                read_windows = await _read_languages(engine, reader, job, language, texts)
            elif options.sequential:
                read_windows = await _read_sequentially(engine, reader, job, language, texts)
            else:
                tasks = (partial(_transcribe_part, engine, window, job, language) for window in reader.windows())
                read_windows = await gather(tasks, job.max_concurrent_windows, texts.add)
        texts.finish()
        if faults and not reader.length:
            return _failed(faults[0], nothing, language)
        read = sum(part.result.end - part.result.start - part.result.overlap for part in read_windows)
        options.on_progress(reader.length / job.rate - read)
        if warning := reader.quiet_warning():
            warnings.append(warning)
        transcript = _transcript(index, read_windows, texts.output or nothing, language, job, reader)
        if diarizer is not None and transcript.error is None:
            transcript = add_speakers(transcript, diarizer.finish())
            options.on_segments(index, transcript.segments or ())
        return replace(transcript, warnings=tuple(warnings), error=transcript.error or next(iter(faults), None))
    except Exception as error:  # this item fails, and the others go on
        return _failed(_read_error(error, index), nothing, language)


def _read_error(error: Exception, index: int) -> ErrorInfo:
    info = error_info(error, "reading an audio")
    return info if info.modality is None else replace(info.without_item(), index=index)


def _until_fault(blocks: Iterator[Tensor], faults: list[ErrorInfo], index: int) -> Iterator[Tensor]:
    """Yield the blocks before the first one that cannot be read, and append its error to `faults`.

    The exception itself is not kept: its traceback and the list would form a reference cycle, which holds the audio.
    """
    try:
        yield from blocks
    except Exception as error:
        faults.append(_read_error(error, index))


async def _transcribe_part(
    engine: Engine, window: Window, job: _Job, language: SpokenLanguage, context: str | None = None
) -> WindowText:
    words, options = job.words if context is None else context, job.options

    async def once(part: Window) -> WindowText:
        return await transcribe_window(engine, WindowInput((part.samples, job.rate), part, words), job.decoding, language)

    async def word_times(part: Window, tokens: Sequence[int]) -> list[float] | RequestOutput:
        assert job.find_end is not None
        item, seconds = (part.samples, job.rate), len(part.samples) / job.rate
        return await job.find_end.token_times(engine, item, tokens, language.code, seconds)

    decode = engine.tokenizer.decode
    times = None if job.find_end is None else word_times
    checks_end = not options.sequential or window.next_start >= window.end
    transcriber = WindowTranscriber(job.rate, once, times, decode, lambda: language.code, checks_end)
    text = await transcriber(window)
    if not options.sequential:
        options.on_progress((window.end - window.start - window.overlap) / job.rate)
    return text


async def _read_languages(
    engine: Engine, reader: WindowReader, job: _Job, language: SpokenLanguage, texts: _FinalTexts
) -> list[WindowText]:
    """Read windows with a language each, a few at a time: their languages are detected at once and then chosen in order."""
    read_windows, windows, before = list[WindowText](), reader.windows(), None
    while part := list(islice(windows, min(_FOLLOWED, job.max_concurrent_windows))):
        languages = [replace(language) for _ in part]
        items, salt = [(window.samples, job.rate) for window in part], job.options.cache_salt
        detections = [partial(detect_language, engine, item, own, salt) for item, own in zip(items, languages, strict=True)]
        await gather(detections, len(part))  # a request that fails is made again for the text, and gives the error
        for own in languages:
            own.follow(before)
            before = own.code or before
        tasks = [partial(_transcribe_part, engine, window, job, own) for window, own in zip(part, languages, strict=True)]
        read_windows += await gather(tasks, len(part), texts.add)
    return read_windows


async def _read_sequentially(
    engine: Engine, reader: WindowReader, job: _Job, language: SpokenLanguage, texts: _FinalTexts
) -> list[WindowText]:
    """Begin each window where the last whole segment of the previous window ended: in the pause there, or before its end.

    The windows then overlap. If their texts have no words in common there, the window is read again from the quietest place
    near that end, since the end may be inside a word. If it ends before it has new text, it is read without an overlap.
    """
    read_windows: list[WindowText] = []
    before, at, overlap, is_retry, spoken = "", 0, 0, False, language.code
    while (window := reader.read(at - overlap, overlap)) is not None:
        is_conditioned = job.options.condition_on_previous_text
        context = join_texts([job.words, before[-_MAX_CONTEXT:]]) if is_conditioned else job.words
        own = replace(language, before=spoken) if job.options.follows_language else language
        text = await _transcribe_part(engine, window, job, own, context)
        spoken = own.code
        if text.output.error:
            return [*read_windows, text]
        complete = _complete_segments(text)
        is_last = window.next_start >= window.end  # silence or the end of the audio comes next
        end = window.end if is_last or not complete else window.start + round((complete[-1].end or 0.0) * job.rate)
        goes_on = is_last or end >= at + window.overlap // 2
        if window.overlap and not (goes_on and (is_retry or _share_words(read_windows[-1], text))):
            overlap = 0 if is_retry else max(0, at - _quietest(window, at, job.rate))
            is_retry = True
            continue
        is_retry = False
        if is_last or not complete:
            overlap = 0 if is_last or not text.result.text else window.end - window.next_start
            at = max(window.next_start, window.end)
        else:
            restart, overlap = _next_start(window, end, job)
            at = max(at, restart)
            text = _with_segments(text, complete, at / job.rate)
        answer = text.result.attempts[text.result.accepted]
        before = "" if answer.temperature > 0.5 else join_texts([before, text.result.text])
        job.options.on_progress(text.result.end - text.result.start - text.result.overlap)
        read_windows.append(texts.add(text))
    return read_windows


def _complete_segments(text: WindowText) -> tuple[Segment, ...]:
    """Return the segments up to the last one that has an end."""
    complete = list(text.segments or ())
    while complete and (complete[-1].end is None or complete[-1].end <= 0):
        complete.pop()
    return tuple(complete)


def _next_start(window: Window, end: int, job: _Job) -> tuple[int, int]:
    """Return the sample after which the next window brings new text, and how many samples before it this window begins.

    If a segment ends in a pause, this is the quietest place of the pause: the time of the end may be late, and the pause may
    include the soft beginning of the next word.
    """
    rate = job.rate
    for first, last in window.pauses:
        if first <= end <= last and last - first >= _PAUSE * rate:
            return _quietest_between(window, first, last, rate), 0
    return end, end - _quietest(window, end - min(round(_OVERLAP * rate), job.size // 8), rate)


def _quietest(window: Window, at: int, rate: int) -> int:
    """Return the quietest sample near another one: a window should begin between words."""
    return _quietest_between(window, at - round(_EARLY * rate), at + round(_LATE * rate), rate)


def _quietest_between(window: Window, first: int, last: int, rate: int) -> int:
    """Return the middle of the quietest 32 ms between two samples: of all up to 10 % louder, the one nearest to the middle.

    If the samples are nearer to each other than 32 ms, return their middle.
    """
    size, step = round(0.032 * rate), round(0.008 * rate)
    first, last = max(first, window.start), min(last, window.start + len(window.samples))
    near = window.samples[first - window.start : max(0, last - window.start)]
    if len(near) < size:
        return max((first + last) // 2, window.start)
    energies = near.unfold(0, size, step).square().sum(1)
    quiet = (energies <= 1.1 * energies.min()).nonzero()[:, 0]
    nearest = int(quiet[(2 * quiet - (len(energies) - 1)).abs().argmin()])
    return first + nearest * step + size // 2


def _share_words(before: WindowText, text: WindowText) -> bool:
    """Return whether two texts have words in common where their windows overlap."""
    return merge_overlap(before.result.text, text.result.text, text.result.overlap)[3] > 0


def _with_segments(text: WindowText, segments: tuple[Segment, ...], end: float) -> WindowText:
    joined = join_texts([part.text for part in segments])
    return replace(text, segments=segments, result=replace(text.result, end=end, text=joined))


def _failed(error: ErrorInfo | None, output: RequestOutput, language: SpokenLanguage) -> Transcript:
    answer = CompletionOutput(0, "", [], finish_reason="error")
    output = output if output.error else replace(output, error=error, outputs=[answer])
    return Transcript("", language.code or language.spoken, None, error, output)


def _transcript(
    index: int,
    read_windows: Sequence[WindowText],
    last: RequestOutput,
    language: SpokenLanguage,
    job: _Job,
    reader: WindowReader | None = None,
) -> Transcript:
    """Merge the windows of an item.

    Args:
        last: the output of the last window, or an empty one.
        reader: None if the item was transcribed as a whole.
    """
    failed = next((window_text.output for window_text in read_windows if window_text.output.error), None)
    if failed is not None:
        return _failed(error_of_task(failed, index), failed, language)
    rate, options = job.rate, job.options
    seconds = sum(item.seconds for item in last.items) if reader is None else reader.length / rate
    merged, final = TextMerger(), _FinalSegments(rate, options.times)
    text, parts = "", list[Segment]()
    for window_text in read_windows:
        text += merged.add(window_text.result.text, window_text.result.overlap)
        parts += final.add(window_text, seconds if reader is None else _window_end(window_text, rate))
    text, parts = text + merged.finish(), parts + final.finish()
    spoken = language.code or language.spoken or main_language([window_text.result for window_text in read_windows])
    spans = None if reader is None or options.vad is False else tuple((a / rate, b / rate) for a, b in reader.spans)
    return Transcript(
        text,
        spoken,
        tuple(parts) if options.times != "none" else None,
        None,
        last,
        language.probability,
        tuple(window_text.result for window_text in read_windows),
        spans,
        seconds,
        language.all_probabilities,
    )


def place_segment(part: Segment, text: WindowText, rate: int) -> Segment:
    """Return a segment of a window with its times in the file or stream."""
    window, silence = text.window, text.result.no_speech_prob
    if window is None:
        return replace(part, no_speech_prob=silence, language=text.result.language)
    begin, end = window.start / rate, window.end / rate
    words = part.words and tuple(replace(w, start=min(begin + w.start, end), end=min(begin + w.end, end)) for w in part.words)
    closes = None if part.end is None else round(min(begin + part.end, end), 3)
    seek = round(100 * begin)
    start = round(min(begin + part.start, end), 3)
    part = replace(part, start=start, end=closes, seek=seek, words=words)
    return replace(part, no_speech_prob=silence, language=text.result.language)
