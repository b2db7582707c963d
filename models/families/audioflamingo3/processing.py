"""Input processing of Audio Flamingo 3 and Music Flamingo: audio in windows of 30 s as log-mel frames, one token per 40 ms.

Source: transformers' processor. Audio beyond the model's limit is refused, not cut.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.speech import SpeechRequest
from ....mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem
from ....processors.bases.audio import audio_samples
from ....processors.bases.speech import SpeechMixin
from ....processors.bases.windows import WindowedAudioInfo
from ....processors.interface import Span
from ....processors.mel import MelSpec, log_mel
from ....processors.spans import build_span
from ..qwen2_audio.processing import conv_and_pool_rows

_FRAME = re.compile(r"""^(?:The (?:spoken content|transcription|content) of the (?:input )?audio is)?\s*(.*?)\.?$""", re.DOTALL)


class AudioFlamingo3ProcessingInfo(WindowedAudioInfo, SpeechMixin):
    """ProcessingInfo and SupportsTranscription of Audio Flamingo 3 and Music Flamingo."""

    placeholders: dict[str, tuple[str | int, ...]] = {"audio": ("audio_token_id", 151669)}
    text_config_defaults = {"hidden_size": 3584, "vocab_size": 151672}
    mel_defaults = MelSpec(num_mel_bins=128)
    language_codes = ("en",)
    takes_language = False

    @property
    def is_music(self) -> bool:
        """True for Music Flamingo, which takes longer audio, with a token before and after it."""
        return bool(self.files.config.get("model_type") == "musicflamingo")

    def resolve_token_ids(self) -> None:
        """Look up the tokens around the audio of Music Flamingo: by text, else in config.json, else the published ids."""
        find = self.files.token_to_id or (lambda text: None)
        ids = [(find(f"<|sound_{name}|>"), f"audio_{name}_token_id", last) for name, last in (("bos", 151670), ("eos", 151671))]
        tokens = (self.config_token_id(key, last) if token is None else token for token, key, last in ids)
        self.around = tuple(tokens) if self.is_music else ()

    def max_windows(self, seconds: int, rows: int) -> int:
        return max(1, (1200 if self.is_music else 600) // seconds)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        return build_span([self.around[:1], geometry.num_embeds, self.around[1:]], self.placeholder_ids[modality])

    def num_rows(self, frames: int) -> int:
        """Return the rows of `frames` frames. A full window has no incomplete row, so windows need no counting of their own."""
        return conv_and_pool_rows(frames)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the features of all windows.

        `input_features` `[frames, num_mel_bins]` with up to two frames of padding after each window, `audio_inputs` `[windows]`
        (their frames there), `audio_frames` `[windows]` (those that contain audio) and `audio_windows`, their number.
        """
        samples, geometry = audio_samples(item), self.geometry(item.header)
        frames = [self.mel_spec.num_frames(len(part)) for part in samples.split(self.mel_spec.window_samples)]
        features = self.window_features(samples)
        return {
            "input_features": FieldElem(torch.cat(features).to(dtype), FlatField()),
            "audio_inputs": FieldElem(torch.tensor([len(window) for window in features]), FlatField(keep_on_cpu=True)),
            "audio_frames": FieldElem(torch.tensor(frames), FlatField(keep_on_cpu=True)),
            "audio_windows": FieldElem(torch.tensor(len(frames)), BatchedField(keep_on_cpu=True)),
        }, geometry

    def window_features(self, samples: Tensor) -> list[Tensor]:
        """Return the log-mel frames of each window, with the padding that the convolutions read behind its audio."""
        spec, windows = self.mel_spec, []
        for part in samples.split(spec.window_samples):
            frames = (spec.num_frames(len(part)) + 1) // 2 * 2 + 1
            windows.append(log_mel(part, spec, spec.window_samples, min(frames, spec.window_frames)))
        return windows

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the published prompt."""
        system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        question = "<|im_start|>user\n<sound>Transcribe the input speech.<|im_end|>\n"
        return SpeechRequest(f"{system}{question}<|im_start|>assistant\n")

    def parse_transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        """Return the quoted text of an answer such as `The spoken content of the audio is "...".`"""
        text, language = super().parse_transcript(answer, language)
        quoted = _FRAME.match(text)
        inner = quoted[1].strip() if quoted else text
        framed = len(inner) > 1 and inner[0] == inner[-1] and inner[0] in "'\""
        return (inner[1:-1].strip() if framed else text), language
