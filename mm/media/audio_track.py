"""Choose the audio track of a container."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...callers.errors import InputError, short_repr
from ..languages import same_language_codes
from .container import CODECS, check_codec

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer

DEFAULT = "default"


def choose_track(container: InputContainer, track: int | str, warn: Callable[[str], object]) -> AudioStream:
    """Return the track with a number (from 0) or a language, or for "default" the one that is marked as the default.

    Without such a mark, or if its codec is not supported, "default" is the first track that can be decoded.

    Raises:
        InputError: there is no audio or no such track, or its codec is not supported.
    """
    tracks = list(container.streams.audio)
    if not tracks:
        raise InputError("it holds no audio")
    if track != DEFAULT:
        chosen = _numbered(tracks, track) if isinstance(track, int) else _spoken(tracks, track)
    else:
        marked = [candidate for candidate in tracks if _is_default(candidate)]
        usable = [candidate for candidate in (*marked, *tracks) if _is_usable(candidate)]
        chosen = usable[0] if usable else (marked or tracks)[0]
        if usable and marked and chosen is not marked[0]:
            warn(
                f"the codec of its audio track {tracks.index(marked[0])} is not supported; track {tracks.index(chosen)} is used"
            )
    if chosen.codec_context is None:
        raise InputError("its codec is not supported; convert it to WAV or FLAC", code="unsupported")
    check_codec(chosen.codec_context.name)
    if not chosen.codec_context.sample_rate:
        raise InputError("its codec is not supported; convert it to WAV or FLAC", code="unsupported")
    return chosen


def describe(tracks: Sequence[AudioStream]) -> str:
    """Return the numbers and languages of tracks."""
    notes = []
    for number, track in enumerate(tracks):
        details = [_language(track), *(["default"] if _is_default(track) else [])]
        notes.append(f"{number} ({', '.join(filter(None, details)) or 'no language'})")
    return ", ".join(notes)


def _numbered(tracks: Sequence[AudioStream], number: int) -> AudioStream:
    if 0 <= number < len(tracks):
        return tracks[number]
    raise InputError(f"track is {number}, but its audio tracks are {describe(tracks)}; change it", param="track")


def _spoken(tracks: Sequence[AudioStream], language: str) -> AudioStream:
    wanted = same_language_codes(language)
    matching = [track for track in tracks if same_language_codes(_language(track)) & wanted]
    for track in (*filter(_is_default, matching), *matching):
        return track
    reason = f"track is {short_repr(language)}, but its audio tracks are {describe(tracks)}; change it"
    raise InputError(reason, param="track")


def _language(track: AudioStream) -> str:
    return str(track.metadata.get("language") or "")


def _is_default(track: Any) -> bool:
    from av.stream import Disposition

    return bool(track.disposition & Disposition.default)


def _is_usable(track: AudioStream) -> bool:
    codec = track.codec_context
    return codec is not None and bool(codec.sample_rate) and codec.name in CODECS
