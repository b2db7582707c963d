"""What every family's ProcessingInfo answers. Knows no family, no model and no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ..mm.media.policy import DecodeSpec
from ..mm.parse import MultiModalDataParser
from ..mm.speech import SpeechRequest
from ..mm.types import EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem


class TokenRun(NamedTuple):
    """`token_ids`, repeated `repeat` times; encoder rows take their places if `is_embed`."""

    token_ids: tuple[int, ...]
    repeat: int = 1
    is_embed: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) * self.repeat


@dataclass(frozen=True, eq=False)
class Span:
    """The tokens that replace a placeholder, for one item. Counts are known at once; `runs` gives the tokens when asked.

    Args:
        num_tokens: tokens of the span: rows, and text before, between and after them.
        num_embeds: those that encoder rows take the places of.
        runs: returns the tokens as runs, `num_tokens` in all.
        before, after: text around the span that is not part of its range. The prompt's tokenizer would merge it with the
            text beside it, so two adjacent tokens that are a key of `newline_merges` are written as its value.
        modality: of the rows, where it differs from the placeholder's.
        shared: the span lies in the tokens of the span before it, on those that are no rows of it, and adds no tokens.
    """

    num_tokens: int
    num_embeds: int
    runs: Callable[[], Sequence[TokenRun]]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    newline_merges: Mapping[tuple[int, int], int] = field(default_factory=dict)
    modality: str | None = None
    shared: bool = False

    @property
    def max_added_tokens(self) -> int:
        """Tokens that it adds to a prompt, before newlines are merged."""
        return 0 if self.shared else len(self.before) + self.num_tokens + len(self.after)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(run.token_ids * run.repeat for run in self.runs()))

    @property
    def is_embed(self) -> Tensor | None:
        """Bool `[num_tokens]`, or None if all tokens are rows, as in PlaceholderRange."""
        if self.num_embeds == self.num_tokens:
            return None
        runs = self.runs()
        lengths = torch.tensor([run.num_tokens for run in runs], dtype=torch.int64)
        return torch.tensor([run.is_embed for run in runs], dtype=torch.bool).repeat_interleave(lengths)


class ProcessingInfo(Protocol):
    """The one object per model family that answers everything about its inputs. Immutable, safe in many threads.

    Built as `cls(files: ProcessorFiles, *options: Mapping)` from the raw JSON of the checkpoint and the caller's
    `mm_processor_kwargs`, later ones over earlier ones; unknown keys raise ConfigError with the nearest known name.
    """

    modalities: tuple[str, ...]
    placeholder_ids: Mapping[
        str, int
    ]  # modality -> the one token that marks an unexpanded slot in a prompt; none: it is read across
    prompt_attention: str  # "causal" | "bidirectional_items" | "bidirectional_prompt"
    decode_spec: DecodeSpec  # frames and rate its items are decoded with
    chat_template: str | None  # Jinja source of its chats, where the checkpoint's own files have none that knows its items
    adapters: Mapping[str, str]  # modality -> folder of the adapter that computes prompts with such items, "": all; first wins

    def parser(self) -> MultiModalDataParser:
        """What forms of input it takes, and at most how many."""

    def with_kwargs(self, options: Mapping[str, Any]) -> Self:
        """The same with options of one request or item laid over its own; ConfigError names an unknown key."""

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Grid and counts from the header alone; InputError for what the family refuses."""

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        """Grid of an item whose rows the caller gave; InputError when they do not fit it."""

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """A decoded item to the encoder's named tensors, floating ones in `dtype`. Releases the GIL; thread-safe.

        The geometry is `geometry(item.header)`.
        """

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """A prompt as the caller gave it with what the family adds to every prompt, such as slots that need not be written.

        `items`: how many are given, by modality. Once for each prompt, before slots are looked for.
        """

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """The tokens that replace one slot."""

    def spans(self, modality: str, geometries: Sequence[ItemGeometry]) -> Sequence[Span]:
        """The tokens that replace one slot, a span for each item that its source is made of."""

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Options of one item that make a grid of (t, h, w) patches take at most `rows` rows; None: it cannot shrink."""

    def options_key(self, modality: str) -> str:
        """A stable text of the processing options that matter for this modality; part of the item's hash."""


@runtime_checkable
class SupportsTranscription(Protocol):
    """What a ProcessingInfo answers beside the rest if its family writes down speech."""

    languages: Mapping[str, str]  # code -> English name
    tasks: tuple[str, ...]  # "transcribe" (in the language spoken) and perhaps "translate" (to English)
    max_clip_seconds: float  # of one sound
    has_timestamps: bool

    def language_detection_request(self) -> SpeechRequest | None:
        """Its answer is the one token of the language spoken; None: the model finds it out as it writes, or knows one."""

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """`language` is a code of `languages`; None only where there is no detection. `context`: names and words to expect."""

    def parse_transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        """Text and language code of an answer, control tokens in it included; (answer, language) where it is only text."""
