"""Base of every family's ProcessingInfo: options, token ids, precomputed embeddings, spans of placeholder tokens."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, Self

import torch

from ...callers.errors import ConfigError, InputError
from ...mm.embeddings import ROWS, EmbeddingSpec
from ...mm.geometry import FrameSampling
from ...mm.media.policy import DecodeSpec
from ...mm.parse import MultiModalDataParser
from ...mm.rules import CAUSAL, PromptAttention
from ...mm.types import EmbeddingItem, ItemGeometry, ItemPlan, MediaHeader, MediaItem, MultiModalKwargsItem
from ..files import ADAPTER, ProcessorFiles
from ..interface import Span, TextTokens
from ..options import VALUES, ValidKwargs, Values, apply_sampling, for_modality, read_sound, with_sound
from ..spans import build_span

_REPLACEMENT = "\ufffd"  # decoded from an incomplete character
_SAMPLED = ("video", "vision_chunk")  # modalities of which only some frames are used


class BaseProcessingInfo(ABC):
    """The defaults of ProcessingInfo. A family defines `resolve_spec`, `geometry` and `process`, and overrides what differs.

    Class attributes:

        modalities, cross_token, prompt_attention, adds_special_tokens, chat_template, takes_instruction,
            output_shape, document_instruction, end_tokens, ocr_prompts, prunes_videos, rewrites_prompts, tokenizes_parts,
            inserted, plain_tokens, placeholder_texts: as in ProcessingInfo.
        placeholders: modality -> keys of its placeholder token in config.json, the newest first, then the published id or text.
        valid_kwargs: names of the `mm_processor_kwargs` that each modality takes.
        option_values: values of those options that only this family takes.
        default_kwargs: default options; the caller's options override them.
        text_config_defaults: values of the text config that published config.json files leave out.
        adapter_folders: `adapters` of ProcessingInfo; folders that the checkpoint lacks are left out. "." is its own folder.
        embeds_layout: "grid": precomputed embeddings must come with their (t, h, w); "count": they come alone, and each row is
            a temporal step; None: they are refused.
        element_format: as in SupportsElements.

    Instance attributes: `files` (the checkpoint's JSON), `text_config`, `processor_kwargs[modality]` (one mapping of options
    per source, defaults first), `merged_kwargs[modality]` (the same in one mapping, later sources win) and `specs[modality]`
    (what `resolve_spec` returned).
    """

    modalities: tuple[str, ...] = ()
    cross_token: int | None = None
    prompt_attention: PromptAttention = CAUSAL
    placeholders: Mapping[str, tuple[str | int, ...]] = {}
    valid_kwargs: ValidKwargs = {}
    option_values: Values = {}
    default_kwargs: Mapping[str, Any] = {}
    text_config_defaults: Mapping[str, Any] = {}
    adapter_folders: Mapping[str, str] = {"": "."}
    embeds_layout: str | None = "count"
    element_format: str = ""
    adds_special_tokens: bool = True
    chat_template: str | None = None
    takes_instruction: bool = True
    output_shape: tuple[int, ...] | None = None
    document_instruction: str | None = None
    end_tokens: Sequence[str] = ()
    ocr_prompts: Sequence[str] = ()
    prunes_videos: bool = False
    rewrites_prompts: bool = False
    tokenizes_parts: bool = False
    inserted: Mapping[str, tuple[str, str]] = {}
    plain_tokens: Sequence[str] = ()
    placeholder_texts: Mapping[str, str] = {}

    def __init__(self, files: ProcessorFiles, *kwargs: Mapping[str, Any]) -> None:
        self._init_args = files, kwargs
        self.files = files = self.prepare_files(files)
        text = files.config.get("text_config") or files.config.get("language_config") or files.config
        self.text_config = {**self.text_config_defaults, **text}
        layers = (self.default_kwargs, *kwargs)
        valid_names, values = with_sound(self.valid_kwargs), {**VALUES, **self.option_values}
        self.processor_kwargs = {
            name: [for_modality(layer, name, valid_names, values) for layer in layers] for name in self.modalities
        }
        self.merged_kwargs = {name: dict(ChainMap(*reversed(several))) for name, several in self.processor_kwargs.items()}
        self.placeholder_ids: Mapping[str, int] = {
            name: self.config_token_id(*keys) for name, keys in self.placeholder_keys().items()
        }
        self.resolve_token_ids()
        self.specs = {name: self.resolve_spec(name) for name in self.modalities}
        self.decode_spec = replace(
            self.resolve_decode_spec(),
            sound=read_sound(self.merged_kwargs.get("audio", {})),
            video_sound=read_sound(self.merged_kwargs.get("video", {})),
        )
        self.adapters: Mapping[str, str] = {
            name: folder
            for name, folder in self.adapter_folders.items()
            if files.folder is not None and (files.folder / folder / ADAPTER).is_file()
        }

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Hook: return the files in the layout that the family reads."""
        return files

    def placeholder_keys(self) -> Mapping[str, tuple[str | int, ...]]:
        """Hook: return `placeholders`, for families where they depend on the checkpoint."""
        return self.placeholders

    def resolve_token_ids(self) -> None:  # noqa: B027
        """Hook: look up the ids of other tokens that the family uses."""

    @abstractmethod
    def resolve_spec(self, modality: str) -> Any:
        """Return the spec of one modality, a frozen dataclass; ConfigError if the checkpoint's files contradict each other."""

    def resolve_decode_spec(self) -> DecodeSpec:
        """Return the decoding parameters: frames of videos, sampling rate of audio."""
        return DecodeSpec()

    @abstractmethod
    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """See ProcessingInfo."""

    def kept_size(self, modality: str, size: tuple[int, int]) -> tuple[int, int]:
        """Return, by default, `size`: items are resized."""
        return size

    def is_exact(self, header: MediaHeader) -> bool:
        return header.exact

    def for_item(self, item: MediaItem) -> Self:
        """Return, by default, this info: the header of a decoded item tells its rows."""
        return self

    @abstractmethod
    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """See ProcessingInfo."""

    def config_token_id(self, *keys: str | int) -> int:
        """Return the id under the first of these keys in config.json, else the last key itself: an id, or the text of a token.

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
        """Return the id of a token that config.json does not name, by its text; ConfigError if the tokenizer lacks it."""
        if self.files.token_to_id is None:
            raise ConfigError(f"items of this model use the token {text}; download the checkpoint's tokenizer")
        token = self.files.token_to_id(text)
        if token is None:
            raise ConfigError(f"the checkpoint's tokenizer lacks the token {text} of this model's items; download it again")
        return token

    def check_config(self, section: str, **expected: Any) -> None:
        """Raise ConfigError if a section of config.json contradicts what the preprocessor's JSON says."""
        config = self.files.config.get(section) or {}
        for key, value in expected.items():
            if config.get(key, value) != value:
                raise self.files.mismatch_error(f"{key} is {config[key]} in {section} of config.json", value)

    def preprocessor_json(self, modality: str) -> Mapping[str, Any]:
        """Return the JSON of the image or video processor. Without a video processor, videos use the image processor's."""
        return (self.files.video or self.files.image) if modality == "video" else self.files.image

    def sampling_policy(self, modality: str, default: FrameSampling, json: Mapping[str, Any]) -> FrameSampling:
        """Return the default with `fps` and `num_frames` of the preprocessor's JSON, then with the caller's options."""
        for options in ({key: json.get(key) for key in ("fps", "num_frames")}, *self.processor_kwargs[modality]):
            default = apply_sampling(default, options)
        return default

    @cached_property
    def encode(self) -> Any:
        """A function that tokenizes the family's own text, such as timestamps, to a tuple of ids.

        Added tokens in it are recognised, as publishers' processors tokenize it. Text of a prompt is for `files.encode`.

        Raises:
            ConfigError: the checkpoint has no tokenizer.
        """
        encode = self.files.encode_trusted or self.files.encode
        if encode is None:
            raise ConfigError("items of this model contain text; download the checkpoint's tokenizer")
        return lru_cache(maxsize=4096)(lambda text: TextTokens(encode(text), text))

    @cached_property
    def newline_merges(self) -> Mapping[tuple[int, int], int]:
        """Two newline tokens -> the one token for both, if the tokenizer has tokens of several newlines. See `Span`."""
        runs = {count: self.encode("\n" * count) for count in range(1, 32)}
        single = {count: ids[0] for count, ids in runs.items() if len(ids) == 1}
        return {(single[a], single[b]): single[a + b] for a in single for b in single if a + b in single}

    @property
    def text_placeholders(self) -> Mapping[str, int]:
        return {}

    @property
    def embed_width(self) -> int:
        """Width of an encoder row: the decoder's hidden size, plus once that size per DeepStack level."""
        return int(self.text_config.get("hidden_size", 0))

    def parser(self) -> MultiModalDataParser:
        """Return a parser of media in any form and, unless `embeds_layout` is None, of precomputed embeddings."""
        accepted = self.modalities if self.embeds_layout else ()
        specs = {name: self._embedding_spec(name) for name in accepted}
        return MultiModalDataParser(self.modalities, embeddings=specs, width=self.embed_width)

    def _embedding_spec(self, modality: str) -> EmbeddingSpec:
        grid = f"{modality}_grid_thw" if self.embeds_layout == "grid" else None
        return EmbeddingSpec(self.embed_width, f"{modality}_embeds", grid, getattr(self.specs[modality], "merge", 1))

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> Self:
        files, earlier = self._init_args
        return type(self)(files, *earlier, kwargs)

    def prompt_kwargs(self, items: Mapping[str, int]) -> Mapping[str, Any]:
        return {}

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        if self.embeds_layout is None:
            raise InputError("this model takes no precomputed embeddings; give the media itself", code="unsupported")
        if self.embeds_layout == "count":
            return ItemGeometry(len(item.tensors[ROWS]), 1, 1)
        t, h, w = item.tensors["grid"].tolist()
        return ItemGeometry(t, h, w, self.specs[item.modality].merge)

    def tensor_fields(self, item: EmbeddingItem) -> MultiModalKwargsItem:
        raise InputError("this model takes no raw tensors; give an image, a video or audio", code="unsupported")

    def preprocess_text(self, text: str, bos: str | None) -> str:
        return text

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return ids

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return ids

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return, by default, the placeholder token once per row."""
        return build_span([geometry.num_embeds], self.placeholder_ids[modality])

    def spans(self, modality: str, geometries: Sequence[ItemGeometry]) -> Sequence[Span]:
        """Return, by default, the span of each item."""
        return [self.span(modality, geometry) for geometry in geometries]

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return None

    def resized(self, plan: ItemPlan) -> tuple[int, int]:
        return plan.size

    def options_key(self, modality: str) -> str:
        """Return the spec and, for videos, the frame sampling as JSON, with their classes and those of their fields."""
        sampling = self.decode_spec.sampling if modality in _SAMPLED else None
        sound = {"audio": self.decode_spec.sound, "video": self.decode_spec.video_sound}.get(modality)
        return json.dumps([self.specs[modality], sampling, sound], sort_keys=True, default=_with_class)


def _with_class(data: Any) -> dict[str, Any]:
    """Return the fields of a dataclass and its class: two policies may differ in their class only."""
    return {"class": type(data).__name__} | {field.name: getattr(data, field.name) for field in fields(data)}


def end_of_word(ids: Sequence[int], start: int, decode: Callable[[Sequence[int]], str]) -> int:
    """Return the end of the word at `start`: the position of the next whitespace or special token."""
    end = start
    while end < len(ids) and (text := decode([ids[end]])) and (end == start or not text[0].isspace()):
        end += 1
    return end


def replace_text(ids: Sequence[int], text: str, placeholder: int, files: ProcessorFiles) -> Sequence[int]:
    """Replace a placeholder's text with its token, see `replace_matches`."""
    return replace_matches(ids, re.compile(re.escape(text)), lambda match: placeholder, (placeholder,), files)


