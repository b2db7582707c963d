"""Base of every family's ProcessingInfo: options, token ids, precomputed embeddings, spans of placeholder tokens."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, lru_cache
from typing import Any, Self

import torch

from ...mm.embeddings import ROWS, EmbeddingSpec
from ...mm.errors import ConfigError, InputError
from ...mm.geometry import FrameSampling
from ...mm.media.policy import DecodeSpec
from ...mm.parse import MultiModalDataParser
from ...mm.types import EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ..files import ADAPTER, ProcessorFiles
from ..interface import Span
from ..options import ValidKwargs, apply_sampling, for_modality
from ..spans import build_span

_REPLACEMENT = "\ufffd"  # decoded from an incomplete character
_SAMPLED = ("video", "vision_chunk")  # modalities of which only some frames are used


class BaseProcessingInfo(ABC):
    """A ProcessingInfo without `resolve_spec`, `geometry` and `process`; a family overrides whatever else differs.

    Class attributes:

        modalities, prompt_attention, chat_template: as in ProcessingInfo.
        placeholders: modality -> keys of its placeholder token in config.json, the newest first, then the published id or text.
        valid_kwargs: names of the `mm_processor_kwargs` that each modality takes.
        default_kwargs: processor kwargs of the family, which the caller's override.
        text_config_defaults: values of the text config that published config.json files leave out.
        adapter_folders: `adapters` of ProcessingInfo, before the check that the checkpoint has them; "." is its own folder.
        embeds_layout: what comes with precomputed embeddings: "grid" (t, h, w), "count" (nothing: one row per step), or None:
            they are refused.

    Instance attributes: `files` (the checkpoint's JSON), `text_config`, `processor_kwargs[modality]` (the options, later ones
    win) and `specs[modality]` (what `resolve_spec` returned).
    """

    modalities: tuple[str, ...] = ()
    prompt_attention: str = "causal"
    placeholders: Mapping[str, tuple[str | int, ...]] = {}
    valid_kwargs: ValidKwargs = {}
    default_kwargs: Mapping[str, Any] = {}
    text_config_defaults: Mapping[str, Any] = {}
    adapter_folders: Mapping[str, str] = {"": "."}
    embeds_layout: str | None = "count"
    chat_template: str | None = None

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        self._given = files, kwargs
        self.files = files = self.prepare_files(files)
        text = files.config.get("text_config") or files.config.get("language_config") or files.config
        self.text_config = {**self.text_config_defaults, **text}
        layers = (self.default_kwargs, *kwargs)
        self.processor_kwargs = {
            name: [for_modality(layer, name, self.valid_kwargs) for layer in layers] for name in self.modalities
        }
        self.placeholder_ids: Mapping[str, int] = {
            name: self.config_token_id(*keys) for name, keys in self.placeholder_keys().items()
        }
        self.resolve_token_ids()
        self.specs = {name: self.resolve_spec(name) for name in self.modalities}
        self.decode_spec = self.resolve_decode_spec()
        self.adapters: Mapping[str, str] = {
            name: folder for name, folder in self.adapter_folders.items() if self._has_adapter(folder)
        }

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Hook: the files in the layout that the family reads."""
        return files

    def placeholder_keys(self) -> Mapping[str, tuple[str | int, ...]]:
        """Hook: `placeholders`, where they depend on the checkpoint."""
        return self.placeholders

    def resolve_token_ids(self) -> None:  # noqa: B027
        """Hook: look up the ids of other tokens that the family writes."""

    @abstractmethod
    def resolve_spec(self, modality: str) -> Any:
        """The spec of one modality, a frozen dataclass; ConfigError if the checkpoint's files contradict each other."""

    def resolve_decode_spec(self) -> DecodeSpec:
        """How items are decoded: frames of videos, sampling rate of audio."""
        return DecodeSpec()

    @abstractmethod
    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """See ProcessingInfo."""

    @abstractmethod
    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """See ProcessingInfo."""

    def config_token_id(self, *keys: str | int) -> int:
        """The id under the first of these keys that config.json has, else the last one: an id, or the text of a token.

        Raises:
            ConfigError: the id is missing or outside the vocabulary.
        """
        config, last = self.files.config, keys[-1]
        present = [key for key in keys if isinstance(key, str) and config.get(key) is not None]
        token = config[present[0]] if present else self.special_token_id(last) if isinstance(last, str) else last
        size = self.text_config.get("vocab_size")
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < (token + 1 if size is None else size):
            raise ConfigError(f"{[*present, keys[0]][0]} {token!r} in config.json is outside the vocabulary of {size}")
        return token

    def special_token_id(self, text: str) -> int:
        """The id of a token that config.json does not name, by its text; ConfigError if the tokenizer lacks it."""
        if self.files.token_to_id is None:
            raise ConfigError(f"items of this model are written with {text}, which takes the tokenizer of the checkpoint")
        token = self.files.token_to_id(text)
        if token is None:
            raise ConfigError(
                f"the tokenizer of the checkpoint has no token {text}, which items of this model are written with"
            )
        return token

    def check_config(self, section: str, **expected: Any) -> None:
        """Raise ConfigError if a section of config.json contradicts what the preprocessor's JSON says."""
        config = self.files.config.get(section) or {}
        for key, value in expected.items():
            if config.get(key, value) != value:
                raise self.files.mismatch_error(f"{key} is {config[key]} in {section} of config.json", value)

    def _has_adapter(self, folder: str) -> bool:
        return self.files.folder is not None and (self.files.folder / folder / ADAPTER).is_file()

    def sampling_policy(self, modality: str, default: FrameSampling) -> FrameSampling:
        """The default with the caller's `fps`, `num_frames` and `max_duration`."""
        for kwargs in self.processor_kwargs[modality]:
            default = apply_sampling(default, kwargs)
        return default

    @cached_property
    def encode(self) -> Any:
        """A function from the family's own text, such as timestamps, to a tuple of token ids.

        Raises:
            ConfigError: the checkpoint has no tokenizer.
        """
        encode = self.files.encode
        if encode is None:
            raise ConfigError("items of this model are written with text, which takes the tokenizer of the checkpoint")
        return lru_cache(maxsize=4096)(lambda text: tuple(encode(text)))

    @cached_property
    def newline_merges(self) -> Mapping[tuple[int, int], int]:
        """Two tokens of newlines -> the one token of both, if the tokenizer has tokens for several. See `Span`."""
        runs = {count: self.encode("\n" * count) for count in range(1, 32)}
        single = {count: ids[0] for count, ids in runs.items() if len(ids) == 1}
        return {(single[a], single[b]): single[a + b] for a in single for b in single if a + b in single}

    @property
    def embed_width(self) -> int:
        """Numbers in one encoder row: the decoder's width, times the levels of encoders with DeepStack."""
        return int(self.text_config.get("hidden_size", 0))

    def parser(self) -> MultiModalDataParser:
        """Takes media in any form and, unless `embeds_layout` is None, precomputed embeddings."""
        accepted = self.modalities if self.embeds_layout else ()
        return MultiModalDataParser(self.modalities, embeddings={name: self._embedding_spec(name) for name in accepted})

    def _embedding_spec(self, modality: str) -> EmbeddingSpec:
        grid = f"{modality}_grid_thw" if self.embeds_layout == "grid" else None
        return EmbeddingSpec(self.embed_width, f"{modality}_embeds", grid, getattr(self.specs[modality], "merge", 1))

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> Self:
        files, earlier = self._given
        return type(self)(files, *earlier, kwargs)

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        if self.embeds_layout is None:
            raise InputError("this model takes no ready-made rows; give what they are made from")
        if self.embeds_layout == "count":
            return ItemGeometry(len(item.tensors[ROWS]), 1, 1)
        t, h, w = item.tensors["grid"].tolist()
        return ItemGeometry(t, h, w, self.specs[item.modality].merge)

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return ids

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """By default the placeholder token, once per row."""
        return build_span([geometry.num_embeds], self.placeholder_ids[modality])

    def spans(self, modality: str, geometries: Sequence[ItemGeometry]) -> Sequence[Span]:
        """By default the span of each piece, one after another."""
        return [self.span(modality, geometry) for geometry in geometries]

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return None

    def options_key(self, modality: str) -> str:
        """The spec and, of videos, the frame sampling."""
        sampling = asdict(self.decode_spec.sampling) if modality in _SAMPLED else None
        return json.dumps([asdict(self.specs[modality]), sampling], sort_keys=True)


