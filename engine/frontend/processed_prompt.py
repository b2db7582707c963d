"""The result of the input processor for one prompt: its token ids, its features, and the plan, size and trace of its items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...callers.errors import OF_PROMPTS, ErrorInfo
from ...mm.types import ItemPlan, MultiModalFeature
from ...processors.elements.marked_text import MarkedText
from ..outputs import ItemTrace
from .items import num_bytes


@dataclass(frozen=True)
class ProcessedPrompt:
    """A prompt that is ready for the engine.

    Args:
        prompt: the rendered text, or None if token ids were given.
        items: size, tokens, rows and bytes of each item.
        timings: seconds of fetch, plan, decode and process.
        item_of: for each feature, the index in `items` of the item that it is a piece of.
        cross: the items that cross-attention reads; they have no placeholder among the tokens.
        salt, adapter: as in EngineRequest.
        answer_format: what `CompletionOutput.elements` needs besides the answer's text, or None.
        places: as in ParsedPrompt.
        truncated: True if `truncate_prompt_tokens` cut the prompt.
    """

    prompt: str | None
    token_ids: tuple[int, ...]
    features: tuple[MultiModalFeature, ...] = ()
    items: tuple[ItemPlan, ...] = ()
    timings: dict[str, float] = field(default_factory=dict)
    trace: tuple[ItemTrace, ...] = ()
    item_of: tuple[int, ...] = ()
    salt: str = ""
    cross: tuple[MultiModalFeature, ...] = ()
    adapter: str = ""
    answer_format: MarkedText | None = None
    places: Mapping[tuple[str, int], str] | None = None
    truncated: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the processed items."""
        return sum(num_bytes(feature.kwargs) for feature in self.encoded)

    @property
    def modalities(self) -> frozenset[str]:
        """Modalities of its items."""
        return frozenset(feature.modality for feature in self.encoded)

    @property
    def encoded(self) -> tuple[MultiModalFeature, ...]:
        """All features, `cross` included."""
        return (*self.features, *self.cross)


def named_item(error: ErrorInfo, places: Mapping[tuple[str, int], str]) -> ErrorInfo:
    """Return an error of a conversation with its `param`: the place of the item at fault, or "messages"."""
    param = None if error.modality is None or error.index is None else places.get((error.modality, error.index))
    if param is None and error.code in OF_PROMPTS:
        param = "messages"
    is_named = error.param not in (None, "multi_modal_data")  # a conversation has no field of this name
    return error if is_named else replace(error, param=param)
