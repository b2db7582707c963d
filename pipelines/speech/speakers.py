"""Finds the speakers of a transcript, from voices or from channels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...callers.errors import InputError
from ...engine.speaker_networks import RATE, SpeakerNetworks, load_speaker_networks
from ...mm.media import gate
from ...mm.media.audio import SampleStream
from ...mm.types import EmbeddingItem
from .clustering import Array
from .diarization import Diarizer, voice_of
from .merge import join_texts
from .options import SpeechOptions
from .results import Transcript
from .segments import Segment, SpeakerTurn
from .timeline import file_segments, with_speakers

if TYPE_CHECKING:
    from ...engine.engine import Engine

_REFERENCE_SECONDS = 60.0  # of a clip of a known speaker that are read


@dataclass(frozen=True, eq=False)
class SpeakerJob:
    """Settings and networks that all items of a call use. `known`: names of speakers, and the vector of each one's voice."""

    networks: SpeakerNetworks
    limits: tuple[int, int]
    known: tuple[tuple[str, Array], ...]

    def diarizer(self) -> Diarizer:
        return Diarizer(self.networks, self.limits, self.known)


def speaker_job(engine: Engine, options: SpeechOptions) -> SpeakerJob | None:
    """Load the networks, and read the clips of known speakers. Return None if speakers are not told apart by their voices.

    Raises:
        ConfigError, CheckpointError: there are no weights, or they are broken.
        InputError: a clip cannot be read, or has too little speech.
    """
    if options.speakers is False or options.each_channel:
        return None
    networks = load_speaker_networks(options.speaker_model)
    pairs = zip(options.known_speaker_names, options.known_speaker_references, strict=True)
    known = tuple((name, _known_voice(engine, networks, name, clip)) for name, clip in pairs)
    return SpeakerJob(networks, options.speaker_limits, known)


def _known_voice(engine: Engine, networks: SpeakerNetworks, name: str, clip: object) -> Array:
    assert engine.speech is not None
    try:
        (source,) = engine.speech.parser().parse({"audio": [clip]})["audio"]
        if source.data is None or isinstance(source.data, EmbeddingItem):
            raise InputError("it is given as encoder rows; give samples or a file")
        blocks, count = list[Tensor](), 0
        for block in gate.audio_blocks(source, RATE, engine.config.media):
            blocks.append(block)
            count += len(block)
            if count >= _REFERENCE_SECONDS * RATE:
                break
        voice = voice_of(networks, torch.cat(blocks))
    except InputError as error:
        reason = f"<<param>>: the clip of {name!r} cannot be used: {error.info.without_item().text}"
        raise InputError(reason, code=error.info.code, param="known_speaker_references") from None
    if voice is None:
        reason = f"<<param>>: the clip of {name!r} has less than half a second of speech; give 2 to 10 s"
        raise InputError(reason, code="invalid_media", param="known_speaker_references")
    return voice


def listening(blocks: Iterator[Tensor], diarizer: Diarizer, engine: Engine, rate: int) -> Iterator[Tensor]:
    """Yield the blocks, and let the diarizer hear each of them."""
    stream = None if rate == RATE else SampleStream(float(rate), RATE, engine.config.media)
    for block in blocks:
        diarizer.add(block if stream is None else converted(stream, block))
        yield block
    if stream is not None:
        diarizer.add(stream.flush())


def converted(stream: SampleStream, block: Tensor) -> Tensor:
    steps = stream.convert(block)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            samples: Tensor = end.value
            return samples


def add_speakers(transcript: Transcript, turns: tuple[SpeakerTurn, ...]) -> Transcript:
    """Return a transcript with the turns, and with the speakers of its segments and words."""
    segments = file_segments(transcript.segments or (), transcript.windows, transcript.duration)
    return replace(transcript, segments=with_speakers(segments, turns), turns=turns)


def join_channels(transcripts: Sequence[Transcript], names: Sequence[str]) -> Transcript:
    """Return one transcript of a file's channels, each of which is one speaker.

    Args:
        names: of the channels from the first one on; further ones are SPEAKER_NN, with the number of the channel.
    """
    turns, segments = list[SpeakerTurn](), list[Segment]()
    for number, transcript in enumerate(transcripts):
        name = names[number] if number < len(names) else f"SPEAKER_{number:02}"
        ended = file_segments(transcript.segments or (), transcript.windows, transcript.duration)
        spans = transcript.speech_spans
        if spans is None:
            spans = tuple((segment.start, segment.end or segment.start) for segment in ended)
        own = tuple(SpeakerTurn(start, end, name) for start, end in spans)
        turns += own
        segments += with_speakers(ended, own or (SpeakerTurn(0.0, transcript.duration, name),))
    segments.sort(key=lambda segment: (segment.start, segment.end))
    first = transcripts[0]
    spans = None if first.speech_spans is None else _union([span for one in transcripts for span in one.speech_spans or ()])
    return replace(
        first,
        text=join_texts([segment.text for segment in segments]),
        segments=tuple(replace(segment, id=number) for number, segment in enumerate(segments, 1)),
        turns=tuple(sorted(turns, key=lambda turn: (turn.start, turn.end))),
        windows=tuple(sorted((window for one in transcripts for window in one.windows), key=lambda window: window.start)),
        speech_spans=spans,
        duration=max(transcript.duration for transcript in transcripts),
        warnings=tuple(dict.fromkeys(warning for one in transcripts for warning in one.warnings)),
        error=next((one.error for one in transcripts if one.error is not None), None),
    )


def _union(spans: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    joined = list[tuple[float, float]]()
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)
