"""The interface of every family's ProcessingInfo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from ..mm.media.policy import DecodeSpec
from ..mm.parse import MultiModalDataParser
from ..mm.rules import PromptAttention
from ..mm.speech import AlignmentRule, FrameRule, PhonemeRule, SpeechRequest, StreamRule
from ..mm.types import (
    EmbeddingItem,
    ItemGeometry,
    ItemPlan,
    MediaHeader,
    MediaItem,
    MultiModalFeature,
    MultiModalKwargsItem,
)


class TextTokens(tuple[int, ...]):
    """Tokens of a text, with the text. Tokens do not tell it where added tokens absorb whitespace.

    The text is empty if it is part of the prompt's.
    """

    text: str

    def __new__(cls, ids: Iterable[int], text: str) -> Self:
        tokens = super().__new__(cls, ids)
        tokens.text = text
        return tokens


class TokenRun(NamedTuple):
    """`token_ids`, repeated `repeat` times; encoder rows replace their embeddings if `is_embed`."""

    token_ids: tuple[int, ...]
    repeat: int = 1
    is_embed: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) * self.repeat


@dataclass(frozen=True, eq=False)
class Span:
    """The tokens that replace a placeholder, for one item. Counts are known at once; calling `runs` builds the tokens.

    Args:
        num_tokens: tokens of the span: encoder rows, and text before, between and after them.
        num_embeds: tokens of the span that are encoder rows.
        runs: returns the tokens as runs, `num_tokens` in all.
        before, after: text around the span that is not part of its range.
        merges: pair of tokens -> the one token that replaces it where `before` or `after` meets other text. The tokenizer would
            have merged these texts, too.
        modality: modality of the rows, if it differs from the placeholder's.
        shared: the span adds no tokens. Its rows are those tokens of the previous span that are not rows of that span.
        ahead: rows after these, for tokens that are generated.
        trailing: tokens that belong to the range if they follow it in the prompt.
        fills: number below 0 that `preprocess_prompt` put into the prompt -> the tokens that replace it between this span and
            the next one.
    """

    num_tokens: int
    num_embeds: int
    runs: Callable[[], Sequence[TokenRun]]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    merges: Mapping[tuple[int, int], int] = field(default_factory=dict)
    modality: str | None = None
    shared: bool = False
    ahead: int = 0
    trailing: frozenset[int] = frozenset()
    fills: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def max_added_tokens(self) -> int:
        """Tokens that the span adds to a prompt, before `merges` apply."""
        if self.shared:
            return 0
        return len(self.before) + self.num_tokens + len(self.after) + sum(map(len, self.fills.values()))

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
    """Everything about the inputs of a model family. Immutable and thread-safe.

    Built as `cls(files: ProcessorFiles, *options: Mapping)` from the raw JSON of the checkpoint and the caller's
    `mm_processor_kwargs`; later mappings override earlier ones. Unknown keys raise ConfigError with the nearest known name.
    """

    modalities: tuple[str, ...]
    placeholder_ids: Mapping[str, int]  # modality -> its placeholder token; absent: the decoder cross-attends to the items
    cross_token: int | None  # stands for a cross-attention item in the prompt, which is then optional; None: there is no token
    prompt_attention: PromptAttention
    decode_spec: DecodeSpec  # how its items are decoded
    adds_special_tokens: bool  # rendered chats and prompts get the tokens that the tokenizer adds to texts, such as BOS
    chat_template: str | None  # Jinja source, if the checkpoint's own template does not support its items
    output_shape: tuple[int, ...] | None  # shape of the result of `encode`, if the model has no text; else None
    document_instruction: str | None  # the instruction of `embed` for texts that `score` compares with a query
    takes_instruction: bool  # False: `embed` sends no system message, because the prompts of the model are fixed
    end_tokens: Sequence[str]  # texts of tokens that end an answer beside the published EOS tokens; absent ones are ignored
    ocr_prompts: Sequence[str]  # names of the prompts of `ocr` that models of the family were trained with
    prunes_videos: bool  # `video_pruning_rate` of config.json is read
    adapters: Mapping[str, str]  # modality ("": every prompt) -> folder of the adapter for prompts with it; first match wins

    @property
    def text_placeholders(self) -> Mapping[str, int]:
        """Placeholders that prompts spell as plain text -> their token."""

    def parser(self) -> MultiModalDataParser:
        """Return the parser of the forms of input that the family takes, with their limits."""

    def with_kwargs(self, options: Mapping[str, Any]) -> Self:
        """Return a copy in which the options of a request or item override its own; ConfigError names an unknown key."""

    def prompt_kwargs(self, items: Mapping[str, int]) -> Mapping[str, Any]:
        """Return options, below those of the request, for a prompt with these numbers of items by modality."""

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return grid and counts from the header alone; InputError if the family refuses the item."""

    def kept_size(self, modality: str, size: tuple[int, int]) -> tuple[int, int]:
        """Return the largest `(height, width)` within `size` that an item which keeps its size may have; `size` if none may.

        Families that resize items return `size`.
        """

    def is_exact(self, header: MediaHeader) -> bool:
        """Return False if `geometry(header)` has upper bounds, and only the decoded item tells its rows (`for_item`)."""

    def for_item(self, item: MediaItem) -> Self:
        """Return the info that processes a decoded item: one whose `geometry` of the item's header is exact."""

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        """Return the grid of an item of precomputed embeddings; InputError if they do not fit it."""

    def tensor_fields(self, item: EmbeddingItem) -> MultiModalKwargsItem:
        """Return the encoder's tensors of an item that is tensors, see `mm.raw_tensors`. Other models have no such items."""

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the encoder's tensors of a decoded item, floating ones in `dtype`. Releases the GIL; thread-safe.

        The geometry is that of the item's header. Where `is_exact` is False, call it on what `for_item` returns.
        """

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Return the prompt with the tokens that the family adds to every prompt, such as placeholders that callers may omit.

        Called once per prompt, before placeholders are searched. `items`: number of items by modality.
        """

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Do what `preprocess_prompt` does for a rendered chat in which `text_placeholders` are tokens already."""

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the tokens that replace the placeholder of one item."""

    def spans(self, modality: str, geometries: Sequence[ItemGeometry]) -> Sequence[Span]:
        """Return the tokens that replace one placeholder: a span for each item of its source."""

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options that shrink an item of (t, h, w) patches to at most `rows` rows; None: it cannot shrink."""

    def options_key(self, modality: str) -> str:
        """Return a stable text of the processing options that matter for this modality; part of the item's hash."""


