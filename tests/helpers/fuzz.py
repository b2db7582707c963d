"""Send mutated images, videos and audio through decoding and processors, and compare with the bare codec.

`python tests/helpers/fuzz.py audio --seed 7 --first 12 --count 1` repeats one case; a failing test prints its own.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import os
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import cv2  # noqa: F401  # before the address space is limited
import numpy as np
import soundfile
import soxr
import torch
from mutants import FILES, RATE, mutated
from PIL import Image
from sensorium.callers.errors import InputError
from sensorium.callers.heap import trim_heap
from sensorium.mm.buffers import BUFFERS
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.media import gate
from sensorium.mm.media.policy import DecodeSpec, MediaPolicy
from sensorium.mm.parse import MediaSource
from sensorium.mm.types import AudioItem, ImageItem, MediaHeader, MediaItem, VideoItem
from sensorium.models.families.qwen2_audio.processing import Qwen2AudioProcessingInfo
from sensorium.models.families.qwen2_vl.processing import Qwen2VLProcessingInfo
from sensorium.processors.files import ProcessorFiles

POLICY = MediaPolicy(max_bytes=1 << 20, max_pixels=1 << 16, max_video_bytes=8 << 20, max_audio_seconds=10.0)
SPEC = DecodeSpec(FrameSampling(num_frames=-1), RATE)
SOME = DecodeSpec(FrameSampling(fps=3.0, max_frames=4), RATE)
LOUDEST = 1e10  # louder or non-finite audio is refused
SECONDS = 120  # seconds for one case, after which it counts as hung


# The bare codecs: each returns an array, or None for input that is refused or too large.


def bare_image(data: bytes) -> np.ndarray[Any, Any] | None:
    """Decode with Pillow alone: uint8 `[height, width, 3]`."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > POLICY.max_pixels:
                return None
            image.load()
            decoded = image
    except Exception:  # any exception of Pillow is a refusal
        return None
    pixels = _rgb(decoded)
    turned = {2: (0, 1), 3: (2, 0), 4: (2, 1), 5: (3, 1), 6: (3, 0), 7: (1, 1), 8: (1, 0)}.get(_orientation(decoded))
    if turned:
        pixels = np.rot90(pixels, turned[0])
        pixels = pixels[:, ::-1] if turned[1] else pixels
    return pixels


def _orientation(image: Image.Image) -> object:
    try:
        return image.getexif().get(0x0112)
    except Exception:  # damaged EXIF rotates nothing
        return None


def _rgb(image: Image.Image) -> np.ndarray[Any, Any]:
    if image.mode.startswith("I;16"):
        return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, 2)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))


def bare_video(data: bytes) -> np.ndarray[Any, Any] | None:
    """Decode with PyAV alone, keeping every frame without an error: uint8 `[frames, height, width, 3]`."""
    frames: list[np.ndarray[Any, Any]] = []
    try:
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.video[0]
            size, rest = (stream.codec_context.height, stream.codec_context.width), POLICY.max_video_bytes
            stream.codec_context.options = {"max_pixels": str(POLICY.max_pixels)}
            stream.codec_context.thread_count = 1
            for frame in container.decode(stream):
                rest -= frame.height * frame.width * 3
                if rest < 0 or (frame.height, frame.width) != size or frame.height * frame.width > POLICY.max_pixels:
                    return None
                frames.append(np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90)))
    except (av.error.FFmpegError, IndexError, ValueError, AttributeError):
        return None
    return np.stack(frames) if frames else None


def bare_audio(data: bytes) -> np.ndarray[Any, Any] | None:
    """Decode with soundfile alone, or PyAV alone for other formats: float32 `[samples]`."""
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if not 0 < file.frames <= POLICY.max_audio_seconds * file.samplerate or _own_rule(file, len(data)):
                return None
            samples, rate = file.read(dtype="float32", always_2d=True), file.samplerate
    except (soundfile.LibsndfileError, RuntimeError, TypeError):  # TypeError: a file that it takes for raw samples
        heard = _bare_container(data)
        if heard is None:
            return None
        samples, rate = heard
    return _mono(samples, rate)


def _mono(samples: np.ndarray[Any, Any], rate: int) -> np.ndarray[Any, Any] | None:
    if not len(samples):
        return None
    mono = samples.mean(1, dtype=np.float32)
    if not np.abs(mono).max() < LOUDEST:
        return None
    due = math.ceil(len(mono) * RATE / rate)
    out = mono if rate == RATE else soxr.resample(mono, rate, RATE, quality="HQ")[:due]
    return np.pad(out, (0, due - len(out)))


