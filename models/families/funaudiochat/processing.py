"""Input processing of Fun-Audio-Chat: audio as log-mel frames, five tokens per second.

Source: the published processor. It also writes speech tokens, which are all padding for audio that is given as samples.
"""

from __future__ import annotations

import torch

from ....mm.fields import BatchedField, FieldElem
from ....mm.speech import SpeechRequest
from ....mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem
from ....processors.bases.bracketed import AUDIO, BracketedAudioInfo
from ....processors.bases.tiles import positive_int_or
from ....processors.mel import MelSpec

_SPEECH_RATE = 25  # speech tokens per second; a group of them makes a row


class FunAudioChatProcessingInfo(BracketedAudioInfo):
    """ProcessingInfo and SupportsTranscription of Fun-Audio-Chat."""

    text_config_defaults = {"hidden_size": 4096, "vocab_size": 151936}
    mel_defaults = MelSpec(num_mel_bins=128)
    language_codes = ("zh", "en")
    takes_language = False

    def num_rows(self, frames: int) -> int:
        return self.num_item_rows(frames * self.mel_spec.hop_length)

    def num_item_rows(self, samples: int) -> int:
        """Return the rows; an incomplete last group makes one, an incomplete speech token none."""
        tokens = int(samples / self.mel_spec.sampling_rate * _SPEECH_RATE)  # rounded as published
        return -(-tokens // positive_int_or(self.files.config.get("audio_config") or {}, "group_size", 5))

    def num_input_frames(self, frames: int) -> int:
        """Return the frames without silence."""
        return frames

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the tensors of an AudioInfo, and `audio_rows`, the number of rows."""
        tensors, geometry = super().process(item, dtype)
        rows = FieldElem(torch.tensor(geometry.num_embeds), BatchedField(keep_on_cpu=True))
        return {**tensors, "audio_rows": rows}, geometry

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the prompt for text answers with the publisher's instruction for transcription."""
        system = "<|im_start|>system\nYou are asked to generate text tokens.<|im_end|>\n"
        question = f"<|im_start|>user\n{AUDIO}\nPlease help me transcribe the audio.<|im_end|>\n"
        return SpeechRequest(f"{system}{question}<|im_start|>assistant\n")