@runtime_checkable
class SupportsElements(Protocol):
    """Additional interface of a ProcessingInfo whose family names boxes, points or layout elements in its answers."""

    element_format: str  # key of `elements.formats.FORMATS`, "" for none

    def resized(self, plan: ItemPlan) -> tuple[int, int]:
        """Return `(height, width)` of the image that the encoder gets; `plan.size` if the format does not need it."""


@runtime_checkable
class SupportsEncoderText(Protocol):
    """Additional interface of a ProcessingInfo whose model has a text encoder. Its prompts take no media."""

    def encoder_item(self, ids: Sequence[int]) -> EmbeddingItem:
        """Return the item of the encoder's token ids; InputError if there are none, too many or unknown ones."""


@runtime_checkable
class SupportsWholeText(Protocol):
    """Additional interface of a ProcessingInfo whose prompts are tokenised together with the text of their items."""

    rewrites_prompts: bool  # `preprocess_prompt` changes more than placeholders, and more than it inserts around them
    tokenizes_parts: bool  # parts of a prompt are tokenised by themselves; the whole text is not tokenised again
    inserted: Mapping[str, tuple[str, str]]  # modality -> text that `preprocess_prompt` inserts before and after a placeholder
    plain_tokens: Sequence[str]  # added tokens that the published processor adds again, as special ones without other flags
    placeholder_texts: Mapping[str, str]  # modality -> text of its placeholder in prompts, if that is not the text of its token

    def preprocess_text(self, text: str, bos: str | None) -> str:
        """Return the text of a prompt as the published processor tokenises it. `bos`: the tokenizer's first token, if any."""


@runtime_checkable
class LimitsViews(Protocol):
    """Additional interface of a ProcessingInfo whose family has views of any size with the same number of rows."""

    most_patches: int  # of a view, for any options


@runtime_checkable
class SupportsPhonemes(Protocol):
    """Additional interface of a ProcessingInfo whose family turns phonemes into speech."""

    def phoneme_rule(self) -> PhonemeRule: ...


@runtime_checkable
class SupportsTranscription(Protocol):
    """Additional interface of a ProcessingInfo whose family transcribes speech."""

    languages: Mapping[str, str]  # code -> English name
    tasks: tuple[str, ...]  # "transcribe" (in the language spoken) and perhaps "translate" (to English)
    has_timestamps: bool
    takes_language: bool  # False: `transcription_request` ignores the language
    takes_context: bool  # False: `transcription_request` ignores the context
    closed_samples: int | None  # samples of an encoder window, if the encoder attends within windows that may be separate items

    def language_detection_request(self) -> SpeechRequest | None:
        """Return the request whose output is the token of the spoken language; None: no separate request is needed."""

    def no_speech_request(self) -> SpeechRequest | None:
        """Return the request whose output is the token for "no speech" with its probability, or None without such a token."""

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the request. `language`: a code of `languages`, or None to detect it. `context`: names and words to expect."""

    def alignment(self) -> AlignmentRule | None:
        """Return the heads from which times of words are computed; None: the model has no cross-attention."""

    def frame_rule(self) -> FrameRule | None:
        """Return how the model's rows, `[rows, 2]` of token and log probability, become text; None: it has a decoder."""

    def open_window(
        self, samples: Tensor, number: int, is_last: bool, dtype: torch.dtype, earlier: MultiModalFeature | None = None
    ) -> MultiModalFeature | None:
        """Return a live stream's open window as encoder input, or None if the encoder is not local in time.

        The model encodes only what is new since the last call with the same `number`, which identifies the window. `samples`
        are all samples of the window so far, so they begin with those of earlier calls. `is_last`: no other call follows.
        `earlier`: the feature that the last call returned for this window.
        """

    def stream_rule(self) -> StreamRule | None:
        """Return how the model transcribes a stream chunk by chunk; None: it cannot."""

    def parse_transcript(self, answer: str, language: str | None) -> tuple[str, str | None]:
        """Return text and language code of an output that still contains its control tokens."""
