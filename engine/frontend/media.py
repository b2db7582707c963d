"""Media of a prompt: load, plan from headers, shrink, decode, process, and cache the results."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from ...callers.errors import ConfigError, ErrorCode, InputError, MediaError, SensoriumError, is_out_of_memory, media_error
from ...kernels.dispatch import use_backends
from ...mm.cache import ByteCache, CacheStats, UuidTable
from ...mm.embeddings import ROWS
from ...mm.fields import FieldElem, FlatField
from ...mm.geometry import MAX_ITEM_ROWS
from ...mm.hashing import digest
from ...mm.media import gate
from ...mm.media.isolate import keep_workers, watching
from ...mm.media.ledger import Ledger, MediaBudget
from ...mm.media.policy import MediaPolicy, PdfPage
from ...mm.parse import MediaSource
from ...mm.raw_tensors import RawTensors
from ...mm.tenants import tenant_of
from ...mm.types import EmbeddingItem, ItemGeometry, ItemPlan, MediaHeader, MultiModalKwargsItem
from ...processors.device import MediaDevice, processing_on
from ...processors.interface import ProcessingInfo
from ..connectors.item_inputs import ItemInputs
from ..errors import error_text
from ..stats import TransferStats
from .item_store import ItemStore
from .items import PlannedItem, ProcessedItem, final_spans, grid_of_pieces, merge_frame_plans
from .remote_encoder import RemoteEncoder
from .warm_up import start_warm_up

_log = logging.getLogger(__name__)
_DOWNLOADS = 6  # that one request runs at a time
_FETCHERS = 32 * _DOWNLOADS  # threads, enough for 32 prompts at a time; they start when they are needed

LoadedSource = tuple[MediaSource, float]
"""A source with its bytes, and the seconds that loading took."""


@dataclass(frozen=True)
class MultiModalSettings:
    """Settings of a MultiModalProcessor, from the engine's config and the model.

    Args:
        policy: limits on media inputs.
        limits: maximum number of items per modality in one prompt.
        fingerprint: hash of weights and config; part of every cache key.
        row_bytes: bytes of one encoder row.
        dtype: dtype of the encoder's inputs.
        trust_uuid: use a uuid as the identity of its content instead of hashing the content.
        cache_bytes: size of the cache of processed items.
        max_uuids: maximum number of uuids, of all tenants together, whose content is remembered.
        max_rows: maximum number of encoder rows of one item.
        kernels: backends of ops, as in EngineConfig.
        device: where items are processed; None for the CPU.
        encodes: False if there is no encoder, so that items must be encoder rows.
        remote_encoder: encoders of other engines, which are asked first; None: there are none.
        item_store: processed items that engines share; None: this engine processes all items.
    """

    policy: MediaPolicy = field(default_factory=MediaPolicy)
    limits: Mapping[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    row_bytes: int = 0
    dtype: torch.dtype = torch.float32
    trust_uuid: bool = False
    cache_bytes: int = 512 << 20
    max_uuids: int = 1 << 16
    max_rows: int = MAX_ITEM_ROWS
    kernels: str = ""
    device: MediaDevice | None = None
    encodes: bool = True
    remote_encoder: RemoteEncoder | None = None
    item_store: ItemStore | None = None


class MultiModalProcessor:
    """Loads, plans and processes items, and caches processed items. Thread-safe; all media workers of a model share one."""

    def __init__(self, info: ProcessingInfo, settings: MultiModalSettings) -> None:
        self.settings, self._info = settings, info
        self._cache: ByteCache[ProcessedItem] = ByteCache(settings.cache_bytes, lambda value: value.num_bytes)
        self._names = UuidTable(settings.max_uuids)
        self.budget = MediaBudget(settings.policy)
        self._fetchers = ThreadPoolExecutor(_FETCHERS, "sensorium-fetch")
        self._release = keep_workers(self)
        self._info_with = lru_cache(maxsize=256)(lambda options: info.with_kwargs(dict(options.values)))

    def warm_up(self, modalities: Sequence[str]) -> threading.Thread:
        """Import what items of these modalities need, and process a small one, in a thread. Return the thread."""

        def process(modality: str, item: object) -> None:
            (sources,) = self._info.parser().parse({modality: [item]}).values()
            self._process(self._open(sources[0], self._info, None, identify=False), None, {})

        return start_warm_up(modalities, self.settings.policy, process)

    def close(self) -> None:
        """Release the codec workers, which end when no engine uses them, and the connections to encoders and other stores."""
        self._release()
        if self.settings.item_store is not None:
            self.settings.item_store.close()
        if self.settings.remote_encoder is not None:
            self.settings.remote_encoder.close()

    def reset_cache(self) -> None:
        self._cache.clear()

    @property
    def stats(self) -> CacheStats:
        """Statistics of the cache of processed items."""
        return self._cache.stats

    @property
    def transfers(self) -> tuple[TransferStats, ...]:
        """Statistics of the encoders of other engines, and of processed items that engines share."""
        remote, items = self.settings.remote_encoder, self.settings.item_store
        return (*(() if remote is None else (remote.stats,)), *(() if items is None else items.stats))

    def open(
        self,
        media: Mapping[str, object],
        uuids: Mapping[str, object],
        options: Mapping[str, Any],
        salt: str | None,
        identify: bool = True,
    ) -> list[PlannedItem]:
        """Plan items from their headers, in order of modality and index, without decoding.

        Args:
            identify: hash the content and look it up in the cache, which reads all pixels of raw arrays. Items that are not
                identified can be planned but not processed.

        Raises:
            InputError: a modality that the model does not take, too many items, or an unknown option.
            MediaError: an item is over a limit, cannot be read, or is given as a uuid that is not cached.
        """
        sources = self.parse(media, uuids, options)
        with self.budget.open(tenant_of(salt)) as ledger, watching(ledger.close):
            return self.admit(sources, self.fetch(sources, ledger), options, salt, ledger, identify)

    def parse(self, media: Mapping[str, object], uuids: Mapping[str, object], options: Mapping[str, Any]) -> list[MediaSource]:
        """Part 1 of `open`: parse, count and order the items. Nothing is read."""
        parser, size = self._with_options(self._info, options).parser(), self.settings.row_bytes // self.settings.dtype.itemsize
        # a config.json may leave out the hidden size; then the rows are as wide as the model's
        specs = {
            name: spec if isinstance(spec, RawTensors) else replace(spec, width=spec.width or size)
            for name, spec in parser.embeddings.items()
        }
        sources = replace(parser, embeddings=specs).parse(media, uuids, self.settings.limits)
        return [source for several in sources.values() for source in several]

    def fetch(self, sources: Sequence[MediaSource], ledger: Ledger) -> dict[int, Future[LoadedSource]]:
        """Part 2 of `open`: start all downloads, by index of the source. Equal URLs share a download; a few run at a time."""
        futures: dict[object, Future[LoadedSource]] = {}
        fetches: dict[int, Future[LoadedSource]] = {}
        waiting: deque[tuple[Future[LoadedSource], MediaSource]] = deque()
        for i, source in enumerate(sources):
            if gate.is_remote(source):
                data = source.data.file if isinstance(source.data, PdfPage) else source.data
                url = getattr(data, "url", data)
                if url not in futures:
                    futures[url] = Future()
                    waiting.append((futures[url], replace(source, data=data)))
                fetches[i] = futures[url]

        def download() -> None:
            while waiting:
                with suppress(IndexError):  # another thread took the last one
                    load(*waiting.popleft())

        def load(future: Future[LoadedSource], source: MediaSource) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._load(source, ledger))
                except BaseException as error:  # raised where the result is awaited
                    future.set_exception(error)
                    del future  # it holds the error, whose traceback holds this frame

        for _ in range(min(_DOWNLOADS, len(waiting))):
            self._fetchers.submit(download)
        return fetches

    def admit(
        self,
        sources: Sequence[MediaSource],
        fetches: Mapping[int, Future[LoadedSource]],
        options: Mapping[str, Any],
        salt: str | None,
        ledger: Ledger,
        identify: bool = True,
    ) -> list[PlannedItem]:
        """Part 3 of `open`: read files, wait for downloads, and plan each item. An error ends all downloads."""
        counts = Counter(source.modality for source in sources)
        info = self._with_options(self._info, {**self._info.prompt_kwargs(counts), **options})
        try:
            loaded = [fetches[i].result() if i in fetches else self._load(s, ledger) for i, s in enumerate(sources)]
        finally:
            for future in fetches.values():
                if not future.cancel():
                    future.exception()  # waits; a download has a time limit
        items = list[PlannedItem]()
        for i, (source, (read, seconds)) in enumerate(zip(sources, loaded, strict=True)):
            data = read.data
            if i in fetches and isinstance(source.data, PdfPage):
                data = replace(source.data, file=data)
            items.append(replace(self._open(replace(source, data=data), info, salt, identify), seconds=seconds))
        return items

    def shrink(self, items: Sequence[PlannedItem], room: int, salt: str | None) -> list[PlannedItem]:
        """Shrink all items by the same factor until together they take at most `room` tokens.

        Raises:
            InputError: the items cannot be made that small.
        """
        fixed = sum(item.plan.num_tokens for item in items if not self._can_shrink(item))
        total = sum(item.plan.num_tokens for item in items) - fixed
        share = (room - fixed) / total if total else 0.0
        shrunk = [self._shrink(item, share, salt) if self._can_shrink(item) else item for item in items]
        taken = sum(item.plan.num_tokens for item in shrunk)
        if taken > room:
            reason = f"the media cannot be made to fit: they take at least {taken} tokens, but there is room for {room}"
            raise InputError(f"{reason}; send fewer items or a shorter text", code="too_long", limit=room, value=taken)
        return shrunk

    def process(self, item: PlannedItem, salt: str | None, timings: dict[str, float]) -> ProcessedItem:
        """Decode and process an item, or return it from the cache. Add the seconds of "decode" and "process" to `timings`.

        Raises:
            MediaError: the item cannot be decoded, or the model refuses it.
        """
        if item.processed is not None and item.source.uuid is None:
            return item.processed
        try:  # items with a uuid are cached, even encoder rows that the caller gave
            processed = self._cache.make(item.key, lambda: item.processed or self._process(item, salt, timings))
        except MediaError as error:  # the error may come from another request, where the item has another index
            raise media_error(error, item.source.modality, item.source.index) from None
        if item.source.uuid is None:
            return processed
        with gate.error_context(item.source):
            self._names.bind(salt, item.source.uuid, item.content)
        return processed

    def _with_options(self, info: ProcessingInfo, options: Mapping[str, Any]) -> ProcessingInfo:
        """Return `info` with these options on top. Variants of the model's own `info` are cached."""
        if not options:
            return info
        return self._info_with(_ProcessorOptions(options)) if info is self._info else info.with_kwargs(options)

    def _load(self, source: MediaSource, ledger: Ledger) -> LoadedSource:
        start = time.perf_counter()
        return gate.load(source, self.settings.policy, ledger), time.perf_counter() - start

    def _open(self, source: MediaSource, info: ProcessingInfo, salt: str | None, identify: bool = True) -> PlannedItem:
        with gate.error_context(source):
            try:
                item_info = self._with_options(info, {f"{source.modality}s_kwargs": source.options} if source.options else {})
            except ConfigError as error:
                raise InputError(error.info.text, param=error.info.param) from None
            identify = identify or source.data is None
            content = self._content(source, salt) if identify else ""
            key = self._key(source.modality, content, item_info, salt) if identify else ""
            processed = self._cache.get(key) if identify else None
            if isinstance(source.data, EmbeddingItem):
                processed = _from_embeddings(source.data, item_info)
            elif not self.settings.encodes and self.settings.remote_encoder is None and processed is None:
                raise InputError(
                    'this engine has no encoder (parts="decoder"); give encoder rows in place of the media', code="unsupported"
                )
            if processed is None and source.data is None:
                raise _cache_miss(source)
            policy = self.settings.policy
            headers = () if processed is not None else tuple(gate.probe(source, item_info.decode_spec, policy, tenant_of(salt)))
            grids = processed.geometries if processed else tuple(item_info.geometry(header) for header in headers)
            spans = tuple(item_info.spans(source.modality, grids))
            rows = sum(grid.num_embeds for grid in grids)
            plan = ItemPlan(
                source.modality,
                source.index,
                processed.size if processed is not None else headers[0].size,
                grid_of_pieces(grids, spans),
                sum(span.max_added_tokens for span in spans),
                rows,
                rows * self.settings.row_bytes,
                all(item_info.is_exact(header) for header in headers),
                processed.frames if processed is not None else merge_frame_plans([header.frames for header in headers]),
                seconds=_seconds(headers, item_info) if processed is None else processed.seconds,
            )
        return PlannedItem(source, item_info, key, content, plan, grids, spans, headers, processed)

    def _content(self, source: MediaSource, salt: str | None) -> str:
        """Return the hash of the content. Raise InputError if its uuid already stands for other content."""
        if source.data is None:
            content = self._names.find(salt, source.uuid or "")
            if content is None:
                raise _cache_miss(source)
            return content
        if self.settings.trust_uuid and source.uuid is not None:
            return digest("trusted", source.modality, source.uuid)
        content = gate.content_hash(source, self.settings.policy)
        if source.uuid is not None:
            self._names.check(salt, source.uuid, content)
        return content

    def _key(self, modality: str, content: str, info: ProcessingInfo, salt: str | None) -> str:
        return digest("sensorium.item", salt, modality, content, info.options_key(modality), self.settings.fingerprint)

    def _can_shrink(self, item: PlannedItem) -> bool:
        if item.source.data is None or isinstance(item.source.data, EmbeddingItem):
            return False
        return item.info.shrink_kwargs(item.source.modality, item.plan.grid, item.plan.num_embeds) is not None

    def _shrink(self, item: PlannedItem, share: float, salt: str | None) -> PlannedItem:
        num_markers = item.plan.num_tokens - sum(span.num_embeds for span in item.spans if not span.shared)
        options = item.info.shrink_kwargs(item.source.modality, item.plan.grid, int(item.plan.num_tokens * share) - num_markers)
        source = replace(item.source, options=options or {})  # item.info has the item's own options
        small = self._open(source, item.info, salt, bool(item.key))
        return replace(small, plan=replace(small.plan, shrunk_from=item.plan.num_tokens), seconds=item.seconds)

    def _process(self, item: PlannedItem, salt: str | None, timings: dict[str, float]) -> ProcessedItem:
        """Read an item from the store that engines share, or decode and process it."""
        start, store = time.perf_counter(), self.settings.item_store if item.key else None  # items of `warm_up` have no key
        processed = None if store is None else store.get(item.key)
        if processed is not None and not item.plan.exact:
            with gate.error_context(item.source):
                self._check_rows(geometry.num_embeds for geometry in processed.geometries)
        timings["process"] = timings.get("process", 0.0) + time.perf_counter() - start
        if processed is None:
            processed = self._compute(item, salt, timings)
            if store is not None:
                store.put(item.key, processed)
        return self._with_rows(item, processed, salt, timings)

    def _compute(self, item: PlannedItem, salt: str | None, timings: dict[str, float]) -> ProcessedItem:
        source, start = item.source, time.perf_counter()
        with gate.error_context(source):
            with _stage("decoding"):
                decoded = gate.decode(source, item.info.decode_spec, self.settings.policy, tenant_of(salt))
            infos = [item.info] * len(decoded)
            if not item.plan.exact:
                infos = [item.info.for_item(media) for media in decoded]
                self._check_rows(info.geometry(media.header).num_embeds for info, media in zip(infos, decoded, strict=True))
            middle = time.perf_counter()
            with _stage("processing"), use_backends(self.settings.kernels), processing_on(self.settings.device):
                pieces = tuple(info.process(media, self.settings.dtype) for info, media in zip(infos, decoded, strict=True))
        timings["decode"] = timings.get("decode", 0.0) + middle - start
        timings["process"] = timings.get("process", 0.0) + time.perf_counter() - middle
        headers = [media.header for media in decoded]
        frames = merge_frame_plans([header.frames for header in headers])
        return ProcessedItem(pieces, headers[0].size, frames, _seconds(headers, item.info))

    def _with_rows(
        self, item: PlannedItem, processed: ProcessedItem, salt: str | None, timings: dict[str, float]
    ) -> ProcessedItem:
        """Return an item with the rows of another engine's encoder, if there is one. Pieces without rows are encoded here."""
        encoder, source = self.settings.remote_encoder, item.source
        if encoder is None or not item.key:
            return processed
        start, tenant = time.perf_counter(), digest("sensorium.tenant", salt)
        pieces = list[tuple[MultiModalKwargsItem, ItemGeometry]]()
        with gate.error_context(source):
            for (kwargs, grid), span in zip(processed.pieces, final_spans(item, processed), strict=True):
                rows = encoder.encode(ItemInputs(span.modality or source.modality, kwargs, grid.num_embeds, tenant))
                pieces.append((kwargs if rows is None else {ROWS: FieldElem(rows, FlatField())}, grid))
        timings["encode"] = time.perf_counter() - start
        return replace(processed, pieces=tuple(pieces))

    def _check_rows(self, rows: Iterable[int]) -> None:
        """Check the number of rows before tensors are made, for items whose header did not tell it exactly."""
        total, limit = sum(rows), self.settings.max_rows
        if total > limit:
            reason = f"it makes {total} rows, but <<max_model_len>> is {limit}; make it smaller (max_pixels, fps, num_frames)"
            raise InputError(reason, code="too_long", limit=limit, value=total)


