"""Encodes samples as an audio file while they are produced."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from torch import Tensor

from ...callers.errors import InputError, short_repr

MEDIA_TYPES = {
    "wav": "audio/wav", "mp3": "audio/mpeg", "opus": "audio/ogg", "aac": "audio/aac", "flac": "audio/flac", "pcm": "audio/pcm",
}  # fmt: skip
"""Format of a sound -> its media type."""
_ENCODED = {"mp3": ("mp3", "libmp3lame"), "opus": ("ogg", "libopus"), "aac": ("adts", "aac"), "flac": ("flac", "flac")}
"""Container and encoder of FFmpeg."""
_BIT_RATES = {"mp3": 96_000, "opus": 48_000, "aac": 96_000}
_UNKNOWN = 0xFFFFFFFF  # size in the header of a streamed WAV file


class SoundWriter:
    """Returns the bytes of a sound file of one channel, part by part.

    WAV and PCM have 16 bits; PCM is little-endian, without a header. The header of a WAV file does not tell its length. That of
    a FLAC file does, because readers need it: all its bytes come from `close`.

    Args:
        kind: a key of MEDIA_TYPES.
        rate: samples per second.

    Raises:
        InputError: an unknown format.
    """

    def __init__(self, kind: str, rate: int) -> None:
        if kind not in MEDIA_TYPES:
            reason = f"<<param=>>{short_repr(kind)} is unknown; give one of {', '.join(MEDIA_TYPES)}"
            raise InputError(reason, code="invalid_value", param="response_format")
        self._encoder = _Encoder(*_ENCODED[kind], rate, _BIT_RATES.get(kind)) if kind in _ENCODED else None
        self._head = _wav_head(rate) if kind == "wav" else b""

    def write(self, samples: Tensor) -> bytes:
        """Return the next bytes. `samples`: float32 `[n]`; those beyond [-1, 1] are clipped."""
        numbers = (samples.clamp(-1, 1) * 32767).round().numpy().astype("<i2")
        head, self._head = self._head, b""
        return head + (numbers.tobytes() if self._encoder is None else self._encoder.write(numbers))

    def close(self) -> bytes:
        """Return the last bytes."""
        return b"" if self._encoder is None else self._encoder.close()


def _wav_head(rate: int) -> bytes:
    format_chunk = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", _UNKNOWN, b"WAVE") + format_chunk + struct.pack("<4sI", b"data", _UNKNOWN)


_AT_ONCE = ("flac",)  # containers whose header is written last


@dataclass
class _UnseekableFile:
    """A file that cannot seek."""

    data: bytes = b""

    def write(self, data: bytes) -> int:
        self.data += bytes(data)
        return len(data)

    def take(self) -> bytes:
        data, self.data = self.data, b""
        return data


class _Encoder:
    """Encodes with FFmpeg into a container."""

    def __init__(self, container: str, codec: str, rate: int, bit_rate: int | None) -> None:
        import av

        self._sink = BytesIO() if container in _AT_ONCE else _UnseekableFile()
        self._count, self._rate = 0, rate
        self._container = av.open(self._sink, "w", format=container)
        stream: Any = self._container.add_stream(codec, rate=rate, layout="mono")
        if bit_rate is not None:
            stream.bit_rate = bit_rate
        self._stream = stream

    def write(self, numbers: np.ndarray) -> bytes:
        import av

        if len(numbers):
            frame = av.AudioFrame.from_ndarray(numbers[None].astype(np.int16), format="s16", layout="mono")
            frame.sample_rate, frame.pts = self._rate, self._count
            self._count += len(numbers)
            self._container.mux(self._stream.encode(frame))
        return self._sink.take() if isinstance(self._sink, _UnseekableFile) else b""

    def close(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._sink.take() if isinstance(self._sink, _UnseekableFile) else self._sink.getvalue()
