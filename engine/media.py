"""Media of one request: opened, planned, made to fit, decoded, processed, remembered. Knows no prompt text."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from ..kernels.dispatch import using
from ..mm.cache import ByteCache, CacheStats, Names
from ..mm.embeddings import ROWS
from ..mm.errors import ConfigError, InputError, MediaError, SensoriumError
from ..mm.fields import FieldElem, FlatField
from ..mm.geometry import MOST_ROWS
from ..mm.hashing import digest
from ..mm.media import gate
from ..mm.media.policy import MediaPolicy
from ..mm.parse import MediaSource
from ..mm.types import EmbeddingItem, FramePlan, ItemGeometry, ItemPlan, MediaHeader, MultiModalKwargsItem
from ..processors.device import MediaDevice, processing_on
from ..processors.interface import ProcessingInfo, Span

_log = logging.getLogger(__name__)


Loaded = tuple[MediaSource, float]  # with its bytes, and the seconds that took


@dataclass(frozen=True)
class Processed:
    """What the encoder needs of one source, piece by piece, and what is known of it without its pixels."""

    pieces: tuple[tuple[MultiModalKwargsItem, ItemGeometry], ...]
    size: tuple[int, int] = (0, 0)
    frames: FramePlan | None = None

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(kwargs) for kwargs, _ in self.pieces)


@dataclass(frozen=True, eq=False)
class Item:
    """One source of a request: opened and planned; `done` where it is here already."""

    source: MediaSource
    info: ProcessingInfo  # with all options that hold for it
    key: str  # 256-bit identity of content, options and model
    content: str
    plan: ItemPlan
    spans: tuple[Span, ...]
    headers: tuple[MediaHeader, ...] = ()
    done: Processed | None = None
    seconds: float = 0.0  # to read or fetch its bytes


@dataclass(frozen=True)
class MediaSettings:
    """What the engine's config and model say about inputs.

    Args:
        limits: most items per modality in one prompt.
        fingerprint: of weights and config.
        row_bytes: of one encoder row.
        dtype: of the tensors that go to the encoder.
        trust_uuid: a uuid stands for its content, which is not hashed.
        cache_bytes: of processed items that are kept.
        max_rows: of one item.
        kernels: which backend runs an op, as in EngineConfig.
        device: where items are processed; None: here.
    """

    policy: MediaPolicy = field(default_factory=MediaPolicy)
    limits: Mapping[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    row_bytes: int = 0
    dtype: torch.dtype = torch.float32
    trust_uuid: bool = False
    cache_bytes: int = 512 << 20
    max_rows: int = MOST_ROWS
    kernels: str = ""
    device: MediaDevice | None = None


class MediaProcessor:
    """Thread-safe; one per model, shared by all workers."""

    def __init__(self, info: ProcessingInfo, settings: MediaSettings) -> None:
        self.settings, self._info = settings, info
        self._cache: ByteCache[Processed] = ByteCache(settings.cache_bytes, lambda value: value.num_bytes)
        self._names = Names()
        self._fetchers = ThreadPoolExecutor(16, "sensorium-fetch")
        self._release = gate.kept_for(settings.policy, self)
        self._tune = lru_cache(maxsize=256)(lambda options: info.tuned(dict(options.values)))

    def close(self) -> None:
        """Its codec workers end, with those of the last that has any."""
        self._release()

    @property
    def stats(self) -> CacheStats:
        """Of the cache of processed items."""
        return self._cache.stats

    def open(
        self,
        media: Mapping[str, object],
        uuids: Mapping[str, object],
        options: Mapping[str, Any],
        tenant: str | None,
        identify: bool = True,
    ) -> list[Item]:
        """The items in order of modality and index, planned from their headers; nothing is decoded.

        `identify`: find out what each is and whether it is here already, which reads pixels that are not encoded; items
        that were not identified can be planned and no more.

        Raises:
            InputError: a modality the model does not take, too many items, an unknown option.
            MediaError: an item that is refused, unreadable or said to be here and is not.
        """
        sources = self.parse(media, uuids, options)
        return self.admit(sources, self.fetch(sources), options, tenant, identify)

    def parse(self, media: Mapping[str, object], uuids: Mapping[str, object], options: Mapping[str, Any]) -> list[MediaSource]:
        """The first part of `open`: what was given, counted, in order; nothing is read."""
        sources = self._tuned(self._info, options).parser().parse(media, uuids, self.settings.limits)
        return [source for several in sources.values() for source in several]

    def fetch(self, sources: Sequence[MediaSource]) -> dict[int, Future[Loaded]]:
        """The second part: downloads, side by side, by place among the sources."""
        places = [place for place, source in enumerate(sources) if gate.is_remote(source)]
        return {place: self._fetchers.submit(self._load, sources[place]) for place in places}

    def admit(
        self,
        sources: Sequence[MediaSource],
        fetches: Mapping[int, Future[Loaded]],
        options: Mapping[str, Any],
        tenant: str | None,
        identify: bool = True,
    ) -> list[Item]:
        """The last part: files are read, downloads waited for, and none is left behind when one fails."""
        info = self._tuned(self._info, options)
        try:
            loaded = [fetches[i].result() if i in fetches else self._load(source) for i, source in enumerate(sources)]
        finally:
            for future in fetches.values():
                if not future.cancel():
                    future.exception()  # wait: a fetch ends by itself within its time limit
        return [replace(self._open(source, info, tenant, identify), seconds=seconds) for source, seconds in loaded]

    def shrink(self, items: Sequence[Item], room: int, tenant: str | None) -> list[Item]:
        """The items, each made smaller in the same proportion until together they take at most `room` tokens.

        Raises:
            InputError: items that cannot be made so small.
        """
        fixed = sum(item.plan.num_tokens for item in items if not self._can_shrink(item))
        total = sum(item.plan.num_tokens for item in items) - fixed
        share = (room - fixed) / total if total else 0.0
        small = [self._shrunk(item, share, tenant) if self._can_shrink(item) else item for item in items]
        taken = sum(item.plan.num_tokens for item in small)
        if taken > room:
            raise InputError(f"the media cannot be made to fit: they take {taken} tokens at least and there is room for {room}")
        return small

    def process(self, item: Item, tenant: str | None, timings: dict[str, float]) -> Processed:
        """Decoded and processed, or as another request left it; seconds are added to `timings`.

        Raises:
            MediaError: a source that cannot be decoded, or that the family refuses.
        """
        if item.done is not None and item.source.uuid is None:
            return item.done
        try:  # what a name stands for is kept, rows that the caller made included
            done = self._cache.make(item.key, lambda: item.done or self._process(item, timings))
        except MediaError as error:  # perhaps that of another request, which counts the item otherwise
            raise MediaError(item.source.modality, item.source.index, error.reason) from None
        if item.source.uuid is None:
            return done
        with gate.named(item.source):
            self._names.bind(tenant, item.source.uuid, item.content)
        return done

    def _tuned(self, info: ProcessingInfo, options: Mapping[str, Any]) -> ProcessingInfo:
        """With options laid over; the results for the family's own defaults are remembered."""
        if not options:
            return info
        return self._tune(_Options(options)) if info is self._info else info.tuned(options)

    def _load(self, source: MediaSource) -> Loaded:
        start = time.perf_counter()
        return gate.load(source, self.settings.policy), time.perf_counter() - start

    def _open(self, source: MediaSource, info: ProcessingInfo, tenant: str | None, identify: bool = True) -> Item:
        with gate.named(source):
            try:
                tuned = self._tuned(info, {f"{source.modality}s_kwargs": source.options} if source.options else {})
            except ConfigError as error:
                raise InputError(str(error)) from None
            known = identify or source.data is None
            content = self._content(source, tenant) if known else ""
            key = self._key(source.modality, content, tuned, tenant) if known else ""
            done = self._cache.get(key) if known else None
            if isinstance(source.data, EmbeddingItem):
                done = _from_rows(source.data, tuned)
            if done is None and source.data is None:
                raise _miss(source)
            headers = () if done is not None else tuple(gate.probe(source, tuned.decode_spec, self.settings.policy))
            grids = [grid for _, grid in done.pieces] if done else [tuned.geometry(header) for header in headers]
            spans = tuple(tuned.spans(source.modality, grids))
            plan = self._plan(source, headers, grids, spans, done)
        return Item(source, tuned, key, content, plan, spans, headers, done)

    def _content(self, source: MediaSource, tenant: str | None) -> str:
        """Identity of what was given; a name must not stand for two contents."""
        if source.data is None:
            known = self._names.find(tenant, source.uuid or "")
            if known is None:
                raise _miss(source)
            return known
        if self.settings.trust_uuid and source.uuid is not None:
            return digest("trusted", source.modality, source.uuid)
        content = gate.content_hash(source, self.settings.policy)
        if source.uuid is not None:
            self._names.check(tenant, source.uuid, content)
        return content

    def _key(self, modality: str, content: str, info: ProcessingInfo, tenant: str | None) -> str:
        return digest("sensorium.item", tenant, modality, content, info.options_key(modality), self.settings.fingerprint)

    def _plan(
        self,
        source: MediaSource,
        headers: Sequence[MediaHeader],
        grids: Sequence[ItemGeometry],
        spans: Sequence[Span],
        done: Processed | None,
    ) -> ItemPlan:
        rows = sum(grid.num_embeds for grid in grids)
        return ItemPlan(
            source.modality,
            source.index,
            done.size if done is not None else headers[0].size,
            _grid(grids, spans),
            sum(span.length for span in spans),
            rows,
            rows * self.settings.row_bytes,
            all(header.exact for header in headers),
            done.frames if done is not None else _joined([header.frames for header in headers]),
        )

    def _can_shrink(self, item: Item) -> bool:
        if item.source.data is None or isinstance(item.source.data, EmbeddingItem):
            return False
        return item.info.shrink_options(item.source.modality, item.plan.grid, item.plan.num_embeds) is not None

    def _shrunk(self, item: Item, share: float, tenant: str | None) -> Item:
        own = item.plan.num_tokens - sum(span.num_embeds for span in item.spans if not span.shared)
        options = item.info.shrink_options(item.source.modality, item.plan.grid, int(item.plan.num_tokens * share) - own)
        source = replace(item.source, options=options or {})  # its own are in item.info; fps and num_frames exclude each other
        small = self._open(source, item.info, tenant, bool(item.key))
        return replace(small, plan=replace(small.plan, shrunk_from=item.plan.num_tokens), seconds=item.seconds)

    def _process(self, item: Item, timings: dict[str, float]) -> Processed:
        source, start = item.source, time.perf_counter()
        with gate.named(source):
            with _stage("decoding"):
                decoded = gate.decode(source, item.info.decode_spec, self.settings.policy)
            if not item.plan.exact:
                self._check_rows(item.info.geometry(one.header).num_embeds for one in decoded)
            middle = time.perf_counter()
            with _stage("processing"), using(self.settings.kernels), processing_on(self.settings.device):
                pieces = tuple(item.info.process(one, self.settings.dtype) for one in decoded)
        timings["decode"] = timings.get("decode", 0.0) + middle - start
        timings["process"] = timings.get("process", 0.0) + time.perf_counter() - middle
        return Processed(pieces, decoded[0].header.size, _joined([one.header.frames for one in decoded]))

    def _check_rows(self, rows: Iterable[int]) -> None:
        """What the header did not tell, before anything of that size is made."""
        total, most = sum(rows), self.settings.max_rows
        if total > most:
            raise InputError(f"it makes {total} rows, max_model_len is {most}; make it smaller (max_pixels, fps, num_frames)")


