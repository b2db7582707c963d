"""Transcribes audio of any length, with language and timestamps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engine.errors import error_info
from ..engine.sampling_params import SamplingParams
from ..engine.types import CompletionOutput, RequestOutput
from ..mm.errors import ErrorInfo, InputError, short_repr
from ..mm.media import gate
from ..mm.speech import SpeechRequest
from ..mm.types import EmbeddingItem, MediaHeader
from .speech.arguments import (
    NO_SPEECH,
    check_beams,
    check_gates,
    check_language,
    check_mode,
    check_model,
    check_sampling,
    check_vad,
    check_words,
)
from .speech.decode import Aligner, Decoding, SpokenLanguage, WindowText, window_task
from .speech.forced_alignment import CtcAligner
from .speech.frames import FrameAligner
from .speech.merge import TextMerger, merge_overlap
from .speech.results import Attempt, Segment, Transcript, TranscriptionInfo, WindowResult, Word, segments
from .speech.skipped import WindowTranscriber, merge_texts
from .speech.vad import make_detector
from .speech.windows import Window, WindowReader
from .speech.word_times import AttentionAligner
from .speech.words import put_in_order
from .tasks import Task, WideTask, error_of_task, join
from .validation import as_items, check_type

if TYPE_CHECKING:
    from ..engine.llm import LLM

__all__ = ["Attempt", "Segment", "Transcript", "TranscriptionInfo", "WindowResult", "Word", "segments", "transcribe_tasks"]
_MAX_WINDOW = 60  # seconds; many windows are in memory at a time
_MAX_CONTEXT = 800  # characters of preceding text in a prompt
_OVERLAP = 2.0  # seconds that two sequential windows share if they are cut inside speech
_PAUSE = 0.3  # minimum seconds of a pause in which they share none
_EARLY, _LATE = 0.6, 0.2  # seconds before and after a place inside speech in which such a window begins


@dataclass(frozen=True)
class _Options:
    """Options of one call. `size`: samples of the longest window. `max_concurrent_windows`: limit for one file."""

    decoding: Decoding
    language: str | None
    context: str
    vad: object
    sequential: bool
    condition: bool
    timestamps: str
    rate: int
    size: int
    max_concurrent_windows: int
    on_progress: Callable[[float], None]
    on_text: Callable[[int, str], None]
    on_window: Callable[[int, WindowResult], None]
    find_end: AttentionAligner | None


def transcribe_tasks(
    llm: LLM,
    audio: object,
    language: str | None = None,
    task: str = "transcribe",
    timestamps: bool | str = False,
    context: str = "",
    sampling_params: SamplingParams | None = None,
    prompt: str = "",
    hotwords: str = "",
    vad: object = True,
    temperature: float | Sequence[float] | None = None,
    no_speech_threshold: float | None = NO_SPEECH,
    log_prob_threshold: float | None = -1.0,
    compression_ratio_threshold: float | None = 2.4,
    sequential: bool = False,
    condition_on_previous_text: bool = False,
    aligner: str | Path | None = None,
    beam_size: int = 1,
    cache_salt: str | None = None,
    on_progress: Callable[[float], None] = lambda seconds: None,
    on_text: Callable[[int, str], None] = lambda index, text: None,
    on_window: Callable[[int, WindowResult], None] = lambda index, window: None,
) -> list[WideTask[Transcript]]:
    """Return one task per audio item, in order; they run as one batch. A failed item gives a Transcript with `error`.

    Args:
        audio: an item or a list of items: paths, URLs, encoded bytes, samples at the model's rate, or `(samples, rate)`.
        language: the language spoken in all items, as a code or an English name; None detects it if the model can.
        task: "transcribe", or "translate" into English if the model can.
        timestamps: "segment" (or True): also when each segment was spoken; "word": also each word; "none" (or False).
        context, prompt, hotwords: names and words to expect, or the preceding text; control tokens in them are removed.
        sampling_params: None for greedy sampling. beam_size: beams at temperature 0.
        vad: transcribe only speech, found by energy (True), "silero" or a function (see `pipelines.speech.vad`). False: all.
        temperature: one or several, tried in order until an answer passes. None: of `sampling_params`, or 0, 0.2, ... 1.
        no_speech_threshold, log_prob_threshold, compression_ratio_threshold: see `Decoding`; None: not checked.
        sequential: begin each window at the end of the last whole segment (arXiv 2212.04356, section 4.5), and with
            condition_on_previous_text, prompt it with the text before it.
        on_progress: called with the seconds of each finished window, and with the seconds of silence that were skipped.
        on_text, on_window: called with an item's number and more of its final text, or each of its windows before that text.
        aligner: folder of a CTC model that times words; None: the model does. cache_salt: different salts share no cache.

    Raises:
        ConfigError: the model does not transcribe speech. InputError: an argument is invalid, or this model cannot honour it.
    """
    items = as_items("audio", audio, "audio")
    rate = check_model(llm, task)
    times = check_mode(llm, timestamps, sequential, condition_on_previous_text, aligner)
    words = check_words(llm, {"hotwords": hotwords, "context": context, "prompt": prompt})
    check_vad(vad, rate)
    _check_types(cache_salt, aligner, on_progress=on_progress, on_text=on_text, on_window=on_window)
    gates = check_gates(llm, no_speech_threshold, log_prob_threshold, compression_ratio_threshold)
    align = _make_aligner(llm, task, aligner, cache_salt) if times == "word" else None
    rules = *check_sampling(llm, sampling_params, temperature), *gates, align, check_beams(llm, beam_size)
    decoding = Decoding(partial(make_request, llm, task, sequential or times != "none"), *rules, cache_salt)
    windows = max(1, -(-2 * llm.config.max_num_seqs // max(1, len(items))))
    mode = (vad, sequential, condition_on_previous_text, times, rate, window_size(llm), windows)
    reports = (on_progress, on_text, on_window, _end_finder(llm, task, cache_salt))
    options = _Options(decoding, check_language(llm, language, task), words, *mode, *reports)
    return [_file_task(llm, i, item, options) for i, item in enumerate(items)]


def _check_types(cache_salt: object, aligner: object, **functions: object) -> None:
    check_type("cache_salt", cache_salt, str, type(None))
    check_type("aligner", aligner, str, os.PathLike, type(None))
    for name, function in functions.items():
        if not callable(function):
            raise InputError(f"{name}={short_repr(function)} must be a function", param=name)


def _make_aligner(llm: LLM, task: str, folder: str | Path | None, cache_salt: str | None) -> Aligner:
    assert llm.speech is not None
    frames = llm.speech.frame_rule()
    if folder is None and frames is not None:
        return FrameAligner(frames)
    own = _end_finder(llm, task, cache_salt) if folder is None else None
    return own or CtcAligner(Path(folder or ""), llm.speech.decode_spec.rate)


def _end_finder(llm: LLM, task: str, cache_salt: str | None) -> AttentionAligner | None:
    assert llm.speech is not None
    rule = llm.speech.alignment()
    return None if rule is None else AttentionAligner(rule, partial(make_request, llm, task, False), cache_salt)


def make_request(llm: LLM, task: str, timed: bool, language: str | None, context: str) -> SpeechRequest:
    assert llm.speech is not None
    return llm.speech.transcription_request(language, task, timed and llm.speech.has_timestamps, context)


def window_size(llm: LLM) -> int:
    """Return the samples of the longest window: the model's limit or `_MAX_WINDOW`, or less to leave room for the answer."""
    assert llm.speech is not None
    spec = llm.speech.decode_spec
    size = min(spec.max_audio_samples or _MAX_WINDOW * spec.rate, _MAX_WINDOW * spec.rate)
    if "audio" in llm.speech.placeholder_ids:
        while llm.speech.geometry(MediaHeader("audio", samples=size)).num_embeds > llm.max_model_len // 2 and size > spec.rate:
            size //= 2
    return size


