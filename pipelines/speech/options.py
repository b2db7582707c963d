"""Options of speech recognition, for files and live streams. Each class checks its values when it is made.

`arguments` checks what a model can honour.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Literal

from ...callers.errors import InputError, hint, short_repr
from ...engine.sampling_params import SamplingParams
from ...mm.media.policy import AudioSelection
from ..validation import check_number, check_type, is_number
from .boost import read_boost
from .live_voices import LiveVoices
from .segments import Segment, WindowResult

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
NO_SPEECH = 0.6  # default of no_speech_threshold
AUTO = "auto"  # a language
_MAX_BEAMS = 32
MAX_SPEAKERS = 64
Times = Literal["none", "segment", "word"]
_TIMESTAMPS: dict[bool | str, Times] = {False: "none", True: "segment", "none": "none", "segment": "segment", "word": "word"}
_GATES = {"no_speech": (0.0, 1.0), "log_prob": (-inf, 0.0), "compression_ratio": (0.0, inf)}  # least and largest threshold


@dataclass(frozen=True)
class SpeechOptions:
    """Options that files and live streams share.

    Args:
        language: the language spoken in all items: a code, a tag ("en-US") or an English name; None detects it once per item,
            "auto" in each window.
        task: "transcribe", or "translate" into English if the model can.
        timestamps: "segment" (or True): also when each segment was spoken; "word": also each word; "none" (or False).
        boost: phrases whose tokens get a higher score, or pairs of a phrase and its weight (see `speech.boost`).
        context, prompt, hotwords: names and words to expect, or the preceding text; control tokens in them are removed.
        sampling_params: None for greedy sampling.
        vad: transcribe only speech, found by energy (True), "silero" or a function (see `pipelines.speech.vad`). False: all.
        temperature: one or several, tried in order until an answer passes. None: of `sampling_params`, or 0, 0.2, ... 1.
        no_speech_threshold: a window has no text if the probability of "no speech" is above this and the answer is below
            `log_prob_threshold`. None: not checked, as the two others.
        log_prob_threshold: an answer with a mean log probability below this is rejected.
        compression_ratio_threshold: an answer with a compression ratio above this repeats itself and is rejected.
        condition_on_previous_text: prompt with the text before a window.
        cache_salt: requests with different salts share no cache.
        speakers: tell speakers apart: True, their number, or the fewest and the most.
        speaker_model: folder of the networks that tell speakers apart (see `engine.speaker_networks`); None: in packages.
        known_speaker_names: names of speakers; of the channels if channel="each".
        known_speaker_references: a clip of the speech of each known speaker, in any form of an audio item.

    Raises:
        InputError: an option has a wrong type or value.
    """

    language: str | None = None
    task: str = "transcribe"
    timestamps: bool | str = False
    context: str = ""
    prompt: str = ""
    hotwords: str = ""
    boost: Sequence[str | tuple[str, float]] = ()
    sampling_params: SamplingParams | None = None
    vad: object = True
    temperature: float | Sequence[float] | None = None
    no_speech_threshold: float | None = NO_SPEECH
    log_prob_threshold: float | None = -1.0
    compression_ratio_threshold: float | None = 2.4
    condition_on_previous_text: bool = False
    cache_salt: str | None = None
    speakers: bool | int | Sequence[int] = False
    speaker_model: str | Path | None = None
    known_speaker_names: Sequence[str] = ()
    known_speaker_references: Sequence[object] = ()

    def __post_init__(self) -> None:
        check_type("cache_salt", self.cache_salt, str, type(None))
        check_type("condition_on_previous_text", self.condition_on_previous_text, bool)
        for name in ("hotwords", "context", "prompt"):
            check_type(name, getattr(self, name), str)
        read_boost(self.boost)
        check_type("sampling_params", self.sampling_params, SamplingParams, type(None))
        if self.sampling_params is not None and self.sampling_params.n != 1:
            n = self.sampling_params.n
            raise InputError(
                f"<<param=>>{n} is not supported by transcribe, which returns one text; leave n out",
                code="unsupported",
                param="n",
            )
        if not isinstance(self.timestamps, bool | str) or self.timestamps not in _TIMESTAMPS:
            suggestion = hint(self.timestamps, [name for name in _TIMESTAMPS if isinstance(name, str)])
            reason = f"<<param=>>{short_repr(self.timestamps)} must be True or False, or a name; {suggestion}"
            raise InputError(reason, code="unknown_name", value=self.timestamps, param="timestamps")
        if not self.temperatures or not all(is_number(temperature) and temperature >= 0 for temperature in self.temperatures):
            reason = f"<<param=>>{short_repr(self.temperature)} must be a number, 0 or above, or a list of them"
            raise InputError(reason, code="invalid_value", param="temperature")
        for name, (least, most) in _GATES.items():
            _check_threshold(f"{name}_threshold", getattr(self, f"{name}_threshold"), least, most)
        check_speakers(self.speakers)
        self._check_known_speakers()

    @property
    def times(self) -> Times:
        """The times that are requested."""
        return _TIMESTAMPS[self.timestamps]

    @property
    def params(self) -> SamplingParams:
        return self.sampling_params or GREEDY

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures to try in order."""
        if self.temperature is None:
            return TEMPERATURES if self.sampling_params is None else (self.sampling_params.temperature,)
        return tuple(self.temperature) if isinstance(self.temperature, list | tuple) else (self.temperature,)  # type: ignore[return-value]

    @property
    def follows_language(self) -> bool:
        """True if the language is detected in each window."""
        return isinstance(self.language, str) and self.language.strip().lower() == AUTO

    @property
    def boosted(self) -> tuple[tuple[str, float], ...]:
        """The phrases of `boost` with their weights."""
        return read_boost(self.boost)

    @property
    def words(self) -> str:
        """All words to expect."""
        return " ".join(filter(None, (self.hotwords, self.context, self.prompt)))

    @property
    def each_channel(self) -> bool:
        """True if each channel is one speaker."""
        return False

    @property
    def tells_speakers(self) -> bool:
        return self.speakers is not False or self.each_channel

    @property
    def speaker_limits(self) -> tuple[int, int]:
        """The fewest and the most speakers."""
        if isinstance(self.speakers, bool):
            return 1, MAX_SPEAKERS
        return (self.speakers, self.speakers) if isinstance(self.speakers, int) else (self.speakers[0], self.speakers[1])

    def _check_known_speakers(self) -> None:
        check_type("speaker_model", self.speaker_model, str, os.PathLike, type(None))
        names, clips = self.known_speaker_names, self.known_speaker_references
        for param, value in (("known_speaker_names", names), ("known_speaker_references", clips)):
            if not isinstance(value, list | tuple):
                raise InputError(f"<<param=>>{short_repr(value)} must be a list", code="invalid_value", param=param)
        if self.each_channel and self.speakers not in (False, True):
            raise InputError('channel="each" has one speaker per channel; leave <<param>> out', param="speakers")
        if (names or clips) and not self.tells_speakers:
            raise InputError("known speakers need <<param>>=True, a number or a range; give it", param="speakers")
        if not all(isinstance(name, str) and name.strip() and name.isprintable() for name in names):
            reason = f"<<param=>>{short_repr(names)} must be names of printable characters, none of them empty"
            raise InputError(reason, code="invalid_value", param="known_speaker_names")
        if len(set(names)) < len(names):
            reason = f"<<param=>>{short_repr(names)} has a name twice; give each speaker another one"
            raise InputError(reason, code="invalid_value", param="known_speaker_names")
        if len(names) > MAX_SPEAKERS:
            raise InputError(
                f"<<param>> has {len(names)} names; give at most {MAX_SPEAKERS}",
                code="over_limit",
                param="known_speaker_names",
                limit=MAX_SPEAKERS,
                value=len(names),
            )
        if self.each_channel and clips:
            raise InputError('channel="each" needs no clips of speakers; leave <<param>> out', param="known_speaker_references")
        if not self.each_channel and len(names) != len(clips):
            reason = f"there are {len(names)} known_speaker_names and {len(clips)} <<param>>; give one clip for each name"
            raise InputError(reason, code="invalid_value", param="known_speaker_references")


