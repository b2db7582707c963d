"""What families that write down speech have in common beside their sounds: languages, tasks, answers. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping

from ..mm.speech import LANGUAGES, SpeechRequest, cleaned
from .sounds import SoundInfo


class SpeechInfo(SoundInfo):
    """A SupportsTranscription but for `transcription`. `codes`: of the languages that a prompt may name."""

    codes: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("transcribe",)
    has_timestamps = False

    @property
    def languages(self) -> Mapping[str, str]:
        return {code: LANGUAGES.get(code, code) for code in self.codes}

    @property
    def longest_seconds(self) -> float:
        return self.window.longest / self.window.rate

    def detection(self) -> SpeechRequest | None:
        return None

    def transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        return cleaned(answer).strip(), language
