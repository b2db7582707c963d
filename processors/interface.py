"""What every family's ProcessingInfo answers. Knows no family, no model and no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem


@dataclass(frozen=True)
class Span:
    """The tokens one item becomes; `is_embed` as in PlaceholderRange."""

    token_ids: tuple[int, ...]
    is_embed: Tensor | None = None


class ProcessingInfo(Protocol):
    """The one object per model family that answers everything about its inputs.

    Built as `cls(config: dict, preprocessor: dict, video_preprocessor: dict, options: Mapping)` from the raw JSON
    files of the checkpoint (missing files are empty dicts) and the caller's `mm_processor_kwargs`; unknown option
    keys raise ConfigError with the nearest known name.
    """

    modalities: tuple[str, ...]
    slot_ids: Mapping[str, int]  # modality -> the one token that marks an unexpanded slot in a prompt
    prefill: str  # "causal" | "item_atomic" | "prompt_atomic"

    def sampling(self) -> Mapping[str, float | int | None]:
        """Keyword arguments for mm.media.video's frame sampler (fps, num_frames, min_frames, max_frames, multiple)."""

    def geometry(self, modality: str, size: tuple[int, int], frames: int = 1, fps: float = 0.0) -> ItemGeometry:
        """Grid from the header alone: `size` is (height, width) of the source, `frames`/`fps` of the sampled clip."""

    def process(self, item: MediaItem) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Pixels to the encoder's named tensors. Releases the GIL in its heavy parts; thread-safe."""

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """The tokens that replace one slot."""

    def options_key(self, modality: str) -> str:
        """A stable text of the processing options that matter for this modality; part of the item's hash."""