def replace_matches(
    ids: Sequence[int],
    pattern: re.Pattern[str],
    token_of: Callable[[re.Match[str]], int],
    placeholders: Collection[int],
    files: ProcessorFiles,
) -> Sequence[int]:
    """Replace the texts that a pattern matches with tokens. The parts around them are tokenized separately.

    Text on both sides of a special token, or of one of `placeholders`, is not joined. Without a tokenizer, `ids` are returned.
    """
    encode, decode = files.encode, files.decode
    if encode is None or decode is None:
        return ids
    out: list[int] = []
    for is_text, run in groupby(ids, lambda token: token not in placeholders and decode([token]) != ""):
        tokens = list(run)
        text, start, replaced = decode(tokens) if is_text else "", 0, list[int]()
        for match in pattern.finditer(text):
            replaced += [*encode(text[start : match.start()]), token_of(match)]
            start = match.end()
        out += [*replaced, *encode(text[start:])] if replaced else tokens
    return out


def check_one_video(items: Mapping[str, int]) -> None:
    """Raise an InputError for images beside a video, or for several videos."""
    videos, images = items.get("video", 0), items.get("image", 0)
    if videos > 1 or (videos and images):
        raise InputError(
            f"{videos} videos and {images} images are given; this model takes images, or one video, per prompt",
            code="unsupported",
        )


