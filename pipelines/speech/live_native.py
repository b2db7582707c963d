"""Live transcription by models with a causal encoder: each chunk is encoded once, and its text is never taken back."""

from __future__ import annotations

import secrets
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...callers.errors import ConfigError, InputError
from ...engine.builtin_logits_processors import BOOST_PHRASES
from ...engine.config import MAX_STREAM_ROWS
from ...engine.frontend.arguments import unknown_argument
from ...engine.frontend.processed_prompt import ProcessedPrompt
from ...engine.frontend.request import RequestInput
from ...engine.frontend.request_handle import RequestHandle
from ...engine.outputs import RequestOutput
from ...engine.session import Turn
from ...mm.types import ItemGeometry, MultiModalFeature, PlaceholderRange
from ..run import Task, answer, append
from ..validation import check_number
from .arguments import check_model, check_options, expected_words, known_language
from .boost import boost_arguments
from .decode import FATAL
from .live_input import STEP_SECONDS, LiveInput
from .live_windows import LiveWindows
from .options import LiveOptions

if TYPE_CHECKING:
    from ...engine.engine import Engine

_REFUSED = ("stop", "stop_token_ids", "repetition_detection", "structured_outputs")  # they end an answer before its rows do
_UNKNOWN = (  # options that have no meaning for a model that writes while it hears
    *("timestamps", "prompt", "hotwords", "temperature", "condition_on_previous_text"),
    *("no_speech_threshold", "log_prob_threshold", "compression_ratio_threshold"),
)
_RESERVE = 256  # rows of a sequence for its last chunks
_MIN_CHUNK, _MAX_WINDOW = 0.48, 30.0  # seconds


