"""Moonshine Streaming's encoder: frames of 5 ms, two causal convolutions, and layers that attend to near rows only.

The layers use no positions: at the end, position embeddings from the decoder's table are added to the rows. A row depends on
samples a limited time before and after it. When a window grows, only the rows near its end are therefore computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.activation import activation
from ..interface import StepLimits
from ..layers.basic import EmbeddingTable
from ..layers.builder import StoredTensor
from ..layers.linear import Linear
from ..memory_formulas import SMALL, OpBytes
from ..text.encoder_decoder import CrossDecoderSpec
from .mel_encoder import MelEncoderLayer, MelEncoderSpec, encoder_norm, mel_layer_bytes

_CMVN_EPS = 1e-6
_GROUP = 4  # frames per row
_TAPS = 5  # kernel size of both convolutions; their stride is 2
_BEFORE = 3  # the convolutions of a row also read the frames of so many rows before it


@dataclass(frozen=True)
class WindowState:
    """State of an open window, from which `LocalEncoder.extend` goes on.

    Args:
        frames: whole frames of the window so far.
        inputs: for each layer, the final rows of its input (later samples cannot change them) to which later rows attend.
        rows: final rows of the output, `[n, out]`.
    """

    frames: int
    inputs: tuple[Tensor, ...]
    rows: Tensor


class LocalEncoder(nn.Module):
    """Samples of items, concatenated and padded to whole frames -> `[rows, out]` per item: a row per four frames.

    An incomplete last frame counts as silence.

    Args:
        frame: samples per frame.
        sliding_windows: for each layer (a, b): a row attends to itself, the a - 1 rows before it and the b - 1 rows after it
            (none if b is 0).
    """

    __call__: Callable[..., list[Tensor]]

    def __init__(
        self,
        c: MelEncoderSpec,
        frame: int,
        sliding_windows: Sequence[tuple[int, int]],
        decoder: CrossDecoderSpec,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config, self.frame, self.sliding_windows, self.dtype = c, frame, sliding_windows, dtype
        self.log_k = StoredTensor((), dtype, device)
        self.linear = Linear(frame, {"embedder.linear": c.width}, False, dtype, device)
        self.conv1 = Linear(_TAPS * c.width, {"embedder.conv1": 2 * c.width}, True, dtype, device)
        self.conv2 = Linear(_TAPS * 2 * c.width, {"embedder.conv2": c.width}, True, dtype, device)
        self.layers = nn.ModuleList(MelEncoderLayer(c, dtype, device, window) for window in sliding_windows)
        self.final_norm = encoder_norm(c, c.names.end, dtype, device)
        self.pos_emb = EmbeddingTable(decoder.positions, c.width, dtype, device)
        self.out_width = decoder.hidden_size
        out = {"proj": self.out_width}
        self.proj = Linear(c.width, out, False, dtype, device) if c.width != self.out_width else nn.Identity()

    def forward(self, samples: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        counts = [-(-length // self.frame) for length in lengths]
        frames = self._embed(samples.to(self.dtype).view(-1, self.frame)).split(counts)
        items = [self._convolve(x, n // self.frame) for x, n in zip(frames, lengths, strict=True)]
        rows = [len(item) for item in items]
        x = torch.cat(items)
        del frames, items
        for layer in self.layers:
            x = layer(x, rows)
        places = torch.cat([torch.arange(n, device=x.device) for n in rows])
        return list(self._finish(x, places).split(rows))

    def extend(self, samples: Tensor, length: int, earlier: WindowState | None) -> tuple[Tensor, WindowState]:
        """Encode a window of `length` samples, and return all its rows and its new state.

        `earlier`: the state of the window when it was shorter, or None.
        """
        old = [0] * (len(self.sliding_windows) + 1) if earlier is None else self._final_rows(earlier.frames)
        new = self._final_rows(length // self.frame)
        x, kept = self._embed_from(samples, length, old[0]), list[Tensor]()
        for index, (layer, (before, _)) in enumerate(zip(self.layers, self.sliding_windows, strict=True)):
            if earlier is not None:
                x = torch.cat((earlier.inputs[index], x))
            start = max(0, old[index + 1] - before + 1) if earlier is not None else 0
            first = max(0, new[index + 1] - before + 1)
            kept.append(x[first - start : new[index] - start].clone())
            x = layer(x, [len(x)])[old[index + 1] - start :]
        out = self._finish(x, torch.arange(old[-1], old[-1] + len(x), device=x.device))
        rows = out if earlier is None else torch.cat((earlier.rows, out))
        return rows, WindowState(length // self.frame, tuple(kept), rows[: new[-1]].clone())

    def _final_rows(self, frames: int) -> list[int]:
        """Return the number of final rows of each layer's input, and of the output: rows that later frames cannot change.

        The last row never counts as final.
        """
        counts = [max(0, -(-frames // _GROUP) - 1)]
        for _, after in self.sliding_windows:
            counts.append(max(0, counts[-1] - max(0, after - 1)))
        return counts

    def _embed_from(self, samples: Tensor, length: int, first: int) -> Tensor:
        """Return the first layer's input from row `first` on."""
        skipped = max(0, first - _BEFORE) * _GROUP
        frames = self._embed(samples[skipped * self.frame :].to(self.dtype).view(-1, self.frame))
        rows = self._convolve(frames, length // self.frame - skipped, pad=not skipped)
        return rows if skipped else rows[first:]

    def _embed(self, frames: Tensor) -> Tensor:
        frames = frames - frames.mean(1, keepdim=True)
        frames = frames / (frames.square().mean(1, keepdim=True) + _CMVN_EPS).sqrt()
        return activation("silu", self.linear((self.log_k.weight.exp() * frames).asinh()))

    def _convolve(self, x: Tensor, whole: int, pad: bool = True) -> Tensor:
        """Return the rows of embedded frames `x`. The frames from `whole` on, which are incomplete, are set to 0 in place.

        Without `pad`, there are no zeros before `x`, and it gives `_BEFORE` rows fewer.
        """
        x[whole:] = 0
        for conv in (self.conv1, self.conv2):
            x = conv(F.pad(x, (0, 0, (_TAPS - 1) * pad, 0)).unfold(0, _TAPS, 2).flatten(1))
            x = activation("silu", x) if conv is self.conv1 else x
        return x

    def _finish(self, x: Tensor, places: Tensor) -> Tensor:
        out: Tensor = self.proj(self.final_norm(x) + self.pos_emb(places))
        return out

    def window_bytes(self, rows: int) -> int:
        """Return the bytes of the WindowState of an item of `rows` rows."""
        inputs = sum(before - 1 + max(0, after - 1) for before, after in self.sliding_windows)
        return (inputs * self.config.width + rows * self.out_width) * self.dtype.itemsize

    def input_bytes(self, rows: int) -> int:
        return _GROUP * rows * self.frame * self.dtype.itemsize

    def encoder_bytes(self, rows: int, limits: StepLimits) -> int:
        c, ops, s = self.config, OpBytes(self.dtype, limits), self.dtype.itemsize
        row = c.width * s
        embed = _GROUP * (
            self.frame * s + max(2 * self.frame * s, self.frame * s + ops.linear(self.frame, c.width, _GROUP * rows), 2 * row)
        )
        first = 4 * row + 10 * row + max(4 * row, 2 * ops.linear(_TAPS * c.width, 2 * c.width, 2 * rows))
        second = 4 * row + 2 * 2 * row + 10 * row + max(4 * row, ops.linear(2 * _TAPS * c.width, c.width, rows))
        edge = 4 * 2 * row  # of zeros before an item
        copies = 3 * c.attention_width * s if not ops.fused("varlen_attention") else 0
        layers = mel_layer_bytes(c, rows, ops) + copies
        return SMALL + self.input_bytes(rows) + edge + rows * max(embed, first, second, layers)


class _CountsFrames(Protocol):
    @property
    def frames(self) -> int: ...


S = TypeVar("S", bound=_CountsFrames)


class WindowEncoder(Protocol[S]):
    """An encoder that extends a window from its state. `frame`: inputs of `extend` per frame of the state (samples, or 1)."""

    @property
    def frame(self) -> int: ...

    def extend(self, samples: Tensor, length: int, earlier: S | None) -> tuple[Tensor, S]:
        """Encode a window of `length` samples (or final frames), and return all its rows and its new state."""


class WindowStates(Generic[S]):
    """States of the open windows of live streams, by the window's number. The one used least recently is dropped first.

    A window whose state was dropped, or that has become shorter, is encoded from its start.
    """

    def __init__(self, encoder: WindowEncoder[S]) -> None:
        self._encoder, self._states = encoder, OrderedDict[int, S]()

    def encode(self, window: int, samples: Tensor, length: int, max_windows: int) -> Tensor:
        """Return the rows of a window of `length` samples, and keep the states of at most `max_windows`, this one first.

        Rows that are not finite leave no state, so that the next pass encodes the window from its start.
        """
        earlier = self._states.pop(window, None)
        if earlier is not None and earlier.frames > length // self._encoder.frame:
            earlier = None
        rows, state = self._encoder.extend(samples, length, earlier)
        if max_windows and bool(rows.isfinite().all()):
            while len(self._states) >= max_windows:
                self._states.popitem(last=False)
            self._states[window] = state
        return rows

    def __len__(self) -> int:
        """Return the number of open windows whose states are kept."""
        return len(self._states)

    def drop(self, window: int) -> None:
        self._states.pop(window, None)
