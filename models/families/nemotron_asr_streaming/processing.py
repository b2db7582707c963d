"""Input processing of Nemotron Speech Streaming: NeMo's log-mel frames, not normalised, 12.5 rows per second.

Source: the published feature extractor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....mm.fields import BatchedField, FieldElem
from ....mm.speech import FrameRule
from ....mm.types import MediaHeader, MultiModalFeature, PlaceholderRange
from ....processors.bases.audio import audio_kwargs
from ....processors.bases.fastconformer import FastConformerInfo
from ....processors.nemo_mel import NemoMelSpec, nemo_log_mel
from ..parakeet.processing import BlankPrompt


class NemotronAsrStreamingProcessingInfo(BlankPrompt, FastConformerInfo):
    """ProcessingInfo and SupportsTranscription of Nemotron Speech Streaming."""

    mel_defaults = NemoMelSpec(normalizes=False)
    placeholders = {"audio": ("blank_token_id", 1024)}
    text_config_defaults = {"vocab_size": 1025}

    def resolve_token_ids(self) -> None:
        self.pad_token_id = self.config_token_id("pad_token_id", 0)

    def frame_rule(self) -> FrameRule:
        return FrameRule(self.pad_token_id, self.row_seconds)

    def num_rows(self, frames: int) -> int:
        """Return the rows after causal convolutions of stride 2, which also see a frame of zeros after the item."""
        if frames < 2:
            return 0
        for _ in range(int(self.encoder_config["subsampling_factor"]).bit_length() - 1):
            frames = frames // 2 + 1
        return frames

    def open_window(
        self, samples: Tensor, number: int, is_last: bool, dtype: torch.dtype, earlier: MultiModalFeature | None = None
    ) -> MultiModalFeature | None:
        """See `processors.interface.SupportsTranscription`. Frames that were final in the last call are not computed again."""
        spec, header = self.mel_spec, MediaHeader("audio", samples=len(samples))
        assert isinstance(spec, NemoMelSpec)
        geometry = self.geometry(header)
        final = max(0, (len(samples) - spec.n_fft // 2) // spec.hop_length + 1)  # frames that see no sample after the window
        features = nemo_log_mel(samples, spec, None if earlier is None else _final_frames(earlier)[:final])
        stream = FieldElem(torch.tensor([number, is_last, final]), BatchedField(keep_on_cpu=True))
        # not a hash of the samples, so that an item that belongs to no stream never shares cached rows with a window
        key = f"{number:016x}{len(samples):016x}{is_last:x}".ljust(64, "0")
        kwargs = {**audio_kwargs(features, len(features), dtype), "audio_stream": stream}
        return MultiModalFeature("audio", kwargs, PlaceholderRange(0, geometry.num_embeds), geometry, key)


def _final_frames(feature: MultiModalFeature) -> Tensor:
    """Return the frames of an open window that later samples do not change, `[n, mels]`."""
    frames, stream = feature.kwargs["input_features"].data, feature.kwargs["audio_stream"].data
    assert isinstance(frames, Tensor)
    assert isinstance(stream, Tensor)
    return frames[: int(stream[2])]
