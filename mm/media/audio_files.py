"""Encoded audio files: length from header or packets, and samples block by block.

soundfile reads WAV, FLAC, Ogg, Opus, AIFF, other formats of libsndfile, and MP3 whose first frame gives the length; PyAV reads
the rest. What one of them cannot read is tried with the other. Files that follow each other in one file are read one after
the other.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np

from ...callers.errors import InputError
from .audio_container import AudioBlock, AudioHeader, TrackReader, Warn
from .links import read_links
from .policy import DEFAULT_POLICY, WHOLE_SOUND, AudioSelection, DecodeClock, MediaPolicy
from .riff_sizes import with_whole_size
from .tags import may_have_many_tags
from .wrong_lengths import with_right_length

# What libsndfile reads as FFmpeg does, but faster. It takes floats in W64 for integers, and the end of a VOC for samples.
_FORMATS = ("WAV", "WAVEX", "RF64", "AIFF", "FLAC", "OGG", "MP3", "CAF")
_SUBTYPES = (
    *("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"),
    *("VORBIS", "OPUS", "MPEG_LAYER_I", "MPEG_LAYER_II", "MPEG_LAYER_III"),
)
_BLOCK = 1 << 18  # samples of all channels read at a time
_UNKNOWN = 1 << 60  # libsndfile returns a larger length if the file has none
_TAG_WITHIN = 1 << 16  # bytes searched for the frame with the length of an mp3


@dataclass(frozen=True)
class AudioFile:
    """An encoded file: the headers of its links, and a function that reads all blocks."""

    headers: tuple[AudioHeader, ...]
    blocks: Callable[[], Iterator[AudioBlock]]
    other_sound: Callable[[DecodeClock], str | None] = lambda clock: None


def open_audio(
    data: bytes | BinaryIO,
    sound: AudioSelection = WHOLE_SOUND,
    policy: MediaPolicy = DEFAULT_POLICY,
    warn: Warn = lambda text: None,
    from_first_frame: bool = False,
) -> AudioFile:
    """Read rate and length from the header or, if it has no length, from the packets.

    A truncated file may still have its whole length in the header; decoding then gives fewer samples, or an error.

    Args:
        data: the file's bytes, or an open file that `is_streamable`.
        warn: called with what the user should know about the file.
        from_first_frame: the audio begins at the first frame of the file's video.

    Raises:
        InputError: the format cannot be read, or the file has no audio.
    """
    if not isinstance(data, bytes):
        file = _soundfile(data)
        assert file is not None
        with file:
            header = AudioHeader(file.samplerate, file.frames, True)
        return AudioFile((header,), lambda: _soundfile_blocks(_soundfile(data)))
    links = read_links(data, policy)
    if len(links.starts) == 1:
        return _open_link(data, TrackReader(data, sound, policy, warn, from_first_frame), links.has_holes)
    stops = (*links.starts[1:], len(data))
    files: list[AudioFile] = []
    for start, stop in zip(links.starts, stops, strict=True):
        part = data[start:stop]
        try:
            files.append(_open_link(part, TrackReader(part, sound, policy, warn, from_first_frame), links.has_holes))
        except InputError as error:
            if stop == len(data) and not files:
                raise
            warn(f"the joined file at bytes {start:,} to {stop:,} cannot be read and is left out: {error}")

    def blocks() -> Iterator[AudioBlock]:
        for file in files:
            yield from file.blocks()

    return AudioFile(tuple(header for file in files for header in file.headers), blocks, files[0].other_sound)


def is_slow(data: bytes, kind: str) -> bool:
    """Return whether reading the header of a video or audio may take long. soundfile reads every header fast."""
    return may_have_many_tags(data) and (kind != "audio" or _soundfile(data) is None)


def is_streamable(file: BinaryIO, policy: MediaPolicy = DEFAULT_POLICY) -> bool:
    """Return whether an open file can be read in blocks, instead of as a whole.

    Raises:
        InputError: an error of `read_links`.
    """
    opened = _soundfile(file)
    if opened is None:
        return False
    opened.close()
    assert isinstance(file, io.BufferedReader)
    links = read_links(file, policy)
    return (
        len(links.starts) == 1
        and not links.has_holes
        and with_whole_size(file) is None
        and with_right_length(file, policy) is None
    )


def _open_link(data: bytes, reader: TrackReader, has_holes: bool) -> AudioFile:
    """Open a file that is not a chain, with the first library that can read it."""
    whole = with_whole_size(data) or (None if has_holes else with_right_length(data, reader.policy))  # a hole explains it
    if whole is None:
        return _open_as_it_is(data, reader, has_holes)
    try:
        opened = _open_as_it_is(whole.data, replace(reader, data=whole.data), has_holes)
    except InputError:  # its other sizes are wrong, too
        return _open_as_it_is(data, reader, has_holes)
    if whole.reason:
        reader.warn(whole.reason)
    return opened


def _open_as_it_is(data: bytes, reader: TrackReader, has_holes: bool) -> AudioFile:
    takes_first = reader.sound.track in ("default", 0)
    file = _soundfile(data) if takes_first and not has_holes else None
    if file is None:
        try:
            return AudioFile((reader.header(),), reader.blocks, reader.other_sound)
        except InputError:
            file = _soundfile(data, any_kind=True) if takes_first else None
            if file is None:
                raise
    with file:
        exact = 0 <= file.frames < _UNKNOWN
        count = file.frames if exact else sum(block.samples.shape[1] for block in _soundfile_blocks(file))
        header = AudioHeader(file.samplerate, count, exact)
    return AudioFile((header,), lambda: _soundfile_blocks(_soundfile(data, any_kind=True)))


def _soundfile_blocks(file: Any) -> Iterator[AudioBlock]:
    """Yield float32 samples.

    Raises:
        InputError: the file is broken. The samples before the fault were yielded.
    """
    import soundfile

    with file:
        size = max(1, _BLOCK // file.channels)
        while True:
            block, start = np.empty((size, file.channels), np.float32), file.tell() if file.seekable() else None
            try:
                block = file.read(out=block)
            except (soundfile.LibsndfileError, RuntimeError) as error:
                if start is not None and file.tell() > start:
                    yield AudioBlock(block[: file.tell() - start].T, file.samplerate)
                reason = getattr(error, "error_string", None) or "libsndfile gives no reason"
                reason = reason.removeprefix("Error : ").rstrip(".")
                raise InputError(f"it is broken or cut off ({reason}); download or export it again") from None
            if not len(block):
                return
            yield AudioBlock(block.T, file.samplerate)


class _Bytes(io.BytesIO):
    """A file that allows seeks before its start, which damaged headers cause; libsndfile would print an exception."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return super().seek(max(0, offset) if whence == 0 else offset, whence)


class _OpenFile(io.BufferedReader):
    """An open file that, like `_Bytes`, allows seeks to before its start."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return super().seek(max(0, offset) if whence == 0 else offset, whence)


def _soundfile(data: bytes | BinaryIO, any_kind: bool = False) -> Any:
    """Open with soundfile; None if it cannot or, unless `any_kind`, if PyAV is tried first."""
    import soundfile

    try:
        if isinstance(data, bytes):
            file, head = soundfile.SoundFile(_Bytes(data)), data[:_TAG_WITHIN]
        else:
            head = os.pread(data.fileno(), _TAG_WITHIN, 0)
            os.lseek(data.fileno(), 0, os.SEEK_SET)
            file = soundfile.SoundFile(_OpenFile(io.FileIO(data.fileno(), closefd=False)))
    except (soundfile.LibsndfileError, RuntimeError, TypeError):  # TypeError: headerless data
        return None
    has_length = file.format != "MP3" or b"Xing" in head or b"Info" in head
    is_first = file.format in _FORMATS and file.subtype in _SUBTYPES and has_length and 0 < file.frames < _UNKNOWN
    if file.samplerate > 0 and (any_kind or is_first):
        return file
    file.close()
    return None
