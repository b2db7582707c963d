"""Input processing of FireRedASR2-LLM: frames of Kaldi's filter bank, normalised per band.

Source: vLLM's feature extractor and prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....mm.speech import SpeechRequest
from ....mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem
from ....processors.bases.audio import AudioInfo, audio_kwargs, audio_samples
from ....processors.bases.speech import SpeechMixin
from ....processors.bases.tiles import positive_int_or
from ....processors.kaldi_mel import KaldiMelSpec, kaldi_log_mel
from .encoder import MOST_FRAMES, num_rows

_AUDIO = "<|AUDIO|>"


@dataclass(frozen=True)
class NormalisedMelSpec(KaldiMelSpec):
    """`means`, `factors`: subtracted from each band, then multiplied. `rows_per_token`: rows of the encoder."""

    low: float = 20.0
    high: float = 8000.0
    centered: bool = True
    povey: bool = True
    floor: float = torch.finfo(torch.float32).eps
    means: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()
    rows_per_token: int = 2


class FireRedAsr2ProcessingInfo(AudioInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of FireRedASR2-LLM, for Chinese, its dialects, and English."""

    placeholders = {"audio": ("audio_token_id", _AUDIO)}
    text_config_defaults = {"hidden_size": 3584, "vocab_size": 152064, "max_position_embeddings": 32768}
    language_codes = ("zh", "en")
    takes_language = False

    def resolve_spec(self, modality: str) -> NormalisedMelSpec:
        audio = self.files.audio
        defaults = {"sampling_rate": 16_000, "num_mel_bins": 80, "chunk_length": 30, "max_length": MOST_FRAMES}
        rate, bands, seconds, frames = (positive_int_or(audio, key, value) for key, value in defaults.items())
        if rate != 16_000 or audio.get("frame_length", 25) != 25 or audio.get("frame_shift", 10) != 10:
            reason = "sampling_rate must be 16000, frame_length 25 and frame_shift 10"
            raise ConfigError(f"{reason} in the JSON of the feature extractor; other values are not supported")
        encoder = self.files.config.get("audio_encoder_conf") or {}
        if encoder.get("idim", bands) != bands:
            raise ConfigError(
                f"idim of audio_encoder_conf is {encoder['idim']!r}, num_mel_bins of the feature extractor {bands}"
            )
        spec = NormalisedMelSpec(
            num_mel_bins=bands,
            means=_numbers(audio, "means", bands),
            factors=_numbers(audio, "inverse_std_variences", bands),
            rows_per_token=positive_int_or(self.files.config, "encoder_downsample_rate", 2),
            max_samples=seconds * rate,
        )
        if not spec.num_frames(spec.max_samples) <= frames <= MOST_FRAMES:
            needed = f"from the {spec.num_frames(spec.max_samples)} frames of chunk_length to {MOST_FRAMES}"
            raise ConfigError(f"max_length of the feature extractor is {frames}; it must be {needed}")
        return spec

    @property
    def mel_spec(self) -> NormalisedMelSpec:
        spec: NormalisedMelSpec = self.specs["audio"]
        return spec

    def num_rows(self, frames: int) -> int:
        return num_rows(frames) // self.mel_spec.rows_per_token

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `input_features` `[frames, num_mel_bins]` and `audio_frames`, the number of frames."""
        geometry = self.geometry(item.header)
        features = normalised_frames(audio_samples(item), self.mel_spec)
        return audio_kwargs(features, len(features), dtype), geometry

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the publisher's prompt: the audio, then an instruction in Chinese."""
        return SpeechRequest(f"<|im_start|>user\n{_AUDIO}请转写音频为文字<|im_end|>\n<|im_start|>assistant\n")


def normalised_frames(samples: Tensor, spec: NormalisedMelSpec) -> Tensor:
    """Convert float32 `[n]` to float32 `[frames, num_mel_bins]`."""
    frames = kaldi_log_mel(samples, spec).double()
    means, factors = (torch.tensor(values, dtype=torch.float64) for values in (spec.means, spec.factors))
    return frames.sub_(means).mul_(factors).float()


def _numbers(audio: Mapping[str, object], key: str, count: int) -> tuple[float, ...]:
    """Return a list of finite numbers, one per band."""
    values = audio.get(key)
    if (
        not isinstance(values, Sequence)
        or len(values) != count
        or not all(isinstance(value, int | float) and math.isfinite(value) for value in values)
    ):
        raise ConfigError(f"{key} of the feature extractor must be a list of {count} numbers, one for each band")
    return tuple(float(value) for value in values)
