"""Input processing of Moonshine: the samples themselves.

Sources: the published feature extractor; arXiv 2410.15608 (training on clips of up to 30 s).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.speech import SpeechRequest
from ....mm.types import AudioItem, ItemGeometry, MediaItem, MultiModalFeature, MultiModalKwargsItem, PlaceholderRange
from ....processors.bases.audio import AudioInfo, audio_samples
from ....processors.bases.speech import CrossAttentionSpeechInfo
from ....processors.mel import MelSpec, read_mel_spec

_FRAME = 80  # samples of a frame of Moonshine Streaming


class SamplesInfo(AudioInfo):
    """Base of both: the item's samples are the encoder's input, so a frame of the spec is a sample.

    A subclass also derives from CrossAttentionSpeechInfo.

    Attributes:
        frame: samples are padded to a multiple of this.
    """

    mel_defaults = MelSpec(num_mel_bins=1, hop_length=1)
    takes_language = False
    frame = 1

    def resolve_spec(self, modality: str) -> MelSpec:
        """Return the spec of raw samples; `process` normalises all samples of an item together."""
        return read_mel_spec({**self.files.audio, "do_normalize": False}, self.mel_defaults)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `input_values` `[n]`, normalised if the preprocessor says so, and `audio_samples`, n without padding."""
        samples, geometry = audio_samples(item), self.geometry(item.header)
        if self.files.audio.get("do_normalize", True):
            variance, mean = torch.var_mean(samples, unbiased=False)
            samples = (samples - mean) / (variance + 1e-7).sqrt()
        values = F.pad(samples, (0, -len(samples) % self.frame)).to(dtype)
        count = FieldElem(torch.tensor(len(samples)), BatchedField(keep_on_cpu=True))
        return {"input_values": FieldElem(values, FlatField()), "audio_samples": count}, geometry

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        return SpeechRequest("<s>")


class MoonshineProcessingInfo(SamplesInfo, CrossAttentionSpeechInfo):
    """ProcessingInfo and SupportsTranscription of Moonshine."""

    text_config_defaults = {"hidden_size": 288, "decoder_num_hidden_layers": 6, "decoder_num_attention_heads": 8}
    size_keys = ("decoder_num_hidden_layers", "decoder_num_attention_heads")
    row_seconds = 384 / 16_000

    def num_rows(self, frames: int) -> int:
        """Return the rows after convolutions of 127, 7 and 3 taps with strides of 64, 3 and 2."""
        for taps, stride in ((127, 64), (7, 3), (3, 2)):
            frames = max(0, (frames - taps) // stride + 1)
        return frames


class MoonshineStreamingProcessingInfo(SamplesInfo, CrossAttentionSpeechInfo):
    """ProcessingInfo and SupportsTranscription of Moonshine Streaming: whole frames of 80 samples, and four frames per row."""

    text_config_defaults = {"hidden_size": 320, "num_hidden_layers": 6, "num_attention_heads": 8}
    size_keys = ("num_hidden_layers", "num_attention_heads")
    row_seconds = 320 / 16_000
    frame = _FRAME

    def open_window(
        self, samples: Tensor, number: int, is_last: bool, dtype: torch.dtype, earlier: MultiModalFeature | None = None
    ) -> MultiModalFeature | None:
        if self.files.audio.get("do_normalize", True):  # all samples change when the window grows
            return None
        kwargs, geometry = self.process(AudioItem(samples, self.mel_spec.sampling_rate), dtype)
        stream = FieldElem(torch.tensor([number, is_last]), BatchedField(keep_on_cpu=True))
        # not a hash of the samples: rows that are encoded piece by piece have roundings of their own
        key = f"{number:016x}{len(samples):016x}{is_last:x}".ljust(64, "0")
        where = PlaceholderRange(0, geometry.num_embeds)
        return MultiModalFeature("audio", {**kwargs, "audio_stream": stream}, where, geometry, key)

    def num_rows(self, frames: int) -> int:
        """Return a row per four frames, the last one incomplete; an item has at least one whole frame."""
        return -(-frames // 320) if frames >= _FRAME else 0
