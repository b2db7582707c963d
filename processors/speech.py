"""What families that write down speech have in common: sounds of one window, languages, prompts. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping

from ..mm.media.policy import DecodeSpec
from ..mm.speech import LANGUAGES, SpeechRequest, cleaned
from ..mm.types import AudioItem, MediaHeader, MediaItem
from .base import FamilyInfo
from .mel import MelSpec


class SpeechInfo(FamilyInfo):
    """A FamilyInfo for sounds alone, and a SupportsTranscription but for `transcription`. `read` gives a MelSpec.

    `codes`: of the languages that a prompt may name.
    """

    modalities = ("audio",)
    known = {"audio": ()}
    codes: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("transcribe",)
    has_timestamps = False

    @property
    def mel(self) -> MelSpec:
        spec: MelSpec = self.specs["audio"]
        return spec

    def decoding(self) -> DecodeSpec:
        return DecodeSpec(rate=self.mel.rate)

    def samples(self, header: MediaHeader, least: int = 1) -> int:
        """Of a sound that the model takes; InputError for others. Decoding gives no more than its header says, but may less."""
        samples = header.samples if header.exact else min(header.samples, self.mel.longest)
        self.mel.check(samples, least)
        return samples

    @property
    def languages(self) -> Mapping[str, str]:
        return {code: LANGUAGES.get(code, code) for code in self.codes}

    @property
    def longest_seconds(self) -> float:
        return self.mel.longest / self.mel.rate

    def detection(self) -> SpeechRequest | None:
        return None

    def transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        return cleaned(answer).strip(), language


def sound(item: MediaItem) -> AudioItem:
    """TypeError for an item of another kind."""
    if not isinstance(item, AudioItem):
        raise TypeError(f"a {type(item).__name__} is no sound")
    return item
