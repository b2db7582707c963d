"""What every family's ProcessingInfo does alike: options, token ids, ready-made rows, plain spans. Knows no family."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, lru_cache
from typing import Any, Self

import torch

from ..mm.embeddings import ROWS, EmbeddingSpec
from ..mm.errors import ConfigError, InputError
from ..mm.geometry import SamplingPolicy
from ..mm.media.policy import DecodeSpec
from ..mm.parse import MultiModalDataParser
from ..mm.types import EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from .files import ADAPTER, ProcessorFiles
from .interface import Span
from .options import Known, for_modality, with_sampling

_UNREADABLE = "\ufffd"  # what decoding writes for bytes that are no character yet
_CLIPS = ("video", "vision_chunk")  # modalities whose frames are sampled


class FamilyInfo(ABC):
    """A ProcessingInfo but for `read`, `geometry` and `process`; a family overrides what else differs.

    Class attributes say the rest:

        modalities, prefill: as in ProcessingInfo.
        slots: modality -> names of its slot's token in config.json, the newest first, and the published id or text.
        known: names of the options that a caller may give, by modality.
        published: values of the text config where config.json omits them.
        adapters: as in ProcessingInfo, of those that a checkpoint may bring; here one beside the weights is for every prompt.
        template: as in ProcessingInfo.
        rows: what ready-made rows come with: "grid" (t, h, w), "count" (nothing; one step of one row each), None: refused.

    `self.files` is the checkpoint's JSON, `self.text` its text config, `self.layers[modality]` the options given so far,
    `self.specs[modality]` what `read` made of both.
    """

    modalities: tuple[str, ...] = ()
    prefill: str = "causal"
    adapters: Mapping[str, str] = {"": "."}
    slots: Mapping[str, tuple[str | int, ...]] = {}
    known: Known = {}
    published: Mapping[str, Any] = {}
    rows: str | None = "count"
    template: str | None = None

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        self.files, self._given = files, options
        text = files.config.get("text_config") or files.config.get("language_config") or files.config
        self.text = {**self.published, **text}
        self.layers = {name: [for_modality(layer, name, self.known) for layer in options] for name in self.modalities}
        self.slot_ids: Mapping[str, int] = {name: self.token(*names) for name, names in self.slots.items()}
        self.specs = {name: self.read(name) for name in self.modalities}
        self.decode_spec = self.decoding()
        self.adapters = {name: where for name, where in self.adapters.items() if self._brings(where)}

    @abstractmethod
    def read(self, modality: str) -> Any:
        """The resolved spec of one modality, a frozen dataclass; ConfigError for a checkpoint that contradicts itself."""

    def decoding(self) -> DecodeSpec:
        """How its items are decoded: frames of clips, rate of sounds."""
        return DecodeSpec()

    @abstractmethod
    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """As in ProcessingInfo."""

    @abstractmethod
    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """As in ProcessingInfo."""

    def token(self, *names: str | int) -> int:
        """The id under the first of these keys that config.json has, else the last: a published id, or the text of a token.

        Raises:
            ConfigError: an id that is missing, or that the vocabulary does not have.
        """
        config, last = self.files.config, names[-1]
        known = [name for name in names if isinstance(name, str) and config.get(name) is not None]
        token = config[known[0]] if known else self.special(last) if isinstance(last, str) else last
        size = self.text.get("vocab_size")
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < (token + 1 if size is None else size):
            raise ConfigError(f"{[*known, names[0]][0]} {token!r} in config.json is outside the vocabulary of {size}")
        return token

    def special(self, text: str) -> int:
        """The id of a token by its text, for those that config.json does not name; ConfigError where there is none."""
        if self.files.special is None:
            raise ConfigError(f"items of this model are written with {text}, which takes the tokenizer of the checkpoint")
        token = self.files.special(text)
        if token is None:
            raise ConfigError(
                f"the tokenizer of the checkpoint has no token {text}, which items of this model are written with"
            )
        return token

    def agree(self, section: str, **ours: Any) -> None:
        """ConfigError where a section of config.json says of an input what the preprocessor's JSON does not."""
        said = self.files.config.get(section) or {}
        for key, have in ours.items():
            if said.get(key, have) != have:
                raise self.files.contradict(f"{key} is {said[key]} in {section} of config.json", have)

    def _brings(self, adapter: str) -> bool:
        return self.files.folder is not None and (self.files.folder / adapter / ADAPTER).is_file()

    def sampling(self, modality: str, default: SamplingPolicy) -> SamplingPolicy:
        """Which frames of a clip are used: the caller's `fps`, `num_frames` and `max_duration` over the default."""
        for layer in self.layers[modality]:
            default = with_sampling(default, layer)
        return default

    @cached_property
    def encode(self) -> Any:
        """Text of the family's own, such as times, to token ids (tuple); ConfigError without the checkpoint's tokenizer."""
        encode = self.files.encode
        if encode is None:
            raise ConfigError("items of this model are written with text, which takes the tokenizer of the checkpoint")
        return lru_cache(maxsize=4096)(lambda text: tuple(encode(text)))

    @cached_property
    def line_joins(self) -> Mapping[tuple[int, int], int]:
        """Two runs of ends of lines -> the one token of both, of tokenizers that have some for runs. See `Span.joins`."""
        runs = {count: self.encode("\n" * count) for count in range(1, 32)}
        single = {count: ids[0] for count, ids in runs.items() if len(ids) == 1}
        return {(single[a], single[b]): single[a + b] for a in single for b in single if a + b in single}

    @property
    def row_width(self) -> int:
        """Numbers in one encoder row: the decoder's width, but for encoders that give several levels."""
        return int(self.text.get("hidden_size", 0))

    def parser(self) -> MultiModalDataParser:
        """Media in any form and, where the family takes them, ready-made rows."""
        taken = self.modalities if self.rows else ()
        return MultiModalDataParser(self.modalities, embeddings={name: self._row_spec(name) for name in taken})

    def _row_spec(self, modality: str) -> EmbeddingSpec:
        grid = f"{modality}_grid_thw" if self.rows == "grid" else None
        return EmbeddingSpec(self.row_width, f"{modality}_embeds", grid, getattr(self.specs[modality], "merge", 1))

    def tuned(self, options: Mapping[str, Any]) -> Self:
        return type(self)(self.files, *self._given, options)

    def rows_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        if self.rows is None:
            raise InputError("this model takes no ready-made rows; give what they are made from")
        if self.rows == "count":
            return ItemGeometry(len(item.tensors[ROWS]), 1, 1)
        t, h, w = item.tensors["grid"].tolist()
        return ItemGeometry(t, h, w, self.specs[item.modality].merge)

    def prompt_ids(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return ids

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Only embeddings: the slot's token, once per embedding."""
        return Span((self.slot_ids[modality],) * geometry.num_embeds)

    def spans(self, modality: str, geometries: Sequence[ItemGeometry]) -> Sequence[Span]:
        """Each for itself, one after the other."""
        return [self.span(modality, geometry) for geometry in geometries]

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return None

    def options_key(self, modality: str) -> str:
        """The resolved spec and, of clips, which frames are used."""
        sampling = asdict(self.decode_spec.sampling) if modality in _CLIPS else None
        return json.dumps([asdict(self.specs[modality]), sampling], sort_keys=True)


def slotted(ids: Sequence[int], slot: int, items: int) -> list[int]:
    """A prompt with a slot per item at its start, unless it holds the slot's token itself."""
    return list(ids) if slot in ids else [slot] * items + list(ids)


def with_words(ids: Sequence[int], slot: int, before: str, after: str, files: ProcessorFiles) -> list[int]:
    """A prompt with words around each slot, as a tokenizer reads them together with the text beside the slot.

    The token beside a slot is read once more with the words; nothing is read across a special token. Example: "Look: ",
    slot, "a" with "One" and "." around it gives the tokens of "Look: One", the slot, and those of ".a".
    """
    encode, decode = files.encode, files.decode
    if encode is None or decode is None:
        raise ConfigError("items of this model are written with text, which takes the tokenizer of the checkpoint")

    def readable(ids: Sequence[int]) -> str:
        text = decode(ids)
        return "" if _UNREADABLE in text else text

    out: list[int] = []
    due = ""  # before the next token
    for token in ids:
        text = readable([token]) if due else ""
        out += encode(due + text) if due else []
        due = ""
        if token == slot:
            last = readable(out[-1:])
            out[len(out) - bool(last) :] = encode(last + before)
            due = after
        if token == slot or not text:
            out.append(token)
    return out + encode(due) if due else out


def build_span(pieces: Sequence[tuple[int, ...] | int], embed: int) -> Span:
    """A span of text and rows in turn: a tuple is tokens as they are, a number so many rows of the token `embed`.

    Example: `[(7,), 3, (8, 9)]` with 5 gives 7 5 5 5 8 9 and the mask F T T T F F.
    """
    tokens: list[int] = []
    mask: list[bool] = []
    for piece in pieces:
        written = (embed,) * piece if isinstance(piece, int) else piece
        tokens += written
        mask += [isinstance(piece, int)] * len(written)
    return Span(tuple(tokens), None if all(mask) else torch.tensor(mask, dtype=torch.bool))
