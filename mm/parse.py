"""Parse `multi_modal_data` into a list of sources and check the limits. Nothing is decoded."""

from __future__ import annotations

import logging
import math
import mimetypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from ..callers.errors import (
    InputError,
    MediaError,
    SensoriumError,
    check_utf8,
    error_reason,
    is_out_of_memory,
    media_error,
    short_repr,
    typed,
)
from ..callers.pacing import releasing_gil
from ..callers.plain import builtin_copy
from .embeddings import EmbeddingSpec, read_embeddings, read_encoded
from .media.chunks import read_entry
from .media.data_url import is_data_url
from .media.policy import PdfPage
from .media.raw_samples import is_rate_first
from .media.source import path_of
from .raw_tensors import RawTensors
from .types import EmbeddingItem, EncodedItem, Media

_MAX_PATH = 1024  # characters; a longer text is no path
_log = logging.getLogger(__name__)


@contextmanager
def item_errors(modality: str, index: int) -> Iterator[None]:
    """Turn exceptions about an item into MediaErrors, also those of methods of the caller's object.

    Other errors of sensorium and a lack of memory are raised unchanged.
    """
    try:
        yield
    except MediaError:
        raise
    except InputError as error:
        raise media_error(error, modality, index) from None
    except (SensoriumError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        _log.warning("%s %d could not be read", modality, index, exc_info=True)
        reason = f"reading it failed: {type(error).__name__}: {error_reason(error)}; send the item in another form"
        raise MediaError(modality, index, reason) from None


@dataclass(frozen=True, eq=False)
class MediaSource:
    """One input before decoding.

    `data` is encoded bytes, a path or URL, pixels, frames, samples or an EmbeddingItem; None if the caller gives only the
    `uuid` of content that is cached. `options` are processing options of this item.
    """

    modality: str
    index: int
    data: object
    uuid: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    kind: str = ""  # "image", "video", "audio" or "video_chunk"; equals the modality except for vision chunks

    def __post_init__(self) -> None:
        if not self.kind:
            object.__setattr__(self, "kind", self.modality)


@dataclass(frozen=True)
class MultiModalDataParser:
    """Parses `multi_modal_data` by the modalities and limits of a model.

    Args:
        modalities: accepted modalities.
        limits: largest number of items per modality in a prompt; absent: no limit.
        embeddings: formats of precomputed embeddings, or of items that are tensors, by modality.
        width: width of an encoder row; 0 refuses EncodedItems.
    """

    modalities: tuple[str, ...]
    limits: Mapping[str, int] = field(default_factory=dict)
    embeddings: Mapping[str, EmbeddingSpec | RawTensors] = field(default_factory=dict)
    width: int = 0

    def parse(
        self,
        data: Mapping[str, object],
        uuids: Mapping[str, object] | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> dict[str, list[MediaSource]]:
        """Return sources by modality, in order. A single item counts as a list of one.

        `uuids`: one uuid or None per item. `limits`: the caller's limits, capped by those of the model. They do not
        apply to precomputed embeddings.

        Raises:
            InputError: unknown modality, too many items, or a number of uuids that differs from the number of items.
            MediaError: an item is missing, or embeddings do not fit the model.
        """
        uuids = uuids or {}
        for name in (*data, *uuids):
            if name not in self.modalities:
                raise self._unknown_modality(name)
        sources = dict[str, list[MediaSource]]()
        for name in dict.fromkeys((*data, *uuids)):
            several = _with_uuids(name, self._listed(name, data.get(name)), uuids.get(name))
            left = limit = min(bounds[name] for bounds in (limits or {}, self.limits, {name: math.inf}) if name in bounds)
            sources[name] = []
            for index, media in enumerate(releasing_gil(several)):
                with item_errors(name, index):
                    sources[name].append(self._source(name, index, media))
                left -= not isinstance(sources[name][-1].data, EmbeddingItem)
                if left < 0:
                    reason = f"At most {limit} {name}(s) may be provided in one prompt, not {len(several)}"
                    raise InputError(reason, param="limit_mm_per_prompt")
        return sources

    def _unknown_modality(self, name: str) -> InputError:
        """Return the error of the first item of a modality that the model does not take."""
        modalities = ", ".join(self.modalities)
        reason = f"unknown modality {short_repr(name, 40)}; this model takes {modalities}"
        if not modalities:
            reason = f"this model takes text only; leave out {short_repr(name, 40)}"
        error = InputError(reason, code="unsupported", param="multi_modal_data")
        error.info = replace(error.info, modality=str(name), index=0)
        return error

    def _listed(self, modality: str, value: object) -> list[Media]:
        """Return the items of one modality."""
        spec = self.embeddings.get(modality)
        rows = None if spec is None else read_embeddings(modality, value, spec)
        if rows is not None:
            return [Media(item) for item in rows]
        return [entry if isinstance(entry, Media) else Media(entry) for entry in releasing_gil(item_list(modality, value))]

    def _source(self, modality: str, index: int, media: Media) -> MediaSource:
        kind = modality
        if isinstance(media.data, EncodedItem):
            media = replace(media, data=read_encoded(modality, index, media.data, self.width))
        if modality == "vision_chunk" and not isinstance(media.data, EmbeddingItem):
            kind, media = read_entry(media)
        data, media = plain_data(media.data), replace(media, uuid=builtin_copy(media.uuid, "uuid"))
        if media.uuid is not None and not (isinstance(media.uuid, str) and media.uuid):
            got = repr(media.uuid) if isinstance(media.uuid, str) else typed(media.uuid)
            raise MediaError(modality, index, f"its uuid must be a non-empty string, not {got}", param="uuid")
        check_utf8(media.uuid or "", "uuid")
        if isinstance(data, PdfPage) and kind != "image":
            raise MediaError(modality, index, "a page of a PDF is an image; give it as an image item")
        if data is None and media.uuid is None:
            raise MediaError(modality, index, "it is missing; give its data, or the uuid of an earlier item")
        spec = self.embeddings.get(modality)
        if spec is not None and not isinstance(data, EmbeddingItem):
            rows = read_embeddings(modality, data, spec)
            if rows is not None and len(rows) != 1:
                raise MediaError(modality, index, f"it holds rows of {len(rows)} items; give a list with one entry per item")
            data = rows[0] if rows else data
        return MediaSource(modality, index, data, media.uuid, media.options, kind)


def _with_uuids(modality: str, items: list[Media], uuids: object) -> list[Media]:
    """Return the items with the uuids of `multi_modal_uuids`."""
    if uuids is None:
        return items
    names = [uuids] if isinstance(uuids, str) else uuids
    if not isinstance(names, list | tuple) or not all(name is None or (isinstance(name, str) and name) for name in names):
        raise InputError(
            f'multi_modal_uuids["{modality}"] must be a list of strings or None, one per item',
            code="invalid_value",
            param="multi_modal_uuids",
        )
    if len(items) == 1 and items[0].data is None and items[0].uuid is None:
        items *= len(names) or 1  # only uuids were given
    if len(names) != len(items):
        raise InputError(
            f'multi_modal_uuids["{modality}"] must have the same length as multi_modal_data["{modality}"]: '
            f"{len(names)} and {len(items)}",
            code="invalid_value",
            param="multi_modal_uuids",
        )
    for index, (media, name) in enumerate(zip(items, names, strict=True)):
        if name is not None and isinstance(media.uuid, str) and media.uuid != name:
            also = f'multi_modal_uuids["{modality}"] says {name[:40]!r}'
            raise MediaError(modality, index, f"its uuid is {media.uuid[:40]!r}, and {also}; give one of them")
    return [replace(media, uuid=name) if media.uuid is None else media for media, name in zip(items, names, strict=True)]


def plain_data(value: object) -> object:
    """Return an item of Hugging Face libraries in one of our forms: bytes, a path or `(samples, rate)`. Others are kept.

    Such an item is `{"bytes", "path"}`, `{"array", "sampling_rate", "path"}`, `{"raw", "sampling_rate"}` of transformers'
    pipelines, or torchcodec's AudioDecoder.
    """
    keys = set(value) - {"path"} if isinstance(value, Mapping) else set()
    if isinstance(value, Mapping) and keys in ({"array", "sampling_rate"}, {"raw", "sampling_rate"}):
        try:
            return np.asarray(value["array" if "array" in keys else "raw"]), value["sampling_rate"]
        except (TypeError, ValueError):
            raise InputError("its array is not a regular array of numbers; give the samples as an array") from None
    if isinstance(value, Mapping) and keys == {"bytes"}:
        return value.get("path") if value.get("bytes") is None else value["bytes"]
    if hasattr(value, "get_all_samples"):
        try:
            samples = value.get_all_samples()
        except Exception as error:  # of the caller's decoder
            raise InputError(f"its decoder failed ({error_reason(error)})") from None
        return samples.data, samples.sample_rate
    return value


def trusted_source(media: object) -> object:
    """Convert a str from the caller's own code or command line to a Path or URL. Other values are returned as they are.

    A path, or the path of a file: URL, becomes a Path, which may be anywhere, unlike a path inside a message. Other URLs, an
    empty text, and invalid file: URLs, are returned unchanged; reading the last two raises an error.
    """
    media = plain_data(media)
    if not isinstance(media, str) or is_data_url(media):
        return media
    if media[:7].lower() == "file://":
        with suppress(InputError):
            return Path(path_of(media))
    return media if not media or "://" in media[:16] else Path(media)


def modality_of_path(text: object) -> str | None:
    """Return "image", "video" or "audio" if a text is the path of such a file, judged by its suffix."""
    if type(text) is not str or len(text) > _MAX_PATH:
        return None
    kind = mimetypes.guess_type("file" + os.path.splitext(text)[1])[0]  # of a whole text it raises errors on some versions
    modality = str(kind).partition("/")[0]
    return modality if modality in ("image", "video", "audio") and os.path.isfile(text) else None


def item_list(modality: str, value: Any) -> list[Any]:
    """Return the items of a list or an iterator of items; `[value]` for one item, which may itself be a list."""
    return list(value) if _is_item_list(modality, value) else [value]


def _is_item_list(modality: str, value: object) -> bool:
    """Return whether a value is a list or an iterator of items, as opposed to one item that is itself a list."""
    if isinstance(value, Iterator) and not hasattr(value, "read"):
        return True
    if isinstance(value, np.ndarray | Tensor):
        return modality in _AXES and value.ndim == _AXES[modality]
    if not isinstance(value, list | tuple):
        return False
    if modality == "video":
        return not (_has_metadata(value) or (len(value) > 0 and all(_is_frame(entry) for entry in releasing_gil(value))))
    if modality == "audio":
        numbers = len(value) > 0 and all(isinstance(entry, int | float | np.number) for entry in releasing_gil(value))
        return not (numbers or _has_rate(value))
    return True


_AXES = {"image": 4, "video": 5}  # axes of an array that holds several items


def _has_metadata(value: Sequence[object]) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    frames, metadata = value
    unknown = metadata is None and isinstance(frames, list | np.ndarray | Tensor)  # after a path, None is a second video
    return unknown or isinstance(metadata, Mapping) or hasattr(metadata, "fps")


def _has_rate(value: Sequence[object]) -> bool:
    """Return whether a value is samples and their rate, in any type and order that `media.audio` accepts or refuses."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    if isinstance(value[1], int | float | np.number) or is_rate_first(value):
        return True
    return isinstance(value[0], np.ndarray | Tensor) and (value[1] is None or _is_numeral(value[1]))


def _is_numeral(value: object) -> bool:
    return isinstance(value, str) and value.replace(".", "", 1).strip().isdecimal()


def _is_frame(value: object) -> bool:
    return isinstance(value, Image.Image) or (isinstance(value, np.ndarray | Tensor) and value.ndim <= 3)