class NativeTranscriber(LiveInput):
    """Transcribes a live stream row by row. A sequence is held open while samples arrive; a long one ends in a pause.

    The text is final after `pause` seconds without text, or at the next word after `max_window` seconds. The sequence ends
    after `pause` seconds without speech.

    Raises:
        ConfigError: the model does not transcribe speech, or `max_model_len` has no room for a stream.
        InputError: this model cannot honour an option, or the engine has no encoder.
    """

    def __init__(self, engine: Engine, options: LiveOptions) -> None:
        rate = check_model(engine, options.task)
        rule = None if engine.speech is None else engine.speech.stream_rule()
        assert rule is not None
        self._rule, self._row = rule, rule.row_samples
        if not engine.config.encodes("audio"):
            raise InputError(
                "this model's encoder keeps the state of a stream, but this engine has none (parts)", code="unsupported"
            )
        for option in fields(options):
            if option.name in _UNKNOWN and getattr(options, option.name) != option.default:
                raise unknown_argument(option.name, [other.name for other in fields(options) if other.name not in _UNKNOWN])
        if options.tells_speakers:
            reason = "this model's live text has no times of words, so that it is not known who says what; leave <<param>> out"
            raise InputError(reason, code="unsupported", param="speakers")
        check_options(engine, options)
        self._params = replace(options.params, max_tokens=None, ignore_eos=True)
        refused = next((name for name in _REFUSED if getattr(self._params, name)), None)
        if refused is not None:
            reason = f"sampling_params.{refused} would end a stream before its audio does; leave it out"
            raise InputError(reason, param=f"sampling_params.{refused}")
        max_window = _MAX_WINDOW if options.max_window is None else options.max_window
        check_number("max_window", max_window, 0.5, 3600.0)
        known_language(engine, options)
        expected_words(engine, options)
        if (boost := boost_arguments(engine, options.boosted)) is not None:
            self._params = replace(self._params, logits_processors={**self._params.processors, BOOST_PHRASES: boost})
        least = 8 * (rule.before + rule.max_rows * self._row)
        if options.max_buffer_bytes < least:
            reason = f"<<param=>>{options.max_buffer_bytes} must be {least:,} or more: two chunks"
            raise InputError(reason, code="invalid_value", param="max_buffer_bytes")
        super().__init__(engine, rate, options)
        rows = round((options.min_chunk or _MIN_CHUNK) * rate / self._row)
        self._chunk_rows = min(max(1, rows), rule.max_rows)
        self._pause, self._max_window = round(options.pause * rate), round(max_window * rate)
        self._max_rows = min(rule.max_tokens, engine.max_model_len) - _RESERVE
        needed = len(rule.prompt) + self._chunk_rows
        if self._max_rows < needed:
            reason = f"a stream takes {needed + _RESERVE} tokens or more, but <<param>> is {engine.max_model_len}; raise it"
            raise ConfigError(reason, param="max_model_len")
        self._salt = options.cache_salt or ""
        self._is_speaking = False
        self._windows = LiveWindows(rate, self._max_rows * self._row, self._pause, options.vad)
        self._speech_end = 0
        self._begin(0)

    def _begin(self, at: int) -> None:
        """Prepare a sequence that begins with the sample `at` of the stream."""
        self._origin = self._taken = at
        self._buffer = torch.zeros(self._rule.before)
        self._rows = self._read = 0  # rows of the chunks, and generated tokens
        self._stream_id, self.handle = secrets.randbits(62), None
        self._tokens: list[int] = []  # of the open text
        self._text_start = self._text_end = at  # samples
        self._shown = ""

    @property
    def _num_samples(self) -> int:
        return self._windows.num_samples + len(self._buffer) - (0 if self._rows else self._rule.before)

    def next_task(self) -> Task[None] | None:
        stop = self._windows.length + round(STEP_SECONDS * self._rate)
        while not self.ended:
            self.busy = self._windows.length >= stop
            if self.busy:
                return None
            at_break = bool(self._queue) and not isinstance(self._queue[0], Tensor)
            is_open = self._taken > self._origin
            least = self._rule.max_rows if self._queue else self._chunk_rows if self._rows else len(self._rule.prompt) + 1
            if self._ready_rows() >= least:
                return self._next_chunk
            if is_open and self._windows.length - self._speech_end >= self._pause:
                return self._last_chunks
            if self._windows.classify(last=at_break):
                self._take_speech()
            elif not self._take_samples(self._windows):
                if not at_break:
                    return None
                if is_open:
                    return self._last_chunks
                self._take_break(self._windows)
        return None

    def _take_speech(self) -> None:
        """Move classified samples to the buffer, from the start of speech until the sequence ends."""
        windows = self._windows
        start = windows.start
        if start is not None:
            self._speech_end = windows.speech_end
            if self._taken == self._origin:
                self._begin(start)
        if start is not None or self._taken > self._origin:
            self._buffer = torch.cat([self._buffer, windows.samples(max(windows.begin, self._taken), windows.length)])
            self._taken = windows.length
            windows.drop(windows.length)

    def _ready_rows(self) -> int:
        return max(0, len(self._buffer) - self._rule.overlap) // self._row

    async def _next_chunk(self) -> None:
        await self._transcribe(min(self._ready_rows(), self._rule.max_rows), False)
        is_quiet = not self._tokens
        if self._rows > self._max_rows or (self._rows > min(MAX_STREAM_ROWS, self._max_rows // 2) and is_quiet):
            await self._last_chunks()

    async def _last_chunks(self) -> None:
        """Transcribe the rest of the sequence, and the silence after it."""
        silence = (self._origin - self._taken) % self._row + self._rule.after
        self._buffer = torch.cat([self._buffer, torch.zeros(silence)])
        while self._rows or self._ready_rows():
            rows = self._ready_rows()
            is_last = rows <= self._rule.max_rows
            await self._transcribe(min(rows, self._rule.max_rows), is_last)
            if is_last or self.handle is None:  # None: an error has ended the sequence
                break
        self._finish_text(self._taken)
        if self._is_speaking:
            self._is_speaking = False
            self._emit("speech_stopped", self._taken, self._taken)
            self._end_turn(self._taken)
        self._begin(self._taken)

    async def _transcribe(self, rows: int, is_last: bool) -> None:
        """Encode the next rows and generate their tokens."""
        size, prompt = rows * self._row, self._rule.prompt
        samples = self._buffer[: size + self._rule.overlap]
        kwargs = self._rule.item(samples, self._stream_id, self._rows, self._engine.dtype)
        where, ahead = PlaceholderRange(self._rows, rows), rows - (0 if self._rows else len(prompt))
        key = f"{self._stream_id:016x}{self._rows:016x}".ljust(64, "0")
        feature = MultiModalFeature("audio", kwargs, where, ItemGeometry(rows, 1, 1, linear=True, ahead=ahead), key)
        if self.handle is None:
            made = ProcessedPrompt(None, prompt, (feature,), salt=self._salt)
            self.handle = RequestHandle(RequestInput(lambda: made, self._params, hold_open=not is_last))
            output = await answer(self.handle)
        else:
            output = await append(Turn(self.handle, (feature,), is_last))
        self._buffer = self._buffer[size:].clone()
        self._rows += rows
        self._read_output(output)

    def _read_output(self, output: RequestOutput) -> None:
        if output.error is not None:
            if output.error.code in FATAL:
                raise output.error.exception()
            self._finish_text(self._taken)
            self._emit("final", self._taken, self._taken, error=output.error)
            self._begin(self._taken)
            return
        for token in output.outputs[0].token_ids:
            self._read_token(token)
        text = self._text()
        if text != self._shown:
            self._shown = text
            self._emit("partial", self._text_start, self._text_end, text, len(text))

    def _read_token(self, token: int) -> None:
        at = self._origin + max(0, len(self._rule.prompt) + self._read) * self._row - self._rule.before
        at = min(max(self._origin, at - self._rule.delay * self._row), self._taken)
        self._read += 1
        if token != self._rule.silent:
            if not self._tokens:
                self._text_start = at
            if not self._is_speaking:
                self._is_speaking = True
                self._emit("speech_started", at, at)
            self._tokens.append(token)
            self._text_end = min(at + self._row, self._taken)
        elif at - self._text_end >= self._pause:
            if self._is_speaking:
                self._is_speaking = False
                self._emit("speech_stopped", self._text_end, self._text_end)
            self._finish_text(self._text_end)
        elif at - self._text_start >= self._max_window:
            self._finish_text(self._text_end)

    def _text(self) -> str:
        assert self._engine.speech is not None
        return self._engine.speech.parse_transcript(self._engine.tokenizer.decode(self._tokens, False), None)[0]

    def _finish_text(self, end: int) -> None:
        text = self._text()
        if text:
            self._emit("final", self._text_start, end, text, len(text))
        self._tokens, self._shown = [], ""
        self._end_turn(end)
