"""Input processing of Whisper: audio of up to 30 s as the log-mel frames of a full window.

Source: arXiv 2212.04356, section 2.3: the prompt is start, language, task, and whether timestamps are written.
"""

from __future__ import annotations

from ....callers.errors import ConfigError
from ....mm.languages import LANGUAGES
from ....mm.speech import SpeechRequest, TimestampRule
from ....processors.bases.speech import CrossAttentionSpeechInfo
from ....processors.mel import MelSpec

_START = "<|startoftranscript|>"
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")  # the latter in the checkpoints up to large-v2
_TIMESTAMP_STEP = 0.02  # seconds


class WhisperProcessingInfo(CrossAttentionSpeechInfo):
    """ProcessingInfo and SupportsTranscription of Whisper."""

    text_config_defaults = {"d_model": 384, "max_source_positions": 1500, "decoder_layers": 4, "decoder_attention_heads": 6}
    size_keys = ("decoder_layers", "decoder_attention_heads")
    takes_context = True

    def resolve_spec(self, modality: str) -> MelSpec:
        spec = super().resolve_spec(modality)
        for key, expected in (
            ("num_mel_bins", spec.num_mel_bins),
            ("max_source_positions", spec.max_samples // spec.hop_length // 2),
        ):
            if self.files.config.get(key, expected) != expected:
                raise self.files.mismatch_error(f"{key} is {self.files.config[key]} in config.json", expected)
        return spec

    def num_rows(self, frames: int) -> int:
        """Return half of the frames of a full window: the encoder also sees the silence after the audio."""
        return self.mel_spec.max_samples // self.mel_spec.hop_length // 2

    @property
    def embed_width(self) -> int:
        return int(self.text_config["d_model"])

    @property
    def language_codes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The languages that the vocabulary has a token for; the prompt of an English-only model names none."""
        if not self._multilingual:
            return ("en",)
        tokens = self.files.generation.get("lang_to_id") or map("<|{}|>".format, LANGUAGES)
        find = self.files.token_to_id
        return tuple(token.strip("<|>") for token in tokens if find is None or find(token) is not None)

    @property
    def tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("transcribe", "translate") if self._multilingual else ("transcribe",)

    @property
    def has_timestamps(self) -> bool:  # type: ignore[override]
        return "no_timestamps_token_id" in self.files.generation

    def language_detection_request(self) -> SpeechRequest | None:
        if not self._multilingual:
            return None
        if not self.language_codes:
            reason = "the tokenizer has no language token such as <|en|>, but generation_config.json describes a multilingual"
            raise ConfigError(f"{reason} model; use this checkpoint's own tokenizer files")
        return SpeechRequest(_START, allowed_tokens={f"<|{code}|>": code for code in self.language_codes})

    def no_speech_request(self) -> SpeechRequest | None:
        find = self.files.token_to_id
        token = next((name for name in _NO_SPEECH if find is not None and find(name) is not None), None)
        return None if token is None else SpeechRequest(_START, allowed_tokens={token: ""})

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        before = f"<|startofprev|> {context.strip()}" if context.strip() else ""
        language_and_task = f"<|{language}|><|{task}|>" if self._multilingual else ""
        generation = self.files.generation
        return SpeechRequest(
            f"{before}{_START}{language_and_task}" + ("" if timestamps else "<|notimestamps|>"),
            suppressed=tuple(generation.get("suppress_tokens") or ()),
            suppressed_first=tuple(generation.get("begin_suppress_tokens") or ()),
            times=self._times() if timestamps else None,
        )

    def parse_transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        return super().parse_transcript(answer, language or "en")

    def _times(self) -> TimestampRule:
        generation = self.files.generation
        none = generation["no_timestamps_token_id"]
        latest = generation.get("max_initial_timestamp_index")
        return TimestampRule(none + 1, none, generation["eos_token_id"], _TIMESTAMP_STEP, latest)

    @property
    def _multilingual(self) -> bool:
        generation = self.files.generation
        return bool(generation.get("is_multilingual", "lang_to_id" in generation))
