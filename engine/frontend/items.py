"""Items of a prompt, planned and processed, and what follows from both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from PIL.Image import Image
from torch import Tensor

from ...mm.media.policy import PdfPage
from ...mm.parse import MediaSource
from ...mm.types import (
    EmbeddingItem,
    FramePlan,
    ItemGeometry,
    ItemPlan,
    MediaHeader,
    MultiModalFeature,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from ...processors.interface import ProcessingInfo, Span
from ..outputs import ItemTrace


@dataclass(frozen=True)
class ProcessedItem:
    """One item as encoder inputs.

    Args:
        pieces: tensors and geometry of each piece; most items have one piece.
        size: height and width in pixels, (0, 0) if the item has none.
        frames: the frames that were used, for videos.
        seconds: length of the audio.
    """

    pieces: tuple[tuple[MultiModalKwargsItem, ItemGeometry], ...]
    size: tuple[int, int] = (0, 0)
    frames: FramePlan | None = None
    seconds: float = 0.0

    @property
    def geometries(self) -> tuple[ItemGeometry, ...]:
        return tuple(geometry for _, geometry in self.pieces)

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(kwargs) for kwargs, _ in self.pieces)


@dataclass(frozen=True, eq=False)
class PlannedItem:
    """One item, planned from its header.

    Args:
        info: the model's ProcessingInfo with the options of this item.
        key: 256-bit hash of content, options, model and tenant; "" if the item was not identified.
        content: hash of the content alone.
        geometries: planned geometry of each piece.
        processed: the processed item, if it is cached or the caller gave encoder rows.
        seconds: time to read or download the bytes.
    """

    source: MediaSource
    info: ProcessingInfo
    key: str
    content: str
    plan: ItemPlan
    geometries: tuple[ItemGeometry, ...]
    spans: tuple[Span, ...]
    headers: tuple[MediaHeader, ...] = ()
    processed: ProcessedItem | None = None
    seconds: float = 0.0


def final_plan(item: PlannedItem, processed: ProcessedItem, spans: Sequence[Span]) -> ItemPlan:
    """Return the plan of a processed item: exact, with the frames that were used."""
    rows = sum(grid.num_embeds for grid in processed.geometries)
    return replace(
        item.plan,
        grid=grid_of_pieces(processed.geometries, spans),
        num_tokens=sum(span.max_added_tokens for span in spans),
        num_embeds=rows,
        bytes=rows * (item.plan.bytes // item.plan.num_embeds if item.plan.num_embeds else 0),
        exact=True,
        frames=processed.frames,
    )


def final_spans(item: PlannedItem, processed: ProcessedItem) -> Sequence[Span]:
    """Return the planned spans, or new ones if decoding found geometries that differ from the header's."""
    if processed.geometries == item.geometries:
        return item.spans
    return tuple(item.info.spans(item.source.modality, processed.geometries))


def grid_of_pieces(grids: Sequence[ItemGeometry], spans: Sequence[Span]) -> tuple[int, int, int]:
    """Return `(t, h, w)` of all pieces in sequence; pieces that share the span of another one do not count."""
    steps = sum(grid.t for grid, span in zip(grids, spans, strict=True) if not span.shared)
    return steps, grids[0].h, grids[0].w


def source_bytes(data: object) -> int:
    """Return the bytes of an item in the form it was given: encoded, pixels, frames, samples or encoder rows; 0 for a uuid."""
    if isinstance(data, PdfPage):
        return source_bytes(data.file)
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
    """Return the bytes of an item's tensors."""
    return sum(elem.data.nbytes for elem in kwargs.values() if isinstance(elem.data, Tensor))


def merge_frame_plans(plans: Iterable[FramePlan | None]) -> FramePlan | None:
    """Merge the frame plans of all pieces into one."""
    planned = [plan for plan in plans if plan is not None]
    if len(planned) < 2:
        return planned[0] if planned else None
    indices = tuple(index for plan in planned for index in plan.indices)
    times = tuple(seconds for plan in planned for seconds in plan.timestamps)
    replaced = tuple(pair for plan in planned for pair in plan.replaced)
    return replace(planned[0], indices=indices, timestamps=times, replaced=replaced)


def item_features(
    items: Sequence[PlannedItem],
    processed: Sequence[ProcessedItem],
    spans: Sequence[Sequence[Span]],
    ranges: Sequence[Sequence[PlaceholderRange]],
) -> tuple[tuple[MultiModalFeature, ...], tuple[int, ...]]:
    """Return the features by offset, and the index of each one's item. Each piece of an item has its own hash."""
    pieces = [
        (
            MultiModalFeature(
                span.modality or item.source.modality,
                kwargs,
                where,
                grid,
                item.key if len(places) == 1 else f"{item.key}.{part}",
            ),
            i,
        )
        for i, (item, done, item_spans, places) in enumerate(zip(items, processed, spans, ranges, strict=True))
        for part, ((kwargs, grid), span, where) in enumerate(zip(done.pieces, item_spans, places, strict=True))
    ]
    pieces.sort(key=lambda piece: piece[0].range.offset)
    return tuple(feature for feature, _ in pieces), tuple(i for _, i in pieces)


def stage_seconds(
    items: Sequence[PlannedItem], plan_seconds: float, timings: Sequence[Mapping[str, float]], remote: bool
) -> dict[str, float]:
    """Return the seconds of each stage. Files are read one by one during planning; downloads run in parallel before it."""
    loads = [item.seconds for item in items]
    stages = ("decode", "process", *(["encode"] if any("encode" in entry for entry in timings) else []))
    total = {stage: sum((entry.get(stage, 0.0) for entry in timings), 0.0) for stage in stages}
    fetch = max(loads, default=0.0) if remote else sum(loads)
    plan = plan_seconds if remote else max(0.0, plan_seconds - fetch)
    return {"fetch": float(fetch), "plan": plan, **total}


def item_trace(item: PlannedItem, processed: ProcessedItem, plan: ItemPlan, timings: dict[str, float]) -> ItemTrace:
    data = item.source.data
    cached = "process" not in timings and not isinstance(data, EmbeddingItem)
    size = processed.num_bytes
    return ItemTrace(plan.modality, plan.index, source_bytes(data), size, plan.num_tokens, cached, timings=timings)