@dataclass(frozen=True)
class FileOptions(SpeechOptions):
    """Options of `transcribe`.

    Args:
        sequential: begin windows at the ends of segments (arXiv 2212.04356, 4.5).
        aligner: folder of a CTC model that times words; None: the model does.
        beam_size: beams at temperature 0.
        track, channel: see `AudioSelection`; those of a `Media` apply to its item instead. channel="each": each channel is
            transcribed and is one speaker.
        on_progress: called with the seconds of each finished window, and with the seconds of silence that were skipped.
        on_text, on_window: called with an item's number and more of its final text, or each of its windows before that text.
        on_segments: called with an item's number and its next final segments, with their words, before their text.
    """

    sequential: bool = False
    aligner: str | Path | None = None
    beam_size: int = 1
    track: int | str = "default"
    channel: int | str = "mix"
    on_progress: Callable[[float], None] = lambda seconds: None
    on_text: Callable[[int, str], None] = lambda index, text: None
    on_window: Callable[[int, WindowResult], None] = lambda index, window: None
    on_segments: Callable[[int, tuple[Segment, ...]], None] = lambda index, segments: None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("sequential", self.sequential, bool)
        check_type("aligner", self.aligner, str, os.PathLike, type(None))
        if self.aligner is not None and self.times != "word" and not self.tells_speakers:
            raise InputError('aligner is for <<timestamps=>>"word"; leave it out', param="aligner")
        check_beam_size(self.beam_size)
        AudioSelection(self.track, "mix" if self.channel == "each" else self.channel)
        for name in ("on_progress", "on_text", "on_window", "on_segments"):
            if not callable(function := getattr(self, name)):
                raise InputError(f"<<param=>>{short_repr(function)} must be a function", code="invalid_value", param=name)

    @property
    def each_channel(self) -> bool:
        """True if each channel is one speaker."""
        return self.channel == "each"