def final_plan(item: Item, done: Processed, spans: Sequence[Span]) -> ItemPlan:
    """The plan as it came out: exact, with the frames that were really used."""
    rows = sum(grid.num_embeds for _, grid in done.pieces)
    return replace(
        item.plan,
        grid=_grid([grid for _, grid in done.pieces], spans),
        num_tokens=sum(span.length for span in spans),
        num_embeds=rows,
        bytes=rows * (item.plan.bytes // item.plan.num_embeds if item.plan.num_embeds else 0),
        exact=True,
        frames=done.frames,
    )


def _grid(grids: Sequence[ItemGeometry], spans: Sequence[Span]) -> tuple[int, int, int]:
    """`(t, h, w)` of the pieces one after the other, without what lies among them."""
    steps = sum(grid.t for grid, span in zip(grids, spans, strict=True) if not span.shared)
    return steps, grids[0].h, grids[0].w


def source_bytes(data: object) -> int:
    """Bytes of what was given: encoded, or as pixels, frames, samples or rows; 0 for a name."""
    if isinstance(data, bytes):
        return len(data)
    if isinstance(data, EmbeddingItem):
        return sum(tensor.nbytes for tensor in data.tensors.values())
    if isinstance(data, list | tuple):
        return sum(source_bytes(entry) for entry in data)
    if isinstance(data, Image):
        return data.width * data.height * len(data.getbands())
    return int(getattr(data, "nbytes", 0))


def num_bytes(kwargs: MultiModalKwargsItem) -> int:
    """Bytes of an item's tensors."""
    return sum(elem.data.nbytes for elem in kwargs.values() if isinstance(elem.data, Tensor))


@contextmanager
def _stage(name: str) -> Iterator[None]:
    """What nobody meant to raise inside is the item's trouble, too, and becomes an InputError."""
    try:
        yield
    except SensoriumError:
        raise
    except Exception as error:
        _log.warning("%s failed", name, exc_info=True)
        raise InputError(f"{name} failed: {type(error).__name__}: {error}; send it in another size or format") from error


def _from_rows(item: EmbeddingItem, info: ProcessingInfo) -> Processed:
    grid = info.rows_geometry(item)
    rows = item.tensors[ROWS]
    if grid.num_embeds != len(rows):
        raise InputError(f"{len(rows)} rows were given but its grid makes {grid.num_embeds}")
    return Processed((({ROWS: FieldElem(rows, FlatField())}, grid),))


def _miss(source: MediaSource) -> MediaError:
    where = f"Cache miss for {source.modality} at index {source.index} but data is not provided"
    return MediaError(source.modality, source.index, f"{where}; give the data along with the uuid {source.uuid!r}")


def _joined(plans: Iterable[FramePlan | None]) -> FramePlan | None:
    """One plan of the frames of all pieces."""
    known = [plan for plan in plans if plan is not None]
    if len(known) < 2:
        return known[0] if known else None
    indices = tuple(index for plan in known for index in plan.indices)
    times = tuple(seconds for plan in known for seconds in plan.timestamps)
    replaced = tuple(pair for plan in known for pair in plan.replaced)
    return replace(known[0], indices=indices, timestamps=times, replaced=replaced)


class _Options:
    """Options as a key: equal when they mean the same."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        try:
            self._key = digest("options", values)
        except InputError as error:
            raise InputError(f"mm_processor_kwargs: {error}") from None
        self.values = deepcopy(values)  # they are remembered, and the caller may change its own

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Options) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)
