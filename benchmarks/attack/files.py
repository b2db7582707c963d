"""Small files that cost much where nobody counts: bombs, forged headers, formats with slow decoders."""

from __future__ import annotations

import io
import struct
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image


def png(width: int, height: int, bits: int = 8, color: int = 0, clear: bool = False) -> bytes:
    """Return a PNG of zeros; `color` as in the PNG standard (0 grey, 2 RGB, 3 palette)."""
    channels = {0: 1, 2: 3, 3: 1}[color]
    row = 1 + -(-width * bits * channels // 8)
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(bytes(row * min(1024, height - y))) for y in range(0, height, 1024)) + packer.flush()
    parts = [_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))]
    if color == 3:
        parts.append(_chunk(b"PLTE", bytes(6)))
    if clear:
        parts.append(_chunk(b"tRNS", b"\0" * (1 if color == 3 else 2 * channels)))
    return b"\x89PNG\r\n\x1a\n" + b"".join([*parts, _chunk(b"IDAT", packed), _chunk(b"IEND", b"")])


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def webp(side: int = 6688) -> bytes:
    """Return a lossless WebP of one colour."""
    found = io.BytesIO()
    Image.new("RGB", (side, side)).save(found, "WEBP", lossless=True, method=0)
    return found.getvalue()


def ppm(side: int = 3000) -> bytes:
    """Return a plain PPM, whose numbers are text."""
    return f"P3\n{side} {side}\n255\n".encode() + b"0 " * (3 * side * side)


def qoi(side: int = 6000) -> bytes:
    """Return a QOI of runs."""
    count = side * side
    runs = b"\xfd" * (count // 62) + (bytes([0xC0 | (count % 62 - 1)]) if count % 62 else b"")
    return b"qoif" + struct.pack(">II", side, side) + b"\x03\x00" + runs + bytes(7) + b"\x01"


def jpeg_scans(scans: int = 3000, side: int = 2048) -> bytes:
    """Return a progressive JPEG whose last scan is repeated; each pass visits the whole image."""
    found = io.BytesIO()
    Image.new("L", (side, side), 128).save(found, "JPEG", progressive=True)
    data = found.getvalue()
    start = data.rindex(b"\xff\xda")
    return data[:start] + data[start:-2] * scans + data[-2:]


def tiff_strips(strips: int = 200_000) -> bytes:
    """Return a TIFF of one row per strip, all at the same place."""
    entries = [(256, 3, 1, 1), (257, 4, 1, strips), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    table = 8 + 2 + 12 * 9 + 4
    entries += [(273, 4, strips, table), (277, 3, 1, 1), (278, 3, 1, 1), (279, 4, strips, table + 4 * strips)]
    head = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(entries))
    head += b"".join(struct.pack("<HHII", *entry) for entry in entries) + bytes(4)
    return head + struct.pack("<I", 0) * strips + struct.pack("<I", 1) * strips


def wav(rate: int = 1, seconds: int = 14_000) -> bytes:
    """Return 16-bit mono samples at a rate that nobody records with."""
    data = bytes(2 * rate * seconds)
    form = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def video(path: Path, seconds: int = 4, side: int = 64) -> Path:
    """Write an ordinary MP4 of 8 frames per second."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = side
        for i in range(8 * seconds):
            frame = av.VideoFrame.from_ndarray(np.full((side, side, 3), i * 7 % 256, np.uint8))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def mov_of_png(path: Path, side: int = 16_000) -> bytes:
    """Return a MOV whose one frame is a PNG of `side` squared pixels."""
    import av

    with av.open(str(path), "w", format="mov") as container:
        stream = container.add_stream("png", rate=1)
        stream.width = stream.height = side
        stream.pix_fmt = "gray"
        packet = av.Packet(png(side, side))
        packet.stream, packet.pts, packet.dts, packet.time_base = stream, 0, 0, Fraction(1, 1)
        container.mux(packet)
    return path.read_bytes()


def forged_mp4(path: Path) -> bytes:
    """Return a video whose time table announces 2**27 samples for the few it has."""
    data = bytearray(video(path).read_bytes())
    for name in (b"stts",):
        at = data.find(name)
        count = struct.unpack(">I", data[at + 8 : at + 12])[0]
        if count:
            data[at + 12 : at + 16] = struct.pack(">I", 1 << 27)
    at = data.find(b"stsz")
    data[at + 8 : at + 16] = struct.pack(">II", 1, 1 << 27)
    return bytes(data)
