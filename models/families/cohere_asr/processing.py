"""Input processing of Cohere's transcription models and of Canary: NeMo's log-mel frames, 12.5 rows per second.

Sources: the published processors and the prompts of both model cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....callers.errors import InputError
from ....mm.speech import SpeechRequest
from ....processors.bases.fastconformer import FastConformerInfo
from ....processors.bases.speech import CrossAttentionSpeechInfo, SpeechMixin
from ....processors.files import ProcessorFiles
from ....processors.nemo_mel import NemoMelSpec
from .config import read_nemo_config

_START = "<|startofcontext|>"
_FIRST = "\u2581"  # begins a text in this tokenizer; the models were trained with it before the prompt
_DEFAULT_LANGUAGE = "en"  # the model cannot detect the language


class NemoPrompt(SpeechMixin):
    """The prompt of NeMo's encoder-decoder models, which names the language spoken and the one to write."""

    rewrites_prompts = True

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        if task == "translate" and language is None:
            raise InputError(
                "this model does not detect the language that it translates; give language",
                code="unsupported",
                param="language",
            )
        spoken = language or _DEFAULT_LANGUAGE
        written = "en" if task == "translate" else spoken
        languages = f"<|{spoken}|><|{written}|>"
        return SpeechRequest(
            f"{_START}<|startoftranscript|><|emo:undefined|>{languages}<|pnc|><|noitn|><|notimestamp|><|nodiarize|>"
        )

    def parse_transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        return super().parse_transcript(answer, language or _DEFAULT_LANGUAGE)


class CohereAsrProcessingInfo(NemoPrompt, FastConformerInfo, CrossAttentionSpeechInfo):
    """ProcessingInfo and SupportsTranscription of Cohere's transcription models."""

    adds_special_tokens = False  # the prompt has all of them
    text_config_defaults = {"hidden_size": 1024, "vocab_size": 16384, "num_hidden_layers": 8, "num_attention_heads": 8}
    size_keys = ("num_hidden_layers", "num_attention_heads")
    mel_defaults = NemoMelSpec(num_mel_bins=128, dither=1e-5, max_samples=560_000)
    language_codes = ("ar", "de", "el", "en", "es", "fr", "it", "ja", "ko", "nl", "pl", "pt", "vi", "zh")

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        return replace(files, config=read_nemo_config(files.config))

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Return the prompt with the token that begins a text, which tokenizers drop before a control token."""
        find = self.files.token_to_id
        first, start = (None, None) if find is None else (find(_FIRST), find(_START))
        return [first, *ids] if first is not None and ids and ids[0] == start else ids


class CanaryProcessingInfo(NemoPrompt, FastConformerInfo, CrossAttentionSpeechInfo):
    """ProcessingInfo and SupportsTranscription of Canary, which also translates to English."""

    text_config_defaults, size_keys = CohereAsrProcessingInfo.text_config_defaults, CohereAsrProcessingInfo.size_keys
    tasks = ("transcribe", "translate")
    mel_defaults = NemoMelSpec(max_samples=640_000)
    language_codes = (
        "bg", "hr", "cs", "da", "nl", "en", "et", "fi", "fr", "de", "el", "hu", "it", "lv", "lt", "mt", "pl", "pt", "ro", "sk",
        "sl", "es", "sv", "ru", "uk",
    )  # fmt: skip

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        decoder = files.config.get("decoder_config") or {}
        return replace(
            files, config={**files.config, **{key: decoder[key] for key in self.text_config_defaults if key in decoder}}
        )
