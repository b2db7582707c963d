"""The one door for media: from a source to bytes, header and decoded item, errors by name. Knows no family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..errors import InputError, MediaError
from ..hashing import digest
from ..parse import MediaSource
from ..types import AudioItem, EmbeddingItem, ImageItem, MediaHeader, MediaItem
from . import audio, chunks, image, isolate, video
from .audio_files import has_track
from .isolate import caller
from .policy import DecodeSpec, MediaPolicy, MediaUrl
from .source import read
from .video_frames import sound_beside


def is_remote(source: MediaSource) -> bool:
    """Whether its bytes come over the network."""
    data = source.data.url if isinstance(source.data, MediaUrl) else source.data
    return isinstance(data, str) and data[:8].lower().startswith(("http:", "https:"))


def kept_for(policy: MediaPolicy, owner: object) -> Callable[[], object]:
    """What its codecs run in is kept for `owner` until what this returns is called, or the owner is gone."""
    return isolate.kept_for(policy, owner)


def load(source: MediaSource, policy: MediaPolicy) -> MediaSource:
    """The source with what a path or URL names in its place; may wait for the network.

    Raises:
        MediaError: a path, URL or size that the policy refuses, or that cannot be read.
    """
    if source.data is None or isinstance(source.data, EmbeddingItem):
        return source
    with named(source):
        return replace(source, data=read(source.data, source.kind, policy))


def content_hash(source: MediaSource, policy: MediaPolicy) -> str:
    """64 hex digits of what was given: encoded bytes as they are, pixels and samples with shape and type."""
    with named(source):
        if isinstance(source.data, EmbeddingItem):
            return digest("rows", source.modality, source.data.tensors)
        if source.kind == "image":
            content = image.hash_image(source.data, policy)
        elif source.kind == "audio":
            content = audio.hash_audio(source.data)
        else:
            content, sound = video.hash_video(source.data, policy), sound_beside(source.data)
            content = content if sound is None else digest(content, audio.hash_audio(sound))
        return digest("media", source.modality, source.kind, content)


def probe(source: MediaSource, spec: DecodeSpec, policy: MediaPolicy) -> list[MediaHeader]:
    """The headers of the items that the source is made of, without decoding it: one, but for a video fed in chunks, or with
    its sound.

    Raises:
        MediaError: a header that cannot be read, or that is over a limit.
    """
    run = caller(policy, source.data)
    with named(source):
        if source.kind == "image":
            header = run(image.probe_image, source.data, policy)
        elif source.kind == "audio":
            header = run(audio.probe_audio, source.data, spec.rate, policy)
        else:
            header = run(video.probe_video, source.data, spec.sampling, policy)
        if source.modality == "vision_chunk":
            return chunks.split_header(header, source.kind, spec)
        sound = _sound(source, spec, policy)
        return [header] if sound is None else [header, run(audio.probe_audio, sound, spec.rate, policy)]


def decode(source: MediaSource, spec: DecodeSpec, policy: MediaPolicy) -> list[MediaItem]:
    """The decoded items, as many as `probe` says headers.

    Raises:
        MediaError: a source that is broken, or that is over a limit.
    """
    run = caller(policy, source.data)
    item: MediaItem
    with named(source):
        if source.kind == "image":
            item = ImageItem(run(image.decode_image, source.data, policy))
        elif source.kind == "audio":
            item = _heard(source.data, spec, policy)
        else:
            item = run(video.decode_video, source.data, spec.sampling, policy)
        if source.modality == "vision_chunk":
            return [*chunks.split(item, source.kind, spec)]
        sound = _sound(source, spec, policy)
        return [item] if sound is None else [item, _heard(sound, spec, policy)]


def _heard(data: object, spec: DecodeSpec, policy: MediaPolicy) -> AudioItem:
    return AudioItem(caller(policy, data)(audio.decode_audio, data, spec.rate, policy, spec.longest_sound), spec.rate)


def _sound(source: MediaSource, spec: DecodeSpec, policy: MediaPolicy) -> object | None:
    """What holds the sound of a clip; None where there is none, or none is wanted."""
    if not spec.sound or source.kind != "video":
        return None
    if isinstance(source.data, bytes | bytearray | memoryview):
        return source.data if caller(policy, source.data)(has_track, bytes(source.data), policy) else None
    return sound_beside(source.data)


@contextmanager
def named(source: MediaSource) -> Iterator[None]:
    """An InputError inside becomes a MediaError that names the item."""
    try:
        yield
    except MediaError:
        raise
    except InputError as error:
        raise MediaError(source.modality, source.index, str(error)) from None