class _FinalTexts:
    """Reports an item's windows, which come in order, and their text as soon as it is final.

    Attributes:
        output: the output of the last window, or None if there is none yet.
    """

    def __init__(self, report: Callable[[str], None], report_window: Callable[[WindowResult], None]) -> None:
        self._report, self._report_window, self._merger = report, report_window, TextMerger()
        self.output: RequestOutput | None = None

    def add(self, one: WindowText) -> WindowText:
        """Report a window. Return its text without samples and tokens, so that memory does not grow with the audio."""
        self._report_window(one.result)
        self._send(self._merger.add(one.result.text, one.result.overlap))
        if one.window is None or one.window.next_start >= one.window.end:
            self.finish()
        self.output, output = one.output, RequestOutput(one.output.request_id, None, [], [])
        window = one.window and replace(one.window, samples=torch.empty(0), pauses=())
        return replace(one, window=window, output=one.output if one.output.error else output, token_times=None)

    def finish(self) -> None:
        self._send(self._merger.finish())

    def _send(self, text: str) -> None:
        if text:
            self._report(text)


def _file_task(llm: LLM, index: int, item: object, options: _Options) -> WideTask[Transcript]:
    """Transcribe an item. Windows run while the item is read, so a fault may be found after some of them have run."""
    assert llm.speech is not None
    language = SpokenLanguage(options.language, None if options.language is None else 1.0)
    nothing = RequestOutput(str(index), None, [], [CompletionOutput(0, "", [], finish_reason="stop")])
    try:
        (source,) = llm.speech.parser().parse({"audio": [item]})["audio"]
        if source.data is None or isinstance(source.data, EmbeddingItem):
            text = yield from window_task(llm, item, None, options.rate, options.decoding, language, options.context)
            found = [text]
            options.on_window(index, text.result)
            options.on_text(index, text.result.text)
            return _transcript(index, found, text.output, language, options, None)
        with closing(gate.audio_blocks(source, options.rate, llm.config.media)) as blocks:
            detector = None if options.vad is False else make_detector(options.vad, options.rate)
            faults = list[ErrorInfo]()
            texts = _FinalTexts(partial(options.on_text, index), partial(options.on_window, index))
            reader = WindowReader(_until_fault(blocks, faults, index), options.rate, options.size, detector)
            if options.sequential:
                found = yield from _read_sequentially(llm, reader, options, language, texts)
            else:
                tasks = (_task_of(llm, window, options, language) for window in reader.windows())
                found = yield from join(tasks, options.max_concurrent_windows, texts.add)
        texts.finish()
        if faults and not reader.length:
            return _failed(faults[0], nothing, language)
        read = sum(one.result.end - one.result.start - one.result.overlap for one in found)
        options.on_progress(reader.length / options.rate - read)
        return _transcript(index, found, texts.output or nothing, language, options, reader, next(iter(faults), None))
    except Exception as error:  # this item fails, and the others go on
        return _failed(_read_error(error, index), nothing, language)