def add_brackets(ids: Sequence[int], placeholder: int, items: int, before: int | None, after: int | None) -> Sequence[int]:
    """Put two tokens around each placeholder of a prompt, unless one of them is beside it.

    A prompt with another number of placeholders than `items` is returned as it is: its items are expanded already. So is
    every prompt if the tokenizer lacks one of the two tokens.
    """
    if before is None or after is None or sum(token == placeholder for token in ids) != items:
        return ids
    padded, out = [-1, *ids, -1], list[int]()
    for left, token, right in zip(padded, ids, padded[2:], strict=False):
        bare = token == placeholder and left != before and right != after
        out += (before, token, after) if bare else (token,)
    return out


def insert_text_around(ids: Sequence[int], placeholder: int, before: str, after: str, files: ProcessorFiles) -> list[int]:
    """Insert text around each placeholder of a prompt, tokenized together with the text beside it.

    The token beside a placeholder is decoded and encoded again with the new text; added tokens stay as they are. Example:
    "Look: ", placeholder, "a" with "One" and "." gives the tokens of "Look: One", the placeholder, and those of ".a".
    """
    encode, decode, recognise = files.encode, files.decode, files.encode_trusted
    if encode is None or decode is None:
        raise ConfigError("items of this model contain text; download the checkpoint's tokenizer")

    def decode_complete(ids: Sequence[int]) -> str:
        text = decode(ids)
        is_added = recognise is not None and list(recognise(text)) == list(ids) != list(encode(text))
        return "" if is_added or _REPLACEMENT in text else text

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
