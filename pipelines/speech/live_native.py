"""Live transcription by models with a causal encoder: each chunk is encoded once, and its text is never taken back."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...engine.config import MAX_STREAM_ROWS
from ...engine.frontend.processed_prompt import ProcessedPrompt
from ...engine.frontend.request_handle import RequestHandle
from ...engine.sampling_params import SamplingParams
from ...engine.session import Turn
from ...engine.types import RequestOutput
from ...mm.errors import ConfigError, InputError
from ...mm.types import ItemGeometry, MultiModalFeature, PlaceholderRange
from ..tasks import Task
from ..validation import check_type
from .arguments import check_language, check_model, check_number, check_sampling, check_vad, check_words
from .decode import FATAL
from .live_input import STEP_SECONDS, LiveInput
from .live_windows import LiveWindows

if TYPE_CHECKING:
    from ...engine.llm import LLM

_REFUSED = ("stop", "stop_token_ids", "repetition_detection", "structured_outputs")  # they end an answer before its rows do
_RESERVE = 256  # rows of a sequence for its last chunks


class NativeTranscriber(LiveInput):
    """Transcribes a live stream row by row. A sequence is held open while samples arrive; a long one ends in a pause.

    Args:
        rate, language, task, context, vad, max_buffer_bytes, turn_events, cache_salt: see `LiveTranscriber`.
        sampling_params: None for greedy sampling.
        min_chunk: seconds of audio that are encoded at a time.
        pause: seconds without text after which the text is final, and without speech after which the sequence ends.
        max_window: seconds after which the text is final at the next word.

    Raises:
        ConfigError: the model does not transcribe speech, or `max_model_len` has no room for a stream.
        InputError: an argument that is invalid, or that this model cannot honour.
    """

    def __init__(
        self,
        llm: LLM,
        rate: float | None = None,
        language: str | None = None,
        task: str = "transcribe",
        context: str = "",
        vad: object = True,
        sampling_params: SamplingParams | None = None,
        min_chunk: float = 0.48,
        pause: float = 1.5,
        max_window: float = 30.0,
        max_buffer_bytes: int = 1 << 24,
        turn_events: bool = False,
        cache_salt: str | None = None,
    ) -> None:
        model_rate = check_model(llm, task)
        rule = None if llm.speech is None else llm.speech.stream_rule()
        assert rule is not None
        self._rule, self._row = rule, rule.row_samples
        self._params = replace(check_sampling(llm, sampling_params, None)[0], max_tokens=None, ignore_eos=True)
        refused = next((name for name in _REFUSED if getattr(self._params, name)), None)
        if refused is not None:
            reason = f"sampling_params.{refused} would end a stream before its audio does; leave it out"
            raise InputError(reason, param=f"sampling_params.{refused}")
        check_number("min_chunk", min_chunk, 0.02, 60.0)
        check_number("pause", pause, 0.1, 60.0)
        check_number("max_window", max_window, 0.5, 3600.0)
        check_type("max_buffer_bytes", max_buffer_bytes, int)
        check_vad(vad, model_rate)
        check_language(llm, language, task)
        check_words(llm, {"context": context})
        check_type("cache_salt", cache_salt, str, type(None))
        least = 8 * (rule.before + rule.max_rows * self._row)
        if max_buffer_bytes < least:
            reason = f"max_buffer_bytes={max_buffer_bytes} must be {least:,} or more: two chunks"
            raise InputError(reason, param="max_buffer_bytes")
        super().__init__(llm, model_rate, rate, max_buffer_bytes, turn_events)
        rows = round(min_chunk * model_rate / self._row)
        self._chunk_rows = min(max(1, rows), rule.max_rows)
        self._pause, self._max_window = round(pause * model_rate), round(max_window * model_rate)
        self._max_rows = min(rule.max_tokens, llm.max_model_len) - _RESERVE
        needed = len(rule.prompt) + self._chunk_rows
        if self._max_rows < needed:
            reason = f"a stream takes {needed + _RESERVE} tokens or more, but max_model_len is {llm.max_model_len}; raise it"
            raise ConfigError(reason, param="max_model_len")
        self._salt = cache_salt or ""
        self._is_speaking = False
        self._windows = LiveWindows(model_rate, self._max_rows * self._row, self._pause, vad)
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
    def _held(self) -> int:
        return self._windows.held + len(self._buffer) - (0 if self._rows else self._rule.before)

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
                return self._next_chunk()
            if is_open and self._windows.length - self._speech_end >= self._pause:
                return self._last_chunks()
            if self._windows.classify(last=at_break):
                self._take_speech()
            elif not self._take_samples(self._windows):
                if not at_break:
                    return None
                if is_open:
                    return self._last_chunks()
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

    def _next_chunk(self) -> Task[None]:
        yield from self._transcribe(min(self._ready_rows(), self._rule.max_rows), False)
        is_quiet = not self._tokens
        if self._rows > self._max_rows or (self._rows > min(MAX_STREAM_ROWS, self._max_rows // 2) and is_quiet):
            yield from self._last_chunks()

    def _last_chunks(self) -> Task[None]:
        """Transcribe the rest of the sequence, and the silence after it."""
        silence = (self._origin - self._taken) % self._row + self._rule.after
        self._buffer = torch.cat([self._buffer, torch.zeros(silence)])
        while self._rows or self._ready_rows():
            rows = self._ready_rows()
            is_last = rows <= self._rule.max_rows
            yield from self._transcribe(min(rows, self._rule.max_rows), is_last)
            if is_last or self.handle is None:  # None: an error has ended the sequence
                break
        self._finish_text(self._taken)
        if self._is_speaking:
            self._is_speaking = False
            self._emit("speech_stopped", self._taken, self._taken)
            self._end_turn(self._taken)
        self._begin(self._taken)

    def _transcribe(self, rows: int, is_last: bool) -> Task[None]:
        """Encode the next rows and generate their tokens."""
        size, prompt = rows * self._row, self._rule.prompt
        samples = self._buffer[: size + self._rule.overlap]
        kwargs = self._rule.item(samples, self._stream_id, self._rows, self._llm.dtype)
        where, ahead = PlaceholderRange(self._rows, rows), rows - (0 if self._rows else len(prompt))
        key = f"{self._stream_id:016x}{self._rows:016x}".ljust(64, "0")
        feature = MultiModalFeature("audio", kwargs, where, ItemGeometry(rows, 1, 1, linear=True, ahead=ahead), key)
        if self.handle is None:
            made = ProcessedPrompt(None, prompt, (feature,), item_of=(0,), salt=self._salt)
            self.handle = RequestHandle(lambda: made, self._params, keep=not is_last)
            output = yield self.handle
        else:
            output = yield Turn(self.handle, (feature,), is_last)  # type: ignore[misc]
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
        assert self._llm.speech is not None
        return self._llm.speech.parse_transcript(self._llm.get_tokenizer().decode(self._tokens, False), None)[0]

    def _finish_text(self, end: int) -> None:
        text = self._text()
        if text:
            self._emit("final", self._text_start, end, text, len(text))
        self._tokens, self._shown = [], ""
        self._end_turn(end)