def _read_error(error: Exception, index: int) -> ErrorInfo:
    info = error_info(error, "reading an audio")
    return info if info.modality is None else replace(info, message=info.reason, index=index)


def _until_fault(blocks: Iterator[Tensor], faults: list[ErrorInfo], index: int) -> Iterator[Tensor]:
    """Yield the blocks before the first one that cannot be read, and append its error to `faults`.

    The exception itself is not kept: its traceback and the list would form a reference cycle, which holds the audio.
    """
    try:
        yield from blocks
    except Exception as error:
        faults.append(_read_error(error, index))


def _task_of(
    llm: LLM, window: Window, options: _Options, language: SpokenLanguage, context: str | None = None
) -> WideTask[WindowText]:
    words = options.context if context is None else context

    def once(part: Window) -> WideTask[WindowText]:
        item = (part.samples, options.rate)
        return window_task(llm, item, part, options.rate, options.decoding, language, words)

    def word_times(part: Window, tokens: Sequence[int]) -> Task[list[float] | RequestOutput]:
        assert options.find_end is not None
        item, seconds = (part.samples, options.rate), len(part.samples) / options.rate
        return options.find_end.token_times(llm, item, tokens, language.code, seconds)

    decode = llm.get_tokenizer().decode
    times = None if options.find_end is None else word_times
    checks_end = not options.sequential or window.next_start >= window.end
    transcriber = WindowTranscriber(options.rate, once, times, decode, lambda: language.code, checks_end)
    text = yield from transcriber(window)
    if not options.sequential:
        options.on_progress((window.end - window.start - window.overlap) / options.rate)
    return text


