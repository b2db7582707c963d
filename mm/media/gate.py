"""The entry point of media: load, identify, probe and decode a source. Errors name the item."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, replace
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch
from PIL import _plugins

from ...callers.errors import InputError
from ..hashing import digest
from ..parse import MediaSource, item_errors
from ..types import AudioItem, EmbeddingItem, ImageItem, MediaHeader, MediaItem
from . import chunks, image, pdf, video
from .cut_off import cut_off
from .image_pages import is_heif
from .isolate import CodecRunner, codec_runner, run_inline
from .ledger import Ledger
from .policy import WHOLE_SOUND, AudioSelection, DecodeSpec, FrameFiles, MediaPolicy, MediaUrl, PdfPage, slow_error
from .source import is_http, open_local, read
from .trailing import unread_data
from .video_frames import attached_audio
from .video_webp import is_animated_webp

_log = logging.getLogger("sensorium")
_IMAGE = (*(f"PIL.{name}" for name in _plugins), "PIL.ImageOps", "PIL.features", "encodings.unicode_escape")


def modules(modality: str, policy: MediaPolicy) -> tuple[str, ...]:
    """Return the modules that the first item of a modality imports, so that an engine can import them before it serves."""
    opencv = ("cv2",) if policy.video_backend == "opencv" else ()
    video = (f"{__package__}.audio_files", "av", "av.subtitles.stream", *opencv)
    audio = (f"{__package__}.audio", "soundfile", "soxr", "av")
    return {"image": _IMAGE, "video": video, "audio": audio}.get(modality, (*_IMAGE, *video))


def is_remote(source: MediaSource) -> bool:
    """Return whether the bytes come over the network."""
    data = source.data.file if isinstance(source.data, PdfPage) else source.data
    files = data.files if isinstance(data, FrameFiles) else [data]
    urls = [file.url if isinstance(file, MediaUrl) else file for file in files]
    return any(isinstance(url, str) and is_http(url) for url in urls)


def load(source: MediaSource, policy: MediaPolicy, ledger: Ledger | None = None) -> MediaSource:
    """Read the path or URL of a source and return the source with the bytes. May wait for the network.

    Raises:
        MediaError: a path, URL or size is refused by the policy, or cannot be read.
    """
    if source.data is None or isinstance(source.data, EmbeddingItem):
        return source
    with error_context(source):
        return replace(source, data=read(source.data, source.kind, policy, ledger))


def content_hash(source: MediaSource, policy: MediaPolicy) -> str:
    """Return 64 hex digits of the content: encoded bytes as they are, pixels and samples with shape and dtype."""
    with error_context(source):
        if isinstance(source.data, EmbeddingItem):
            encoded = source.data.encoded
            grids = () if encoded is None else tuple(astuple(grid) for grid in encoded.geometries)
            return digest("rows", source.modality, source.data.tensors, grids)
        if _has_encoded_frames(source.data):
            return digest("media", source.modality, source.kind, "files", source.data, policy.background)
        if isinstance(source.data, PdfPage):
            content = pdf.hash_page(source.data, policy)
        elif source.kind == "image":
            content = image.hash_image(source.data, policy)
        elif source.kind == "audio":
            content = _hash_audio(source.data)
        else:
            content, track = video.hash_video(source.data, policy), attached_audio(source.data)
            content = content if track is None else digest(content, _hash_audio(track))
        return digest("media", source.modality, source.kind, content)


def probe(source: MediaSource, spec: DecodeSpec, policy: MediaPolicy, tenant: str | None = None) -> list[MediaHeader]:
    """Return the headers of a source's items without decoding it: several for a video in chunks or with audio, else one.

    `tenant`: worker processes that have served another one are not used.

    Raises:
        MediaError: a header cannot be read, or exceeds a limit.
    """
    runner = partial(_runner, policy, tenant)
    run = runner(source.data, source.kind)
    with error_context(source):
        if isinstance(source.data, PdfPage) and source.kind == "image":
            header = pdf.probe(source.data, policy, run)
        elif source.kind == "image":
            header = run(image.probe_image, source.data, policy)
        elif source.kind == "audio":
            header = _probe_audio(source.data, spec, policy, run)
        else:
            header = run(video.probe_video, _blank_frames(source.data, policy, runner), spec.sampling, policy)
        if source.modality == "vision_chunk":
            return chunks.split_header(header, source.kind, spec)
        track = _audio_of(source, spec, policy, run)
        if track is None:
            return [header]
        sound = _probe_audio(track, spec, policy, runner(track, "audio"), True)
        return [header, replace(sound, samples=len(range(sound.samples)[_samples_of_cut(spec)]))]


def decode(source: MediaSource, spec: DecodeSpec, policy: MediaPolicy, tenant: str | None = None) -> list[MediaItem]:
    """Decode the items of a source, one for each header of `probe`. `tenant` is that of `probe`.

    Raises:
        MediaError: the source is broken, or exceeds a limit.
    """
    runner = partial(_runner, policy, tenant)
    run = runner(source.data, source.kind, decoding=True)
    item: MediaItem
    with error_context(source):
        if isinstance(source.data, PdfPage) and source.kind == "image":
            item = ImageItem(pdf.decode(source.data, policy, run))
        elif source.kind == "image":
            item = ImageItem(run(image.decode_image, source.data, policy))
        elif source.kind == "audio":
            item = _decode_audio(source.data, spec, policy, run)
        elif _has_encoded_frames(source.data):
            frames = _blank_frames(source.data, policy, runner)
            item = video.decode_video(frames, spec.sampling, policy, _frame_reader(source.data[0], policy, runner))
        else:
            item = run(video.decode_video, source.data, spec.sampling, policy)
            _warn_of_rest(source.data, "video")
        if source.modality == "vision_chunk":
            return [*chunks.split(item, source.kind, spec)]
        track = _audio_of(source, spec, policy, run)
        if track is None:
            return [item]
        cut = _samples_of_cut(spec)
        whole = spec if cut == slice(0, None) else replace(spec, max_audio_samples=None)
        sound = _decode_audio(track, whole, policy, runner(track, "audio"), True)
        return [item, replace(sound, samples=sound.samples[cut])]


def audio_blocks(
    source: MediaSource,
    rate: int,
    policy: MediaPolicy,
    sound: AudioSelection = WHOLE_SOUND,
    warn: Callable[[str], object] | None = None,
) -> Generator[torch.Tensor, None, None]:
    """Yield the mono samples of an audio source at `rate` in blocks, in constant memory if it is a file that soundfile reads.

    Other files are held as encoded bytes. If they must be decoded in a worker process, all samples are held, too. `warn` is
    called with what the user should know; the default writes it to the log.

    Raises:
        MediaError: the source cannot be read, is broken or cut off, or exceeds a limit. Samples before a fault were yielded.
    """
    from . import audio
    from .audio_files import is_streamable

    with error_context(source), open_local(source.data) or nullcontext() as file:
        is_first = sound.track in ("default", 0)
        streamed = file is not None and policy.decode_isolation == "thread" and is_first and is_streamable(file, policy)
        encoded: object = file if streamed else read(source.data, "audio", policy)
        run = run_inline if streamed else _runner(policy, None, encoded, "audio", decoding=True)
        report = warn or partial(_log.warning, "audio: %s")
        data, fault = encoded, None
        if run is not run_inline:
            decoded = run(audio.decode_with_warnings, encoded, rate, policy, None, sound, False, True)
            data, sound, fault = decoded.samples, WHOLE_SOUND, decoded.fault
            for text in decoded.warnings:
                report(text)
        yield from audio.audio_blocks(data, rate, policy, sound, report)
        if fault is not None:
            raise InputError(**fault)
        if rest := unread_data(encoded):
            report(rest)
        if reason := cut_off(encoded):
            raise InputError(reason)


def _has_encoded_frames(data: object) -> TypeGuard[tuple[list[bytes], Any]]:
    """Return whether the data are those of FrameFiles: frames in bytes, and their metadata."""
    return (
        isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], list) and isinstance((data[0] or [None])[0], bytes)
    )


def _blank_frames(data: Any, policy: MediaPolicy, runner: Callable[..., CodecRunner]) -> Any:
    """Replace each encoded frame by a blank one of the same size that takes no memory. Return other data unchanged."""
    if not _has_encoded_frames(data):
        return data
    headers = [runner(frame, "image")(image.probe_image, frame, policy) for frame in data[0]]
    return [np.broadcast_to(np.uint8(0), (header.height, header.width, 3)) for header in headers], data[1]


def _frame_reader(
    frames: Sequence[bytes], policy: MediaPolicy, runner: Callable[..., CodecRunner]
) -> Callable[[int], torch.Tensor]:
    """Return a function that decodes a frame. In worker processes, all its calls together may take `worker_seconds`."""
    left = policy.worker_seconds

    def read_frame(position: int) -> torch.Tensor:
        nonlocal left
        frame = frames[position]
        run = runner(frame, "image", True)
        if run is run_inline:
            return run(image.decode_image, frame, policy)
        try:
            pixels, seconds = run(decode_timed, frame, replace(policy, worker_seconds=left))
        except InputError as error:
            raise slow_error(policy.worker_seconds) if error.info.param == "worker_seconds" else error from None
        left -= seconds
        if left <= 0:
            raise slow_error(policy.worker_seconds)
        return pixels

    return read_frame


def decode_timed(data: bytes, policy: MediaPolicy) -> tuple[torch.Tensor, float]:
    """Return the pixels of an image and the seconds of CPU time that decoding it took."""
    began = time.thread_time()
    return image.decode_image(data, policy), time.thread_time() - began


def _runner(policy: MediaPolicy, tenant: str | None, data: object, kind: str, decoding: bool = False) -> CodecRunner:
    """Return the runner of codecs for `data`: a worker if the policy isolates codecs, if they are slow, and for PDFs."""
    if isinstance(data, PdfPage):
        return codec_runner(policy, data.file, True, tenant)
    slow = False
    if isinstance(data, bytes) and policy.decode_isolation != "process":
        if kind == "image":
            slow = is_heif(data) or (decoding and image.is_slow(data, policy))
        else:
            slow = _is_slow_sound(data, kind) or (kind == "video" and is_animated_webp(data))  # Pillow holds the GIL
    return codec_runner(policy, data, slow, tenant)


# Models without audio need none of the modules that these functions import.


def _is_slow_sound(data: bytes, kind: str) -> bool:
    from .audio_files import is_slow

    return is_slow(data, kind)


def _hash_audio(data: object) -> str:
    from .audio import hash_audio

    return hash_audio(data)


def _probe_audio(
    data: object, spec: DecodeSpec, policy: MediaPolicy, run: CodecRunner, from_first_frame: bool = False
) -> MediaHeader:
    from .audio import probe_audio

    sound = spec.video_sound if from_first_frame else spec.sound
    return run(probe_audio, data, spec.rate, policy, sound, from_first_frame)


def _decode_audio(
    data: object, spec: DecodeSpec, policy: MediaPolicy, run: CodecRunner, from_first_frame: bool = False
) -> AudioItem:
    """Decode an audio, or that of a video `from_first_frame` on. Warnings are written to the log."""
    from . import audio

    sound = spec.video_sound if from_first_frame else spec.sound
    limits = (spec.rate, policy, spec.max_audio_samples, sound, from_first_frame)
    decoded = run(audio.decode_with_warnings, data, *limits)
    for text in decoded.warnings:
        _log.warning("audio: %s", text)
    if not from_first_frame:
        _warn_of_rest(data, "audio")
    if reason := cut_off(data):
        _log.warning("audio: %s", reason)
    return AudioItem(decoded.samples, spec.rate)


def _warn_of_rest(data: object, modality: str) -> None:
    if text := unread_data(data):
        _log.warning("%s: %s", modality, text)


def _samples_of_cut(spec: DecodeSpec) -> slice:
    """Return the samples of a video's audio between the `start` and `end` of its frames."""
    start, end = spec.sampling.start, spec.sampling.end
    return slice(round(start * spec.rate), None if end is None else round(end * spec.rate))


def _audio_of(source: MediaSource, spec: DecodeSpec, policy: MediaPolicy, run: CodecRunner) -> object | None:
    """Return the source of a video's audio: the file or the attached samples. None if there is no audio to use."""
    if not spec.use_audio_in_video or source.kind != "video":
        return None
    if isinstance(source.data, bytes | bytearray | memoryview):
        from .audio_container import has_audio

        return source.data if run(has_audio, bytes(source.data), policy) else None
    return attached_audio(source.data)


@contextmanager
def error_context(source: MediaSource) -> Iterator[None]:
    """Turn an InputError inside the context into a MediaError that names the item; see `item_errors`."""
    with item_errors(source.modality, source.index):
        yield
