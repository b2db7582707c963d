"""What Qwen2-Audio wants to be fed: sounds of up to 30 s as log-mel frames, one token for 40 ms. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Self

import torch

from ..mm.embeddings import ROWS, EmbeddingSpec
from ..mm.errors import ConfigError, InputError
from ..mm.fields import BatchedField, FieldElem, FlatField
from ..mm.media.policy import DecodeSpec
from ..mm.parse import MultiModalDataParser
from ..mm.types import AudioItem, EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from .files import ProcessorFiles
from .interface import Span
from .mel import MelSpec, log_mel, read_mel_spec
from .options import for_modality

OPTIONS: dict[str, tuple[str, ...]] = {"audio": ()}
WIDTH, VOCABULARY, TOKEN = 4096, 151936, 151646  # where config.json leaves them out, as the published one does


class Qwen2AudioProcessingInfo:
    """ProcessingInfo of Qwen2-Audio. One slot token becomes as many as the item has embeddings."""

    modalities: tuple[str, ...] = ("audio",)
    prefill = "causal"

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        self._files, self._options = files, options
        for layer in options:
            for_modality(layer, "audio", OPTIONS)
        self.spec = read_mel_spec(files.audio, MelSpec(mels=128))
        self.decode_spec = DecodeSpec(rate=self.spec.rate)
        self.slot_ids: Mapping[str, int] = {"audio": _slot_id(files.config)}
        self._check_tower()

    def parser(self) -> MultiModalDataParser:
        """Sounds in any form, and rows as wide as the decoder."""
        width = (self._files.config.get("text_config") or {}).get("hidden_size", WIDTH)
        return MultiModalDataParser(self.modalities, embeddings={"audio": EmbeddingSpec(width, "audio_embeds")})

    def tuned(self, options: Mapping[str, Any]) -> Self:
        return type(self)(self._files, *self._options, options)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """One step per embedding; InputError for a sound that the tower's one pass does not take, or that makes none."""
        spec, samples = self.spec, header.samples
        if not header.exact:  # decoding gives no more, and may give less
            samples = min(samples, spec.longest)
        if samples > spec.longest:
            lasts, most = samples / spec.rate, spec.longest / spec.rate
            raise InputError(f"it lasts {lasts:.2f} s, the model takes at most {most:g} s; cut it into several items")
        rows = _rows(spec.frames(samples))
        if not rows:
            least = 2 * spec.hop + 1
            raise InputError(f"its {samples} samples make no token; {least} ({1000 * least / spec.rate:.0f} ms) are needed")
        return ItemGeometry(rows, 1, 1)

    def rows_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        rows, most = len(item.tensors[ROWS]), _rows(self.spec.frames(self.spec.longest))
        if rows > most:
            raise InputError(f"it holds {rows} rows, the model takes at most {most} for one sound; give several")
        return ItemGeometry(rows, 1, 1)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """`input_features` `[frames, mels]` and `audio_frames`, how many of them hold sound.

        The others, two at most, are the start of the silence that the published model fills up to 30 s with; its
        convolutions reach no further.
        """
        if not isinstance(item, AudioItem):
            raise TypeError(f"a {type(item).__name__} is no sound")
        grid, sounding = self.geometry(item.header), self.spec.frames(len(item.samples))
        features = log_mel(item.samples, self.spec, self.spec.longest, (sounding + 1) // 2 * 2 + 1)
        frames = FieldElem(torch.tensor(sounding), BatchedField(keep_on_cpu=True))
        return {"input_features": FieldElem(features.to(dtype), FlatField()), "audio_frames": frames}, grid

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Only embeddings: the slot's token, once per embedding."""
        return Span((self.slot_ids[modality],) * geometry.num_embeds)

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """A sound is taken whole."""
        return None

    def options_key(self, modality: str) -> str:
        """The resolved spectrogram spec."""
        return json.dumps(asdict(self.spec), sort_keys=True)

    def _check_tower(self) -> None:
        audio, spec = self._files.config.get("audio_config") or {}, self.spec
        for key, have in (("num_mel_bins", spec.mels), ("max_source_positions", spec.longest // spec.hop // 2)):
            if audio.get(key, have) != have:
                said = f"{key} is {audio[key]} in config.json"
                raise ConfigError(f"{said}, but the feature extractor's JSON makes {have}, or is missing and means it")


def _rows(frames: int) -> int:
    """The second convolution halves frames, rounding up; the average of two halves them again, rounding down."""
    return (frames + 1) // 2 // 2


def _slot_id(config: Mapping[str, Any]) -> int:
    """ConfigError for a token that the vocabulary does not have."""
    token = config.get("audio_token_index", config.get("audio_token_id", TOKEN))
    vocabulary = (config.get("text_config") or {}).get("vocab_size", VOCABULARY)
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
        raise ConfigError(f"audio_token_index {token!r} in config.json is outside the vocabulary of {vocabulary}")
    return token
