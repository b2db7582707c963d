"""Tiny media files of every format, and mutations of them."""

from __future__ import annotations

import io
import random
from fractions import Fraction
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image, ImageDraw

RATE = 16000
NUMBERS = [0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def image_files() -> dict[str, bytes]:
    """Return encoded images by name: every format with its modes, compressions and chunks."""
    noise = np.random.default_rng(0).integers(0, 256, (17, 23, 4), np.uint8)
    rgb = Image.fromarray(noise[..., :3])
    ImageDraw.Draw(rgb).rectangle((3, 3, 15, 9), fill=(200, 30, 90))
    rgba = Image.fromarray(noise)
    grey, palette = rgb.convert("L"), rgb.quantize(16)
    deep = Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds: dict[str, tuple[Image.Image, str, dict[str, Any]]] = {
        "png": (rgb, "PNG", {}),
        "png-rgba": (rgba, "PNG", {"exif": exif}),
        "png-palette": (palette, "PNG", {"transparency": 3}),
        "png-grey": (grey, "PNG", {"transparency": 100}),
        "png-deep": (deep, "PNG", {}),
        "png-bit": (rgb.convert("1"), "PNG", {}),
        "jpeg": (rgb, "JPEG", {"exif": exif}),
        "jpeg-progressive": (rgb, "JPEG", {"progressive": True, "subsampling": 2}),
        "jpeg-cmyk": (rgb.convert("CMYK"), "JPEG", {}),
        "jpeg-grey": (grey, "JPEG", {"optimize": True, "restart_marker_blocks": 1}),
        "webp": (rgb, "WEBP", {"exif": exif}),
        "webp-lossless": (rgba, "WEBP", {"lossless": True}),
        "webp-animated": (rgb, "WEBP", {"save_all": True, "append_images": [rgb.rotate(180)], "lossless": True}),
        "gif": (palette, "GIF", {"transparency": 2}),
        "gif-animated": (palette, "GIF", {"save_all": True, "append_images": [rgb.rotate(180).quantize(16)]}),
        "tiff": (rgb, "TIFF", {"exif": exif}),
        "tiff-deep": (deep, "TIFF", {}),
        "tiff-lzw": (rgb, "TIFF", {"compression": "tiff_lzw"}),
        "tiff-deflate": (rgba, "TIFF", {"compression": "tiff_adobe_deflate"}),
        "tiff-jpeg": (rgb, "TIFF", {"compression": "jpeg"}),
        "tiff-group4": (rgb.convert("1"), "TIFF", {"compression": "group4"}),
        "bmp": (rgb, "BMP", {}),
        "bmp-palette": (palette, "BMP", {}),
        "bmp-rgba": (rgba, "BMP", {}),
        "avif": (rgba, "AVIF", {"exif": exif}),
        "jpeg2000": (rgb, "JPEG2000", {}),
        "ppm": (rgb, "PPM", {}),
    }
    return {name: _saved(image, form, options) for name, (image, form, options) in kinds.items()}


def _saved(image: Image.Image, form: str, options: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def video_files() -> dict[str, bytes]:
    """Return encoded videos by name: twelve frames of 48x32 in common containers and codecs."""
    kinds = {
        "mp4-h264": ("mp4", "libx264", "yuv420p", {"g": "5", "bf": "2"}),
        "mp4-mpeg4": ("mp4", "mpeg4", "yuv420p", {"g": "5"}),
        "mkv-h264": ("matroska", "libx264", "yuv444p", {"g": "4", "bf": "0"}),
        "mkv-ffv1": ("matroska", "ffv1", "yuv420p", {}),
        "webm-vp8": ("webm", "libvpx", "yuv420p", {"g": "6", "deadline": "realtime"}),
        "webm-vp9": ("webm", "libvpx-vp9", "yuv420p", {"g": "6", "deadline": "realtime"}),
        "avi-mpeg4": ("avi", "mpeg4", "yuv420p", {"g": "5"}),
        "avi-mjpeg": ("avi", "mjpeg", "yuvj420p", {}),
        "mov-mjpeg": ("mov", "mjpeg", "yuvj420p", {}),
    }
    return {name: _clip(*kind) for name, kind in kinds.items()}


def _clip(container: str, codec: str, pixels: str, options: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format=container, options={"fflags": "+bitexact"}) as file:
        stream = file.add_stream(codec, rate=Fraction(10), options=options)
        stream.width, stream.height, stream.pix_fmt = 48, 32, pixels
        ramp = np.add.outer(np.arange(32) * 5, np.arange(48) * 3)[..., None] + np.array([0, 60, 120])
        for number in range(12):
            frame = av.VideoFrame.from_ndarray(((ramp + 20 * number) % 256).astype(np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


def audio_files() -> dict[str, bytes]:
    """Return encoded audio by name: a fifth of a second, one or two channels, in the formats of soundfile and PyAV."""
    time = np.arange(RATE // 5) / RATE
    stereo = np.stack([np.sin(880 * np.pi * time), 0.5 * np.sin(2000 * time**2)], 1).astype(np.float32) * 0.7
    kinds = {
        "wav": ("WAV", "PCM_16", RATE),
        "wav-adpcm": ("WAV", "IMA_ADPCM", 8000),
        "flac": ("FLAC", "PCM_16", RATE),
        "flac-24": ("FLAC", "PCM_24", 48000),
        "mp3": ("MP3", "MPEG_LAYER_III", RATE),
        "aiff": ("AIFF", "PCM_16", RATE),
    }
    out = {}
    for number, (name, (container, subtype, rate)) in enumerate(kinds.items()):
        file = io.BytesIO()
        soundfile.write(file, stereo[:, 0] if number % 2 else stereo, rate, subtype=subtype, format=container)
        out[name] = file.getvalue()
    others = {
        "m4a": ("ipod", "aac"),
        "webm": ("webm", "libopus"),
        "ogg": ("ogg", "vorbis"),  # in this and the next two, soundfile would write dates or random numbers
        "opus": ("ogg", "libopus"),
        "wav-float": ("wav", "pcm_f32le"),
    }
    return out | {name: _sound(*kind, stereo) for name, kind in others.items()}


def _sound(container: str, codec: str, stereo: np.ndarray[Any, Any]) -> bytes:
    out, rate = io.BytesIO(), 48000
    with av.open(out, "w", format=container, options={"fflags": "+bitexact"}) as file:
        stream = file.add_stream(codec, rate=rate, options={"strict": "experimental"})
        stream.layout = "stereo"
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(np.tile(stereo, (3, 1)).T), format="fltp", layout="stereo")
        frame.sample_rate, frame.pts = rate, 0
        resampler = av.AudioResampler(
            stream.codec_context.format or "fltp", "stereo", rate, stream.codec_context.frame_size or 960
        )
        for piece in [*resampler.resample(frame), *resampler.resample(None), None]:
            file.mux(stream.encode(piece))
    return out.getvalue()


FILES = {"image": image_files, "video": video_files, "audio": audio_files}


def mutated(modality: str, seed: int, case: int, files: dict[str, bytes]) -> tuple[str, bytes]:
    """Return `(description, bytes)` of one case, deterministic in the seed."""
    rng = random.Random(f"{seed} {modality} {case}")
    name = rng.choice(sorted(files))
    data, done = bytearray(files[name]), [name]
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3]) if case % 25 else 0):
        how = rng.choice([flip, fill, number, cut, repeat, remove, move, splice])
        how(rng, data, files)
        done.append(how.__name__)
    return "+".join(done), bytes(data)


def _place(rng: random.Random, data: bytearray, size: int = 1) -> int:
    """Choose a position to change, half of the time in the header."""
    last = max(len(data) - size, 0)
    return rng.randint(0, min(last, 256) if rng.random() < 0.5 else last)


def flip(rng: random.Random, data: bytearray, files: dict[str, bytes]) -> None:
    for _ in range(rng.choice([1, 1, 2, 8]) if data else 0):
        data[_place(rng, data)] ^= 1 << rng.randrange(8)


def fill(rng: random.Random, data: bytearray, files: dict[str, bytes]) -> None:
    at, size = _place(rng, data), rng.choice([1, 2, 4, 16])
    data[at : at + size] = bytes([rng.choice([0, 255, rng.randrange(256)])]) * min(size, len(data) - at)


def number(rng: random.Random, data: bytearray, files: dict[str, bytes]) -> None:
    """Overwrite bytes with a number at a limit, in either byte order: a wrong size or count."""
    size = rng.choice([1, 2, 4])
    at, value = _place(rng, data, size), rng.choice(NUMBERS) % (1 << 8 * size)
    data[at : at + size] = value.to_bytes(size, rng.choice(["little", "big"]))


def cut(rng: random.Random, data: bytearray, files: dict[str, bytes]) -> None:
    del data[rng.randint(0, len(data)) :]


def repeat(rng: random.Random, data: bytearray, files: dict[str, bytes]) -> None:
    at = _place(rng, data)
    piece = data[at : at + rng.choice([1, 4, 30, 300])]
    data[at:at] = piece * rng.choice([1, 1, 3, 40])


def remove(rng: random.Random, data: bytearray, files: dict[str, bytes]) -> None:
    at = _place(rng, data)
    del data[at : at + rng.choice([1, 4, 30, 300])]


def move(rng: random.Random, data: bytearray, files: dict[str, bytes]) -> None:
    at, size = _place(rng, data), rng.choice([1, 4, 30, 300])
    piece = data[at : at + size]
    del data[at : at + size]
    there = _place(rng, data)
    data[there:there] = piece


def splice(rng: random.Random, data: bytearray, files: dict[str, bytes]) -> None:
    other = files[rng.choice(sorted(files))]
    data[_place(rng, data) :] = other[rng.randint(0, len(other)) :]
