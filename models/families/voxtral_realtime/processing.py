"""Input processing of Voxtral-Realtime: log-mel frames with a fixed floor, 12.5 rows per second.

Source: mistral-common's streaming transcription. Silence precedes the audio, and silence for the delay and a long word
follows it. The prompt is BOS and a padding token per row of the first silence and of the delay; each further row is added to a
token that is generated.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from ....mm.fields import BatchedField, FieldElem
from ....mm.speech import SpeechRequest, StreamRule
from ....mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.audio import AudioInfo, audio_kwargs, audio_samples
from ....processors.bases.speech import SpeechMixin
from ....processors.files import ProcessorFiles
from ....processors.interface import Span, TokenRun
from ....processors.mel import MelSpec, log_mel, log_mel_frames

_LEFT_ROWS = 32  # of silence before the audio, unless the config says otherwise
_WORD_ROWS = 10  # of silence for a word that ends with the audio
_MAX_CHUNK = 64  # rows
_CONTROL = re.compile(r"\[STREAMING_(?:PAD|WORD)\]")


class VoxtralRealtimeProcessingInfo(AudioInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of Voxtral-Realtime, in the Hub's layout and in its publisher's."""

    placeholders = {"audio": ("streaming_pad_token_id", "[STREAMING_PAD]")}
    text_config_defaults = {"hidden_size": 3072, "vocab_size": 131072, "max_position_embeddings": 131072}
    mel_defaults = MelSpec(num_mel_bins=128, max_samples=60 * 16_000, max_energy=1.5)
    embeds_layout = None
    adds_special_tokens = False  # the item contains BOS, which has a row, too
    takes_language = False
    language_codes = ("ar", "de", "en", "es", "fr", "hi", "it", "ja", "ko", "nl", "pt", "ru", "zh")

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Return the files with the feature extractor, which the publisher's layout keeps in the config."""
        return replace(files, audio=files.audio or files.config.get("feature_extractor") or {})

    def resolve_token_ids(self) -> None:
        self._bos = self.config_token_id("bos_token_id", "<s>")
        self._delay = int(self.files.config.get("default_num_delay_tokens", 6))
        self._left_rows = int(self.files.config.get("streaming_n_left_pad_tokens", _LEFT_ROWS))

    def resolve_spec(self, modality: str) -> MelSpec:
        loudest = self.files.audio.get("global_log_mel_max", self.mel_defaults.max_energy)
        return replace(super().resolve_spec(modality), max_energy=loudest)

    @property
    def _frames_per_row(self) -> int:
        return int(self.files.config.get("audio_length_per_tok", 8))

    def num_rows(self, frames: int) -> int:
        return self._left_rows + -(-frames // self._frames_per_row) + self._delay + 1 + _WORD_ROWS

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        rows = super().geometry(header).num_embeds
        return ItemGeometry(rows, 1, 1, linear=True, ahead=rows - self._prompt_rows)

    @property
    def _prompt_rows(self) -> int:
        return 1 + self._left_rows + self._delay

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        count = self._prompt_rows
        runs = [TokenRun((self._bos,), 1, True), TokenRun((self.placeholder_ids[modality],), count - 1, True)]
        return Span(count, count, lambda: runs, ahead=geometry.ahead)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `input_features` `[frames, num_mel_bins]` of all rows, and `audio_frames`, their number."""
        samples, spec, geometry = audio_samples(item), self.mel_spec, self.geometry(item.header)
        frames = geometry.num_embeds * self._frames_per_row
        padded = torch.zeros(frames * spec.hop_length)
        start = self._left_rows * self._frames_per_row * spec.hop_length
        padded[start : start + len(samples)] = samples
        return audio_kwargs(log_mel(padded, spec, len(padded), frames), frames, dtype), geometry

    def stream_rule(self) -> StreamRule:
        spec, samples = self.mel_spec, self._frames_per_row * self.mel_spec.hop_length
        edge = spec.n_fft // 2
        return StreamRule(
            prompt=self.span("audio", ItemGeometry(1, 1, 1)).token_ids,
            silent=self.placeholder_ids["audio"],
            row_samples=samples,
            overlap=spec.n_fft - spec.hop_length,
            before=edge + self._left_rows * samples,
            after=(self._delay + 1 + _WORD_ROWS) * samples + edge,
            delay=self._delay,
            max_rows=_MAX_CHUNK,
            max_tokens=int(self.text_config["max_position_embeddings"]),
            item=self._chunk,
        )

    def _chunk(self, samples: torch.Tensor, stream: int, first_row: int, dtype: torch.dtype) -> MultiModalKwargsItem:
        """Return `input_features`, `audio_frames`, and `audio_stream`: stream, encoder outputs before."""
        features = log_mel_frames(samples, self.mel_spec)
        start = torch.tensor([stream, first_row * self._frames_per_row // 2])
        kwargs = audio_kwargs(features, len(features), dtype)
        return kwargs | {"audio_stream": FieldElem(start, BatchedField(keep_on_cpu=True))}

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        return SpeechRequest("[STREAMING_PAD]")

    def parse_transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        return _CONTROL.sub("", answer).strip(), language
