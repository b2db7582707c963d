"""What every family's ProcessingInfo answers. Knows no family, no model and no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ..mm.media.policy import DecodeSpec
from ..mm.parse import MultiModalDataParser
from ..mm.speech import SpeechRequest
from ..mm.types import EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem


@dataclass(frozen=True)
class Span:
    """The tokens one item becomes; `is_embed` as in PlaceholderRange: text may lie before, behind and between its rows.

    `modality`: of its rows, where that is not the slot's own. `shared`: it lies in the tokens of the span before it, among
    those that are no rows of that one, and adds none.

    `before`, `after`: text around them that is no part of its range and is joined with the prompt's, as a tokenizer that
    reads both together does: two tokens side by side of which `joins` has one are that one.
    """

    token_ids: tuple[int, ...]
    is_embed: Tensor | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    joins: Mapping[tuple[int, int], int] = field(default_factory=dict)
    modality: str | None = None
    shared: bool = False

    @property
    def num_embeds(self) -> int:
        return len(self.token_ids) if self.is_embed is None else int(self.is_embed.sum())

    @property
    def length(self) -> int:
        """Tokens it adds to a prompt, at most."""
        return 0 if self.shared else len(self.before) + len(self.token_ids) + len(self.after)


class ProcessingInfo(Protocol):
    """The one object per model family that answers everything about its inputs. Immutable, safe in many threads.

    Built as `cls(files: ProcessorFiles, *options: Mapping)` from the raw JSON of the checkpoint and the caller's
    `mm_processor_kwargs`, later ones over earlier ones; unknown keys raise ConfigError with the nearest known name.
    """

    modalities: tuple[str, ...]
    slot_ids: Mapping[str, int]  # modality -> the one token that marks an unexpanded slot in a prompt; none: it is read across
    prefill: str  # "causal" | "item_atomic" | "prompt_atomic"
    decode_spec: DecodeSpec  # frames and rate its items are decoded with
    template: str | None  # Jinja source of its chats, where the checkpoint's own files have none that knows its items
    adapters: Mapping[str, str]  # modality -> folder of the adapter that computes prompts with such items, "": all; first wins

    def parser(self) -> MultiModalDataParser:
        """What forms of input it takes, and at most how many."""

    def tuned(self, options: Mapping[str, Any]) -> Self:
        """The same with options of one request or item laid over its own; ConfigError names an unknown key."""

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Grid and counts from the header alone; InputError for what the family refuses."""

    def rows_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        """Grid of an item whose rows the caller gave; InputError when they do not fit it."""

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """A decoded item to the encoder's named tensors, floating ones in `dtype`. Releases the GIL; thread-safe.

        The geometry is `geometry(item.header)`.
        """

    def prompt_ids(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """A prompt as the caller gave it with what the family adds to every prompt, such as slots that need not be written.

        `items`: how many are given, by modality. Once for each prompt, before slots are looked for.
        """

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """The tokens that replace one slot."""

    def spans(self, modality: str, geometries: Sequence[ItemGeometry]) -> Sequence[Span]:
        """The tokens that replace one slot, a span for each item that its source is made of."""

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Options of one item that make a grid of (t, h, w) patches take at most `rows` rows; None: it cannot shrink."""

    def options_key(self, modality: str) -> str:
        """A stable text of the processing options that matter for this modality; part of the item's hash."""


@runtime_checkable
class SupportsTranscription(Protocol):
    """What a ProcessingInfo answers beside the rest if its family writes down speech."""

    languages: Mapping[str, str]  # code -> English name
    tasks: tuple[str, ...]  # "transcribe" (in the language spoken) and perhaps "translate" (to English)
    longest_seconds: float  # of one sound
    has_timestamps: bool

    def detection(self) -> SpeechRequest | None:
        """Its answer is the one token of the language spoken; None: the model finds it out as it writes, or knows one."""

    def transcription(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """`language` is a code of `languages`; None only where there is no detection. `context`: names and words to expect."""

    def transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        """Text and language code of an answer, control tokens in it included; (answer, language) where it is only text."""