@dataclass(frozen=True)
class LiveOptions(SpeechOptions):
    """Options of a live stream.

    Args:
        timestamps: "segment" (or True): final events have segments; "word": also the words of these.
        condition_on_previous_text: the prompt contains the last final text, if the model's prompt takes text.
        rate: hertz of the samples; None: the model's.
        min_chunk: minimum seconds of new audio between two passes over the open window, or that a model with a causal encoder
            encodes at a time; None: 1, or 0.48 for such a model.
        pause: seconds of silence that end a window.
        max_window: seconds of the longest window; None: 30, or what the model takes.
        max_buffer_bytes: limit on the samples that no final text covers yet.
        turn_events: emit "turn_ended".
        idle_timeout: seconds without samples after which the stream ends; None: no limit.
        max_sessions: maximum number of open streams of the engine, including this one. At most `max_live_streams` and
            `max_num_seqs` of the engine if the model transcribes streams natively.
        voices: the speakers of earlier streams, who keep their labels (see `speech.live_speakers.live_voices`); `speakers` and
            the known speakers are then those with which it was made.
    """

    rate: float | None = None
    min_chunk: float | None = None
    pause: float = 1.5
    max_window: float | None = None
    max_buffer_bytes: int = 1 << 24
    turn_events: bool = False
    idle_timeout: float | None = None
    max_sessions: int = 64
    voices: LiveVoices | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("pause", self.pause, 0.1, 60.0)
        limits = {"rate": (1.0, 1e9), "min_chunk": (0.02, 60.0), "idle_timeout": (1e-3, 1e9)}
        for name, (least, most) in limits.items():
            if (value := getattr(self, name)) is not None:
                check_number(name, value, least, most)
        check_type("max_buffer_bytes", self.max_buffer_bytes, int)
        check_type("turn_events", self.turn_events, bool)
        check_type("max_sessions", self.max_sessions, int)
        check_number("max_sessions", self.max_sessions, 1, 1_000_000)
        check_type("voices", self.voices, LiveVoices, type(None))
        if self.voices is not None and not self.tells_speakers:
            raise InputError("voices of earlier streams need <<param>>; give it", param="speakers")


def check_speakers(value: object) -> None:
    """Raise InputError unless the value is a bool, a number of speakers, or the fewest and the most."""
    numbers = value if isinstance(value, list | tuple) else (value, value)
    is_range = len(numbers) == 2 and all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if not isinstance(value, bool) and not (is_range and 1 <= numbers[0] <= numbers[1] <= MAX_SPEAKERS):
        reason = f"must be True, False, a number of speakers from 1 to {MAX_SPEAKERS}, or the fewest and the most of them"
        raise InputError(f"<<param=>>{short_repr(value)} {reason}", code="invalid_value", param="speakers")


def read_speakers(text: str) -> bool | int | tuple[int, int]:
    """Read the option `speakers` of a command line or a form: "true", "false", N or MIN-MAX.

    Raises:
        InputError: another text, or numbers out of range.
    """
    words = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    parts = text.split("-")
    if not all(part.isdecimal() and len(part) < 10 for part in parts) or len(parts) > 2:
        reason = f"<<param=>>{short_repr(text)} must be a number of speakers, such as 2, or a range, such as 2-4"
        raise InputError(reason, code="invalid_value", param="speakers")
    value = int(parts[0]) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
    check_speakers(value)
    return value


def check_beam_size(size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _MAX_BEAMS:
        raise InputError(
            f"<<param=>>{short_repr(size)} must be an integer from 1 to {_MAX_BEAMS}", code="invalid_value", param="beam_size"
        )


def _check_threshold(name: str, value: object, least: float, most: float) -> None:
    check_type(name, value, float, int, type(None))
    if value is not None and not (is_number(value) and least <= value <= most):
        limits = f"from {least:g} to {most:g}" if isfinite(least + most) else f"{least:g} or above"
        limits = limits if isfinite(least) else f"{most:g} or below"
        raise InputError(f"<<param=>>{value} must be a finite number, {limits}, or None", code="invalid_value", param=name)
