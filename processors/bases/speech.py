"""Bases of audio families that transcribe speech: languages, tasks, parsing of an answer, heads that follow the audio."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import torch
from torch import Tensor

from ...callers.errors import ConfigError
from ...mm.languages import LANGUAGES
from ...mm.parse import MultiModalDataParser
from ...mm.speech import AlignmentRule, FrameRule, SpeechRequest, StreamRule, strip_control_tokens
from ...mm.types import ItemGeometry, MultiModalFeature
from ..interface import Span
from ..spans import build_span
from .audio import AudioInfo


class SpeechMixin:
    """The defaults of SupportsTranscription, except `transcription_request`, for a subclass of AudioInfo.

    `language_codes`: the languages that the model transcribes. `takes_language`, `takes_context`: the prompt may contain the
    language, or words to expect. `closed_samples`: as in SupportsTranscription.
    """

    language_codes: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("transcribe",)
    has_timestamps = takes_context = False
    takes_language = True
    closed_samples: int | None = None

    @property
    def languages(self) -> Mapping[str, str]:
        return {code: LANGUAGES.get(code, code) for code in self.language_codes}

    def language_detection_request(self) -> SpeechRequest | None:
        return None

    def no_speech_request(self) -> SpeechRequest | None:
        return None

    def alignment(self) -> AlignmentRule | None:
        return None

    def frame_rule(self) -> FrameRule | None:
        return None

    def open_window(
        self, samples: Tensor, number: int, is_last: bool, dtype: torch.dtype, earlier: MultiModalFeature | None = None
    ) -> MultiModalFeature | None:
        return None

    def stream_rule(self) -> StreamRule | None:
        return None

    def parse_transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        return strip_control_tokens(answer).strip(), language


class CrossAttentionSpeechInfo(AudioInfo, SpeechMixin):
    """Base of encoder-decoder models. A prompt has one audio item and no placeholder: the decoder cross-attends to the item.

    `size_keys`: keys of the number of the decoder's layers and of its heads in config.json.
    """

    size_keys: tuple[str, str]

    def parser(self) -> MultiModalDataParser:
        return MultiModalDataParser(self.modalities, {"audio": 1}, super().parser().embeddings)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return an empty span: audio takes no tokens of the prompt."""
        return build_span([], 0)

    @property
    def row_seconds(self) -> float:
        """Seconds of audio per encoder row. Default: two frames."""
        return 2 * self.mel_spec.hop_length / self.decode_spec.rate

    def alignment(self) -> AlignmentRule:
        """Return the heads that generation_config.json names, else all heads of the last half of the decoder's layers."""
        layers, count = (int(self.text_config[key]) for key in self.size_keys)
        heads = self.files.generation.get("alignment_heads") or product(range(layers // 2, layers), range(count))
        try:
            pairs = tuple((int(layer), int(head)) for layer, head in heads)
        except (TypeError, ValueError):
            pairs = ((-1, -1),)
        if not all(0 <= layer < layers and 0 <= head < count for layer, head in pairs):
            ranges = f"pairs of a layer, 0 to {layers - 1}, and a head, 0 to {count - 1}"
            raise ConfigError(f"alignment_heads in generation_config.json must be {ranges}; mend or remove it")
        return AlignmentRule(pairs, self.row_seconds, (layers, count))