def _seconds(headers: Sequence[MediaHeader], info: ProcessingInfo) -> float:
    return sum(header.samples for header in headers) / info.decode_spec.rate


@contextmanager
def _stage(name: str) -> Iterator[None]:
    """Turn unexpected exceptions of decoding or processing into an InputError, so that they fail this item only."""
    try:
        yield
    except SensoriumError:
        raise
    except Exception as error:
        _log.warning("%s failed", name, exc_info=True)
        code: ErrorCode | None = "out_of_memory" if is_out_of_memory(error) else None
        raise InputError(f"{name} failed: {error_text(error)}; send the item in another size or format", code=code) from error


def _from_embeddings(item: EmbeddingItem, info: ProcessingInfo) -> ProcessedItem:
    if ROWS not in item.tensors:  # the model encodes the tensors themselves
        return ProcessedItem(((info.tensor_fields(item), info.embeds_geometry(item)),))
    rows, encoded = item.tensors[ROWS], item.encoded
    if encoded is not None:
        parts = rows.split([grid.num_embeds for grid in encoded.geometries])
        pieces = [({ROWS: FieldElem(part, FlatField())}, grid) for part, grid in zip(parts, encoded.geometries, strict=True)]
        return ProcessedItem(tuple(pieces), encoded.size, encoded.frames)
    grid = info.embeds_geometry(item)
    if grid.num_embeds != len(rows):
        raise InputError(f"it has {len(rows)} rows, but its grid makes {grid.num_embeds}; give {grid.num_embeds}")
    return ProcessedItem((({ROWS: FieldElem(rows, FlatField())}, grid),))


def _cache_miss(source: MediaSource) -> MediaError:
    reason = f"Cache miss for {source.modality} at index {source.index} but data is not provided"
    return MediaError(source.modality, source.index, f"{reason}; give the data along with the uuid {source.uuid!r}")


class _ProcessorOptions:
    """Processor options as a cache key; options that mean the same are equal."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        try:
            self._key = digest("options", values)
            self.values = deepcopy(values)  # the caller may change its own later
        except (InputError, TypeError) as error:  # TypeError: a value that cannot be copied, such as a memoryview
            raise InputError(f"<<param>>: {error}", param="mm_processor_kwargs") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ProcessorOptions) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)
