"""Nemotron Speech Streaming: a cache-aware FastConformer (arXiv 2312.17279) with a transducer (RNN-T)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from ...audio.cache_aware import CacheAwareConformer, ChunkState, cache_aware_bytes, cache_aware_spec
from ...audio.local_encoder import WindowStates
from ...audio.transducer import TransducerState
from ...interface import LogitsRule, StepLimits
from ..parakeet.model import Parakeet, ParakeetTransducer

_DEFAULTS: dict[str, Any] = {"vocab_size": 1025, "blank_token_id": 1024}
_KEPT_STATES = 16  # of a stream, after blocks of `step_rows` rows


class CacheAwareParakeet(Parakeet):
    """A Parakeet with a cache-aware encoder, and any head. Implements `models.interface.SupportsStreams`."""

    encoder: CacheAwareConformer
    max_streams = 1
    keeps_open_windows = True

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
    """A model whose transducer decodes rows in blocks, and keeps the states after blocks once a stream was opened.

    A pass over an open window finds the states by the content of the rows: those of complete chunks equal the rows of earlier
    passes, to the last bit.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(_DEFAULTS | dict(config), dtype, device)
        self._states = OrderedDict[bytes, TransducerState]()  # by their digests

    def decode_rows(
        self, hidden: Sequence[Tensor], before: Sequence[TransducerState | None], rules: Sequence[LogitsRule | None]
    ) -> list[TransducerState]:
        digests = [b""] * len(hidden)
        if self._states or len(self._windows):
            digests = [self._digest(*item) for item in zip(hidden, before, rules, strict=True)]
        found = [self._states.get(digest) for digest in digests]
        new = [number for number, state in enumerate(found) if state is None]
        if new:
            rows, earlier = [hidden[number] for number in new], [before[number] for number in new]
            decoded = super().decode_rows(rows, earlier, [rules[number] for number in new])
            for number, state in zip(new, decoded, strict=True):
                found[number] = replace(state, digest=digests[number])
        states = [state for state in found if state is not None]
        for state in states:
            if state.digest:
                self._states[state.digest] = state
                self._states.move_to_end(state.digest)
        while len(self._states) > _KEPT_STATES * self.max_streams:
            self._states.popitem(last=False)
        return states

    def _digest(self, rows: Tensor, before: TransducerState | None, rule: LogitsRule | None) -> bytes:
        """Return the digest of a whole block and of those before it, b"" for rows whose state is not kept."""
        earlier = b"-" if before is None else before.digest
        if rule is not None or len(rows) < self.step_rows or not earlier:
            return b""
        return blake2b(rows.contiguous().view(torch.uint8).cpu().numpy().tobytes() + earlier, digest_size=32).digest()

    def stream_bytes(self, rows: int) -> int:
        transducer = self.transducer.spec
        return super().stream_bytes(rows) + _KEPT_STATES * (2 * transducer.layers + 1) * transducer.width * self.dtype.itemsize