def prepend_placeholders(ids: Sequence[int], placeholder: int, items: int) -> list[int]:
    """The prompt with a placeholder per item at its start, unless it already contains the placeholder."""
    return list(ids) if placeholder in ids else [placeholder] * items + list(ids)


def insert_text_around(ids: Sequence[int], placeholder: int, before: str, after: str, files: ProcessorFiles) -> list[int]:
    """The prompt with text around each placeholder, tokenized together with the text beside it.

    The token beside a placeholder is decoded and encoded again with the new text; special tokens stay as they are. Example:
    "Look: ", placeholder, "a" with "One" and "." gives the tokens of "Look: One", the placeholder, and those of ".a".
    """
    encode, decode = files.encode, files.decode
    if encode is None or decode is None:
        raise ConfigError("items of this model are written with text, which takes the tokenizer of the checkpoint")

    def decode_complete(ids: Sequence[int]) -> str:
        text = decode(ids)
        return "" if _REPLACEMENT in text else text

    out: list[int] = []
    pending = ""  # text before the next token
    for token in ids:
        text = decode_complete([token]) if pending else ""
        out += encode(pending + text) if pending else []
        pending = ""
        if token == placeholder:
            last = decode_complete(out[-1:])
            out[len(out) - bool(last) :] = encode(last + before)
            pending = after
        if token == placeholder or not text:
            out.append(token)
    return out + encode(pending) if pending else out
