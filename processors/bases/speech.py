"""Mixin of audio families that transcribe speech: languages, tasks, and parsing of an answer."""

from __future__ import annotations

from collections.abc import Mapping

from ...mm.speech import LANGUAGES, AlignmentRule, SpeechRequest, strip_control_tokens


class SpeechMixin:
    """The defaults of SupportsTranscription, except `transcription_request`, for a subclass of AudioInfo.

    `language_codes`: the languages that the model transcribes. `takes_language`, `takes_context`: the prompt may contain the
    language, or words to expect.
    """

    language_codes: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("transcribe",)
    has_timestamps = takes_context = False
    takes_language = True

    @property
    def languages(self) -> Mapping[str, str]:
        return {code: LANGUAGES.get(code, code) for code in self.language_codes}

    def language_detection_request(self) -> SpeechRequest | None:
        return None

    def no_speech_request(self) -> SpeechRequest | None:
        return None

    def alignment(self) -> AlignmentRule | None:
        return None

    def parse_transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        return strip_control_tokens(answer).strip(), language
