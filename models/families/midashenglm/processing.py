"""Input processing of MiDashengLM: audio as log-mel frames in decibels, 5 tokens per second.

Window and filters are float32, as in the publisher's float32 checkpoint. The publisher's class rounds both if it is built in
bfloat16, which changes a band by 0.01 dB. If even the corners of the filters are computed in bfloat16, as torchaudio does while
that is torch's default dtype, bands of white noise change by 0.4 dB on average and by up to 4 dB. Neither is followed.

Source: the published processor, and the front end of the publisher's model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ....callers.errors import ConfigError
from ....mm.speech import SpeechRequest
from ....mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem
from ....processors.bases.audio import audio_kwargs, audio_samples
from ....processors.bases.bracketed import AUDIO, BracketedAudioInfo
from ....processors.bases.tiles import positive_int_or
from ....processors.mel import MelSpec, log_mel, read_mel_spec

_MAX_SECONDS = 1200  # the published processor has no limit
_SYSTEM = "You are a helpful language and speech assistant."
_KEYS = {"n_mels": "feature_size", "sample_rate": "sampling_rate", "n_fft": "n_fft", "hop_length": "hop_length"}


@dataclass(frozen=True)
class DashengMelSpec(MelSpec):
    """`row_frames`: frames per row; an incomplete last row is dropped."""

    row_frames: int = 20


class MiDashengLMProcessingInfo(BracketedAudioInfo):
    """ProcessingInfo and SupportsTranscription of MiDashengLM."""

    text_config_defaults = {"hidden_size": 3584, "vocab_size": 152064}
    mel_defaults = MelSpec(num_mel_bins=64, n_fft=512, win_length=512, end_frame=True, htk=True, kept=12.0, decibels=True)
    language_codes = ("en", "zh", "id", "th", "vi")

    def resolve_spec(self, modality: str) -> DashengMelSpec:
        """Read `audio_encoder_config` of config.json; the preprocessor's JSON describes samples only."""
        config: dict[str, Any] = dict(self.files.config.get("audio_encoder_config") or {})
        if self.files.audio.get("do_normalize"):
            raise ConfigError("do_normalize of the feature extractor is not supported; set it to false")
        sizes = {name: config[key] for key, name in _KEYS.items() if key in config}
        spec = read_mel_spec({"chunk_length": _MAX_SECONDS, **sizes}, self.mel_defaults)
        self.check_config("audio_encoder_config", sample_rate=self.files.audio.get("sampling_rate", spec.sampling_rate))
        fixed = {"f_min": 0, "f_max": spec.sampling_rate / 2, "center": True, "win_length": spec.n_fft}
        for key, value in fixed.items():
            if config.get(key, value) != value:
                raise ConfigError(
                    f"{key} is {config[key]!r} in audio_encoder_config of config.json; only {value!r} is supported"
                )
        stride = config.get("patch_stride")
        last = {"patch_stride": stride[-1] if isinstance(stride, list | tuple) and stride else stride}
        frames = positive_int_or(last, "patch_stride", 4) * positive_int_or(self.files.config, "subsample_factor", 5)
        return DashengMelSpec(**asdict(spec) | {"win_length": spec.n_fft}, row_frames=frames)

    def num_rows(self, frames: int) -> int:
        rows: int = frames // self.specs["audio"].row_frames
        return rows

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `input_features` `[frames, num_mel_bins]` in decibels, and `audio_frames`."""
        samples, geometry = audio_samples(item), self.geometry(item.header)
        features = log_mel(samples, self.mel_spec)
        return audio_kwargs(features, len(features), dtype), geometry

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the prompt with which the publisher evaluates transcription."""
        question = "Transcribe the speech into text" + ("" if language is None else f" <|{language}|>")
        turns = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{AUDIO}{question}<|im_end|>\n"
        return SpeechRequest(f"{turns}<|im_start|>assistant\n")
