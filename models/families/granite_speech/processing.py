"""Input processing of Granite Speech: audio as pairs of log-mel frames, three tokens per 300 ms.

Source: the published feature extractor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ....callers.errors import ConfigError
from ....mm.speech import SpeechRequest
from ....mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem
from ....processors.bases.audio import AudioInfo, audio_kwargs, audio_samples
from ....processors.bases.speech import SpeechMixin
from ....processors.mel import MelSpec, log_mel, read_mel_spec

_STACK = 2  # frames of one encoder input
_TASKS = {
    "transcribe": "can you transcribe the speech into a written format?",
    "translate": "translate the speech to English.",
}


@dataclass(frozen=True)
class ProjectedMelSpec(MelSpec):
    """`window_rows` encoder outputs are projected to `num_queries` rows; an incomplete window makes as many."""

    window_rows: int = 15
    num_queries: int = 3


class GraniteSpeechProcessingInfo(AudioInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of Granite Speech."""

    adapter_folders = {"audio": "."}
    placeholders = {"audio": ("audio_token_index", "audio_token_id", 49155)}
    text_config_defaults = {"hidden_size": 2048, "vocab_size": 49160, "max_position_embeddings": 131072}
    mel_defaults = MelSpec(num_mel_bins=80, n_fft=512, win_length=400, end_frame=True, htk=True)
    language_codes = ("en", "fr", "de", "es", "pt")
    takes_language = False
    tasks = tuple(_TASKS)

    def resolve_spec(self, modality: str) -> ProjectedMelSpec:
        """Read the spec; the longest audio is the one that fills the decoder's context."""
        json = self.files.audio
        spectrogram = json.get("melspec_kwargs") or {}
        win_length = spectrogram.get("win_length", self.mel_defaults.win_length)
        spec = read_mel_spec({**json, **spectrogram}, replace(self.mel_defaults, win_length=win_length))
        self.check_config("encoder_config", input_dim=_STACK * spec.num_mel_bins)
        config = {"window_size": 15, "downsample_rate": 5, **self.files.config}
        window, queries = config["window_size"], config["window_size"] // config["downsample_rate"]
        for key, expected in (("projector_window_size", window), ("projector_downsample_rate", config["downsample_rate"])):
            if json.get(key, expected) != expected:
                raise ConfigError(f"{key} of the feature extractor is {json[key]}, config.json says {expected}")
        windows = max(1, int(self.text_config["max_position_embeddings"]) // queries)
        max_samples = windows * window * _STACK * spec.hop_length - 1
        return ProjectedMelSpec(**vars(replace(spec, max_samples=max_samples)), window_rows=window, num_queries=queries)

    def num_rows(self, frames: int) -> int:
        spec: ProjectedMelSpec = self.specs["audio"]
        return math.ceil(frames // _STACK / spec.window_rows) * spec.num_queries

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `input_features` `[inputs, 2 * num_mel_bins]` and their number, `audio_frames`. An odd frame is dropped."""
        features, geometry = log_mel(audio_samples(item), self.mel_spec), self.geometry(item.header)
        inputs = features[: len(features) // _STACK * _STACK].reshape(-1, _STACK * self.mel_spec.num_mel_bins)
        return audio_kwargs(inputs, len(inputs), dtype), geometry

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return a request with the question of the model card; the model detects the language."""
        question = f"<|start_of_role|>user<|end_of_role|><|audio|>{_TASKS[task]}<|end_of_text|>\n"
        return SpeechRequest(f"{question}<|start_of_role|>assistant<|end_of_role|>")