_SAMPLE_BYTES = {"PCM_U8": 1, "PCM_S8": 1, "PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "FLOAT": 4, "DOUBLE": 8}
_HEADER = 128  # bytes of the headers of these files, at most


def _own_rule(file: soundfile.SoundFile, size: int) -> bool:
    """Return whether we read a damaged file in another way than soundfile, as tests/mm/media compare in detail.

    These are samples after the announced ones, and ADPCM: FFmpeg leaves out the blocks that soundfile reads as noise.
    """
    if file.subtype.endswith("ADPCM"):
        return True
    width = _SAMPLE_BYTES.get(file.subtype) if file.format in ("WAV", "AIFF") else None
    return width is not None and size - file.frames * file.channels * width > _HEADER


def _bare_container(data: bytes, skip_faults: bool = False) -> tuple[np.ndarray[Any, Any], int] | None:
    pieces, heard = [], 0
    try:
        with av.open(io.BytesIO(data)) as container:
            stream = container.streams.audio[0]
            stream.codec_context.thread_count = 1
            for packet in container.demux(stream):
                for frame in _frames(packet, skip_faults):
                    heard += frame.samples
                    planar = (frame.sample_rate, frame.format.name) == (stream.rate, "fltp")
                    if not planar or heard > POLICY.max_audio_seconds * stream.rate:
                        return None
                    pieces.append(frame.to_ndarray().T)
    except (av.error.FFmpegError, IndexError, ValueError, AttributeError):
        return None
    return (np.concatenate(pieces), stream.rate) if pieces and len({p.shape[1] for p in pieces}) == 1 else None


def _frames(packet: av.Packet, skip_faults: bool) -> list[Any]:
    try:
        return list(packet.decode())
    except av.error.InvalidDataError:
        if not skip_faults:
            raise
        return []


def other_audio(data: bytes) -> np.ndarray[Any, Any] | None:
    """Decode a damaged MP3 with PyAV alone: float32 `[samples]`. soundfile stops where something is between its frames."""
    heard = _bare_container(data, skip_faults=True) if soundfile_format(data) == "MP3" else None
    return None if heard is None else _mono(*heard)


def soundfile_format(data: bytes) -> str | None:
    try:
        return str(soundfile.info(io.BytesIO(data)).format)
    except (soundfile.LibsndfileError, RuntimeError, TypeError):
        return None


BARE = {"image": bare_image, "video": bare_video, "audio": bare_audio}


# Expectations of every case.


class Wrong(AssertionError):
    """A violated expectation."""


def check(modality: str, data: bytes, whole: bool, info: Any) -> dict[str, bool]:
    """Return whether our decoder accepts the file ("taken"), the bare codec does ("bare"), both give equal content
    ("agreed"), and seeking gives the same frames as decoding in order ("jumped").

    `whole`: the file is undamaged, so its header must be right.
    """
    bare = BARE[modality](data)
    header, item = through(data, modality, SPEC, POLICY)
    if item is None or header is None:
        return {"bare": bare is not None}
    if whole and header.exact and not _as_planned(header, item):
        raise Wrong(f"the header counts as exact and says {header}, but decoding gave {item.header}")
    processed(header, item, info)
    jumped = _same_when_sampled(data, item) if isinstance(item, VideoItem) else True
    got = _array(item)
    equal = _equal(got, bare) or (modality == "audio" and bare is not None and _equal(got, other_audio(data)))
    return {"taken": True, "bare": bare is not None, "agreed": equal, "jumped": jumped}


def _equal(got: np.ndarray[Any, Any], bare: np.ndarray[Any, Any] | None) -> bool:
    return bare is not None and got.shape == bare.shape and np.allclose(got, bare, rtol=1e-5, atol=1e-5)


def through(data: bytes, modality: str, spec: DecodeSpec, policy: MediaPolicy) -> tuple[MediaHeader | None, MediaItem | None]:
    """Return header and item, or None where they are refused."""
    header = None
    try:
        source = gate.load(MediaSource(modality, 0, data), policy)
        gate.content_hash(source, policy)
        (header,) = gate.probe(source, spec, policy)
        (item,) = gate.decode(source, spec, policy)
    except InputError as error:
        _one_line(error)
        return header, None
    _bounded(header, item)
    return header, item


def processed(header: MediaHeader, item: MediaItem, info: Any) -> None:
    """Check that the processor accepts the item or gives a reason, and makes no more than planned."""
    try:
        planned = info.geometry(header)
        _, grid = info.process(item, torch.float32)
    except InputError as error:
        return _one_line(error)
    more = grid.num_embeds > planned.num_embeds and header.exact  # an estimate is planned again when the item is decoded
    if more or grid != info.geometry(item.header):
        raise Wrong(f"the processor made {grid}, but {planned} was planned")


def _one_line(error: InputError) -> None:
    if "\n" in str(error) or not 10 < len(str(error)) < 400:
        raise Wrong(f"the message {str(error)!r} is not one line") from None


def _same_when_sampled(data: bytes, whole: VideoItem) -> bool:
    """Check that seeking gives the frames of a full decode, and that the other backend and frame recovery work."""
    with at_most_more(256 << 20):
        through(data, "video", SOME, replace(POLICY, video_backend="opencv"))
    through(data, "video", SOME, replace(POLICY, frame_recovery=True))
    some = through(data, "video", SOME, POLICY)[1]
    if not isinstance(some, VideoItem):
        return False
    frames = dict(zip(whole.plan.indices, whole.frames, strict=True))
    pairs = zip(some.plan.indices, some.frames, strict=True)
    return all(index in frames and torch.equal(frame, frames[index]) for index, frame in pairs)


@contextmanager
def at_most_more(size: int) -> Iterator[None]:
    """Let this process map so many bytes more, as workers do: OpenCV has no option for the largest frame of a stream."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _bounded(header: MediaHeader, item: MediaItem) -> None:
    """Check that decoding never yields more than planned."""
    got = item.header
    if isinstance(item, ImageItem) and got != header:
        raise Wrong(f"planned {header}, decoded {got}")
    longest = POLICY.max_audio_seconds * DecodeSpec().rate  # which bounds files whose header is an estimate
    most = header.samples if header.exact else longest
    if isinstance(item, AudioItem) and not 0 < got.samples <= most:
        raise Wrong(f"planned {header.samples} samples, decoded {got.samples}")
    if isinstance(item, VideoItem):
        plan, planned = item.plan, header.frames
        if planned is None or got.size != header.size or len(plan.indices) > len(planned.indices):
            raise Wrong(f"planned {header}, decoded {got}")
        if not len(item.frames) == len(plan.indices) == len(plan.timestamps) > 0:
            raise Wrong(f"{len(item.frames)} frames, {plan}")


def _as_planned(header: MediaHeader, item: MediaItem) -> bool:
    if isinstance(item, VideoItem) and header.frames:
        return sorted(item.plan.indices + item.plan.missing) == list(header.frames.indices)
    return item.header == header


def _array(item: MediaItem) -> np.ndarray[Any, Any]:
    if isinstance(item, ImageItem):
        return item.pixels.numpy()
    return item.samples.numpy() if isinstance(item, AudioItem) else item.frames.numpy()


# The loop runs in its own process, because it may crash and its memory is measured.


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("modality", choices=sorted(FILES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--progress", type=Path, help="file to write the running case to")
    options = parser.parse_args()
    modality, files = options.modality, FILES[options.modality]()
    info = (Qwen2AudioProcessingInfo if modality == "audio" else Qwen2VLProcessingInfo)(ProcessorFiles())
    tally: Counter[str] = Counter()
    wrong, unlike, memory, before = [], [], [], _peak()
    for case in range(options.first, options.first + options.count):
        how, data = mutated(modality, options.seed, case, files)
        if options.progress:
            options.progress.write_text(f"{case} ({how})")
        signal.alarm(SECONDS)
        try:
            found = check(modality, data, "+" not in how, info)
        except Exception as error:  # any exception is a finding
            place = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"case {case} ({how}): {type(error).__name__}: {error} [{Path(place.filename).name}:{place.lineno}]")
            continue
        tally.update(cases=1, **found)
        if found["bare"] and not found.get("agreed"):
            unlike.append(f"case {case} ({how}): {'other content' if found.get('taken') else 'refused'}")
        if case % 20 == 0:
            gc.collect()
            BUFFERS.clear()  # neither its idle buffers, one per size, have leaked,
            trim_heap()  # nor what the C library keeps between blocks
            memory.append(_resident())
    signal.alarm(0)
    print(json.dumps({**tally, "wrong": wrong, "unlike": unlike, "memory": memory, "peak": _peak() - before}))


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
