"""Nemotron Speech Streaming: a cache-aware FastConformer (arXiv 2312.17279) with a transducer (RNN-T)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...audio.cache_aware import CacheAwareConformer, ChunkState, cache_aware_bytes, cache_aware_spec
from ...audio.local_encoder import WindowStates
from ...interface import StepLimits
from ..parakeet.model import Parakeet, ParakeetTransducer


class CacheAwareParakeet(Parakeet):
    """A Parakeet with a cache-aware encoder, and any head. Implements `models.interface.SupportsStreams`."""

    encoder: CacheAwareConformer
    max_streams = 1

    def make_encoder(self, audio: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> CacheAwareConformer:
        encoder = CacheAwareConformer(cache_aware_spec(audio), dtype, device)
        self._windows = WindowStates[ChunkState](encoder)
        return encoder

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Return the rows of each item.

        With `audio_stream`, int64 `[items, 3]`, items are windows of live streams. Its columns are the number of the window, 1
        if the window is closed, and the number of frames that do not change when the window grows.
        """
        if "audio_stream" not in tensors:
            return super().embed_multimodal(modality, tensors)
        items = tensors["input_features"].split(tensors["audio_frames"].tolist())
        windows = zip(tensors["audio_stream"].tolist(), items, strict=True)
        return [
            self._windows.encode(number, item, final, 0 if is_last else self.max_streams)
            for (number, is_last, final), item in windows
        ]

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        return cache_aware_bytes(self.encoder.spec, rows, self.dtype, limits)

    def stream_bytes(self, rows: int) -> int:
        return self.encoder.window_bytes(rows)

    def free_stream(self, stream: int) -> None:
        self._windows.drop(stream)


class NemotronAsrStreaming(CacheAwareParakeet, ParakeetTransducer):
    pass
