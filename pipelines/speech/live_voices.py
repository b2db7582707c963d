"""The speakers that live streams have heard, and their labels, which never change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...engine.speaker_networks import SpeakerNetworks
from .clustering import Array, assign
from .diarization import SAME, SAME_NAME, SURE, Voice, VoiceReader, cluster_voices
from .segments import SpeakerTurn

_SAME_VOICE = 0.75  # cosine of one voice of a window and the speaker whose voice it is
_SAME_UNSURE = 0.65  # the same, if little of the speaker was heard
_KNOWN_SECONDS = 10.0  # weight of the voice of a known speaker


@dataclass
class _Speaker:
    """A speaker who was heard, or whose voice is known.

    Args:
        total: sum of the voices, weighted by their seconds.
        is_sure: whether one of them had enough speech.
        name: of a known speaker. label: from the first turn on.
    """

    total: Array
    is_sure: bool
    name: str | None = None
    label: str | None = None

    @property
    def voice(self) -> Array:
        unit: Array = self.total / max(float(np.linalg.norm(self.total)), 1e-9)
        return unit

    @property
    def least(self) -> float:
        """The least cosine of a voice that is this speaker's."""
        if self.name is not None:
            return SAME_NAME
        return _SAME_VOICE if self.is_sure else _SAME_UNSURE


class LiveVoices:
    """The speakers of one or several live streams, one after the other, and their labels.

    A speaker has a label from the first turn on: the name of a known speaker, or SPEAKER_00, SPEAKER_01, ... in the order of
    first turns. It is never given to another speaker.

    Args:
        most: speakers; a voice beyond them is taken for the most similar one.
        known: names of speakers, and the vector of each one's voice.
    """

    def __init__(self, networks: SpeakerNetworks, most: int, known: Sequence[tuple[str, Array]] = ()) -> None:
        self.networks, self._most = networks, most
        self._speakers = [_Speaker(_KNOWN_SECONDS * voice, True, name) for name, voice in known]
        self._unnamed = 0  # speakers without a name who have a label

    def identify(self, reader: VoiceReader, start: float) -> tuple[SpeakerTurn, ...]:
        """Return the turns of the sound that a reader has read, in the order of their starts. `start`: its first second."""
        voices = [voice for voice in reader.voices if voice.vector is not None]
        sure = [voice for voice in voices if voice.seconds >= SURE]
        least = np.array([speaker.least for speaker in self._speakers], np.float32)
        same = assign([np.where(table >= least, table, np.nan) for table in self._similarities(reader)])
        self._add([voice for voice in sure if same[voice.window][voice.speaker] < 0], True)
        tables = [self._candidates(table) for table in self._similarities(reader)]
        self._add([voice for voice in voices if np.isnan(tables[voice.window][voice.speaker]).all()], False)
        if not self._speakers:
            return ()
        numbers = assign([self._candidates(table) for table in self._similarities(reader)])
        self._learn(sure, numbers)
        ordered = sorted(reader.turns(numbers, len(self._speakers)))
        return tuple(
            SpeakerTurn(round(start + first, 3), round(start + end, 3), self._label(number)) for first, end, number in ordered
        )

    def _similarities(self, reader: VoiceReader) -> list[Array]:
        empty = np.empty((0, self.networks.embedding.dim), np.float32)
        return reader.similarities(np.concatenate([empty, *(speaker.voice[None] for speaker in self._speakers)]))

    def _candidates(self, table: Array) -> Array:
        """Return the similarities without those of known speakers who were not heard yet and whose voice is another one."""
        least = [-1.0 if speaker.name is None or speaker.label else SAME_NAME for speaker in self._speakers]
        chosen: Array = np.where(table >= np.array(least, np.float32), table, np.float32(np.nan))
        return chosen

    def _add(self, strangers: Sequence[Voice], is_sure: bool) -> None:
        """Add the speakers of voices that are nobody else's. `is_sure`: each voice has enough speech."""
        room = self._most - sum(speaker.name is None or speaker.label is not None for speaker in self._speakers)
        if not strangers or room < 1:
            return
        for centre in cluster_voices(strangers, (1, room), 0.0):
            if all(float(centre @ speaker.voice) < SAME for speaker in self._speakers):
                self._speakers.append(_Speaker(centre * np.float32(SURE), is_sure))

    def _learn(self, sure: Sequence[Voice], numbers: Sequence[Sequence[int]]) -> None:
        """Add voices to the sums of the speakers whose they are."""
        for voice in sure:
            number = numbers[voice.window][voice.speaker]
            assert voice.vector is not None
            if number >= 0 and float(self._speakers[number].voice @ voice.vector) >= self._speakers[number].least:
                self._speakers[number].total += voice.vector.astype(np.float32) * np.float32(voice.seconds)
                self._speakers[number].is_sure = True

    def _label(self, number: int) -> str:
        speaker = self._speakers[number]
        if speaker.label is None:
            speaker.label = speaker.name or f"SPEAKER_{self._unnamed:02}"
            self._unnamed += speaker.name is None
        return speaker.label