def _read_sequentially(
    llm: LLM, reader: WindowReader, options: _Options, language: SpokenLanguage, texts: _FinalTexts
) -> WideTask[list[WindowText]]:
    """Begin each window where the last whole segment of the previous window ended: in the pause there, or before its end.

    The windows then overlap. If their texts have no words in common there, the window is read again from the quietest place
    near that end, since the end may be inside a word. If it ends before it has new text, it is read without an overlap.
    """
    found: list[WindowText] = []
    before, at, overlap, is_retry = "", 0, 0, False
    while (window := reader.read(at - overlap, overlap)) is not None:
        context = f"{options.context} {before[-_MAX_CONTEXT:]}".strip() if options.condition else options.context
        text = yield from _task_of(llm, window, options, language, context)
        if text.output.error:
            return [*found, text]
        whole = _whole_segments(text, window, options.rate)
        is_last = window.next_start >= window.end  # silence or the end of the audio comes next
        end = window.end if is_last or not whole else window.start + round((whole[-1].end or 0.0) * options.rate)
        goes_on = is_last or end >= at + window.overlap // 2
        if window.overlap and not (goes_on and (is_retry or _share_words(found[-1], text))):
            overlap = 0 if is_retry else max(0, at - _quietest(window, at, options.rate))
            is_retry = True
            continue
        is_retry = False
        if is_last or not whole:
            overlap = 0 if is_last or not text.result.text else window.end - window.next_start
            at = max(window.next_start, window.end)
        else:
            place, overlap = _next_start(window, end, options)
            at = max(at, place)
            text = _with_segments(text, whole, at / options.rate)
        answer = text.result.attempts[text.result.accepted]
        before = "" if answer.temperature > 0.5 else f"{before} {text.result.text}"
        options.on_progress(text.result.end - text.result.start - text.result.overlap)
        found.append(texts.add(text))
    return found


def _whole_segments(text: WindowText, window: Window, rate: int) -> tuple[Segment, ...]:
    """Return the segments up to the last one that has an end."""
    found = list(text.segments or ())
    while found and (found[-1].end is None or found[-1].end <= 0):
        found.pop()
    return tuple(found)


def _next_start(window: Window, end: int, options: _Options) -> tuple[int, int]:
    """Return the sample after which the next window brings new text, and how many samples before it this window begins.

    If a segment ends in a pause, this is the quietest place of the pause: the time of the end may be late, and the pause may
    include the soft beginning of the next word.
    """
    rate = options.rate
    for first, last in window.pauses:
        if first <= end <= last and last - first >= _PAUSE * rate:
            return _quietest_between(window, first, last, rate), 0
    return end, end - _quietest(window, end - min(round(_OVERLAP * rate), options.size // 8), rate)


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
    joined = " ".join(part.text for part in segments if part.text)
    return replace(text, segments=segments, result=replace(text.result, end=end, text=joined))


def _failed(error: ErrorInfo | None, output: RequestOutput, language: SpokenLanguage) -> Transcript:
    answer = CompletionOutput(0, "", [], finish_reason="error")
    output = output if output.error else replace(output, error=error, outputs=[answer])
    return Transcript("", language.code or language.spoken, None, error, output)


def _transcript(
    index: int,
    found: Sequence[WindowText],
    last: RequestOutput,
    language: SpokenLanguage,
    options: _Options,
    reader: WindowReader | None,
    error: ErrorInfo | None = None,
) -> Transcript:
    """Merge the windows of an item.

    Args:
        last: the output of the last window, or an empty one.
        reader: None if the item was transcribed as a whole.
        error: why the item could not be read to its end.
    """
    failed = next((one.output for one in found if one.output.error), None)
    if failed is not None:
        return _failed(error_of_task(failed, index), failed, language)
    rate = options.rate
    placed = [[place_segment(part, one, rate) for part in one.segments or ()] for one in found]
    texts = [(one.result.text, own, one.result.overlap) for one, own in zip(found, placed, strict=True)]
    merged, parts = merge_texts(texts)
    seconds = sum(item.seconds for item in last.items) if reader is None else reader.length / rate
    if options.timestamps == "word":
        parts = put_in_order(parts, seconds)
    spans = None if reader is None or options.vad is False else tuple((a / rate, b / rate) for a, b in reader.spans)
    return Transcript(
        merged,
        language.code or language.spoken,
        tuple(replace(part, id=number) for number, part in enumerate(parts, 1)) if options.timestamps != "none" else None,
        error,
        last,
        language.probability,
        tuple(one.result for one in found),
        spans,
        seconds,
        language.all_probabilities,
    )


def place_segment(part: Segment, text: WindowText, rate: int) -> Segment:
    """Return a segment of a window with its times in the file or stream."""
    window, silence = text.window, text.result.no_speech_prob
    if window is None:
        return replace(part, no_speech_prob=silence)
    begin, end = window.start / rate, window.end / rate
    words = part.words and tuple(replace(w, start=min(begin + w.start, end), end=min(begin + w.end, end)) for w in part.words)
    closes = None if part.end is None else round(min(begin + part.end, end), 3)
    seek = round(100 * begin)
    start = round(min(begin + part.start, end), 3)
    return replace(part, start=start, end=closes, seek=seek, no_speech_prob=silence, words=words)
