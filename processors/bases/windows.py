"""Families that take long sounds in windows of their encoder, silence included. Knows no family and no model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..mm.fields import BatchedField, FieldElem, FlatField
from ..mm.types import AudioItem, ItemGeometry, MediaItem, MultiModalKwargsItem
from .mel import MelSpec, log_mel
from .speech import SpeechInfo


@dataclass(frozen=True)
class WindowSpec(MelSpec):
    """`piece`: samples of a window; `longest`: those of as many windows as the model takes."""

    piece: int = 480_000

    def pieces(self, samples: int) -> int:
        """Windows of a sound."""
        return -(-samples // self.piece)

    def audible(self, samples: int) -> int:
        """Frames of a sound that any sample falls into, and one of silence, which is like all behind it."""
        return min(self.pieces(samples) * self.piece // self.hop, (samples + self.window // 2) // self.hop + 2)


class WindowedInfo(SpeechInfo):
    """A family says how many rows so many sounding frames make (`num_rows`).

    `joined`: rows of its encoder, of two frames each, that become one. `apart`: the loudest band is looked for in each
    window; else in the whole sound, whose windows lie side by side.
    """

    joined: ClassVar[int] = 4
    apart: ClassVar[bool] = False

    def most_windows(self, seconds: int, rows: int) -> int:
        """Of so many seconds and rows each: those that fit the decoder's context, one at least."""
        return max(1, int(self.text["max_position_embeddings"]) // rows)

    @property
    def window(self) -> WindowSpec:
        spec: WindowSpec = self.specs["audio"]
        return spec

    def read(self, modality: str) -> WindowSpec:
        spec = super().read(modality)
        rows = spec.longest // spec.hop // 2
        self.agree("audio_config", max_source_positions=rows, max_position_embeddings=rows)
        most = self.most_windows(spec.longest // spec.rate, rows // self.joined)
        return WindowSpec(**asdict(spec) | {"longest": most * spec.longest}, piece=spec.longest)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """`input_features` `[frames, mels]` up to where all is silent; how many are of each window (`audio_frames`);
        `audio_windows` and `audio_rows`, numbers of the item's windows and embeddings.
        """
        if not isinstance(item, AudioItem):
            raise TypeError(f"a {type(item).__name__} is no sound")
        spec, grid = self.window, self.geometry(item.header)
        windows = self.windows(item.samples)
        frames = torch.tensor([len(window) for window in windows])
        return {
            "input_features": FieldElem(torch.cat(windows).to(dtype), FlatField()),
            "audio_frames": FieldElem(frames, FlatField(keep_on_cpu=True)),
            "audio_windows": FieldElem(torch.tensor(spec.pieces(len(item.samples))), BatchedField(keep_on_cpu=True)),
            "audio_rows": FieldElem(torch.tensor(grid.num_embeds), BatchedField(keep_on_cpu=True)),
        }, grid

    def windows(self, samples: Tensor) -> list[Tensor]:
        """Frames of each, up to where all is silent."""
        spec = self.window
        pieces = list(samples.split(spec.piece)) if self.apart else [samples]
        heard = [log_mel(piece, spec, spec.pieces(len(piece)) * spec.piece, spec.audible(len(piece))) for piece in pieces]
        return heard if self.apart else list(heard[0].split(spec.piece // spec.hop))
