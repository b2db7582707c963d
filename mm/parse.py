"""What a caller gives as `multi_modal_data` becomes a list of sources, counted against limits. Decodes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from .embeddings import EmbeddingSpec, read_rows
from .errors import InputError, MediaError, typed
from .media.chunks import read_entry
from .media.source import path_of
from .types import EmbeddingItem, Media


@dataclass(frozen=True, eq=False)
class MediaSource:
    """One input as it was given, not decoded.

    `data`: encoded bytes, a path or URL, pixels, frames, samples or an EmbeddingItem; None when the caller says, by
    `uuid`, that it is here already. `options` are processing options of this item alone.
    """

    modality: str
    index: int
    data: object
    uuid: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    kind: str = ""  # what it is decoded as, where that is not the modality itself

    def __post_init__(self) -> None:
        if not self.kind:
            object.__setattr__(self, "kind", self.modality)


@dataclass(frozen=True)
class MultiModalDataParser:
    """The forms of input that one family takes, as its ProcessingInfo says.

    Args:
        modalities: what may be given.
        limits: most items per modality in one prompt that the model can take; absent: no limit.
        embeddings: ready-made rows that may stand in for media, by modality.
    """

    modalities: tuple[str, ...]
    limits: Mapping[str, int] = field(default_factory=dict)
    embeddings: Mapping[str, EmbeddingSpec] = field(default_factory=dict)

    def parse(
        self,
        data: Mapping[str, object],
        uuids: Mapping[str, object] | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> dict[str, list[MediaSource]]:
        """Sources by modality, in the order given; a single item and a list of one are the same.

        `uuids`: one name or None per item. `limits`: the caller's, cut to the model's own; they count media that
        have to be encoded, ready-made rows are free.

        Raises:
            InputError: a modality the model does not take, too many items, or as many uuids as there are not items.
            MediaError: an item that is missing, or rows that do not fit the model.
        """
        uuids = uuids or {}
        for name in (*data, *uuids):
            self._check_modality(name)
        sources = {}
        for name in dict.fromkeys((*data, *uuids)):
            given = _named(name, self._listed(name, data.get(name)), uuids.get(name))
            sources[name] = [self._source(name, index, media) for index, media in enumerate(given)]
            _check_limit(name, sources[name], self._limit(name, limits or {}))
        return sources

    def _limit(self, modality: str, limits: Mapping[str, int]) -> int | None:
        known = [several[modality] for several in (limits, self.limits) if modality in several]
        return min(known) if known else None

    def _check_modality(self, name: str) -> None:
        if name not in self.modalities:
            raise InputError(f"unknown modality {name!r}; this model takes {', '.join(self.modalities) or 'text only'}")

    def _listed(self, modality: str, value: object) -> list[Media]:
        """The separate items of one modality."""
        spec = self.embeddings.get(modality)
        rows = None if spec is None else read_rows(modality, value, spec)
        if rows is not None:
            return [Media(item) for item in rows]
        values = list(value) if is_several(modality, value) else [value]  # type: ignore[call-overload]
        return [entry if isinstance(entry, Media) else Media(entry) for entry in values]

    def _source(self, modality: str, index: int, media: Media) -> MediaSource:
        kind = modality
        if modality == "vision_chunk":
            try:
                kind, media = read_entry(media)
            except InputError as error:
                raise MediaError(modality, index, str(error)) from None
        data = media.data
        if media.uuid is not None and not (isinstance(media.uuid, str) and media.uuid):
            got = repr(media.uuid) if isinstance(media.uuid, str) else typed(media.uuid)
            raise MediaError(modality, index, f"its uuid is a text that is not empty, not {got}")
        if data is None and media.uuid is None:
            raise MediaError(modality, index, "it is missing; give its data, or a uuid of one that was given before")
        spec = self.embeddings.get(modality)
        if spec is not None and not isinstance(data, EmbeddingItem):
            rows = read_rows(modality, data, spec)
            if rows is not None and len(rows) != 1:
                raise MediaError(modality, index, f"it holds rows of {len(rows)} items; give each as one of a list")
            data = rows[0] if rows else data
        return MediaSource(modality, index, data, media.uuid, media.options, kind)


def _named(modality: str, given: list[Media], uuids: object) -> list[Media]:
    """The items with their names from `multi_modal_uuids`."""
    if uuids is None:
        return given
    names = [uuids] if isinstance(uuids, str) else uuids
    if not isinstance(names, list | tuple) or not all(name is None or (isinstance(name, str) and name) for name in names):
        raise InputError(f'multi_modal_uuids["{modality}"] is a list of texts or None, one per item')
    if len(given) == 1 and given[0].data is None and given[0].uuid is None:
        given *= len(names) or 1  # only names were given
    if len(names) != len(given):
        raise InputError(
            f'multi_modal_uuids["{modality}"] must have same length as multi_modal_data["{modality}"]: '
            f"{len(names)} and {len(given)}"
        )
    for index, (media, name) in enumerate(zip(given, names, strict=True)):
        if None not in (media.uuid, name) and media.uuid != name:
            also = f'multi_modal_uuids["{modality}"] says {name[:40]!r}'
            raise MediaError(modality, index, f"its uuid is {str(media.uuid)[:40]!r}, and {also}; give one of them")
    return [media if name is None else replace(media, uuid=name) for media, name in zip(given, names, strict=True)]


def _check_limit(modality: str, sources: Collection[MediaSource], limit: int | None) -> None:
    count = sum(not isinstance(source.data, EmbeddingItem) for source in sources)
    if limit is not None and count > limit:
        raise InputError(f"At most {limit} {modality}(s) may be provided in one prompt, not {count}")


def callers_own(media: object) -> object:
    """What a str names that the caller's code or command line hands over; anything else as it is.

    A path, or that of a file: URL, becomes a Path: it may lie anywhere, unlike one that is written in a message. Other URLs
    stay, and so does a file: URL that names no path; whoever reads it says why.
    """
    if not isinstance(media, str) or media[:5].lower() == "data:":
        return media
    if media[:7].lower() == "file://":
        with suppress(InputError):
            return Path(path_of(media))
    return media if "://" in media[:16] else Path(media)


def is_several(modality: str, value: object) -> bool:
    """Whether a value is a list of items, rather than one item that is itself a list."""
    if isinstance(value, np.ndarray | Tensor):
        return modality in _AXES and value.ndim == _AXES[modality]
    if not isinstance(value, list | tuple):
        return False
    if modality == "video":
        return not (_with_metadata(value) or (len(value) > 0 and all(_is_frame(entry) for entry in value)))
    if modality == "audio":
        numbers = len(value) > 0 and all(isinstance(entry, int | float | np.number) for entry in value)
        return not (numbers or _with_rate(value))
    return True


_AXES = {"image": 4, "video": 5}  # of an array that holds several items


def _with_metadata(value: Sequence[object]) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    frames, metadata = value
    unknown = metadata is None and isinstance(frames, list | np.ndarray | Tensor)  # of a path, it is a second clip's place
    return unknown or isinstance(metadata, Mapping) or hasattr(metadata, "fps")


def _with_rate(value: Sequence[object]) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int | float | np.number)


def _is_frame(value: object) -> bool:
    return isinstance(value, Image.Image) or (isinstance(value, np.ndarray | Tensor) and value.ndim <= 3)
