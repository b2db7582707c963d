"""ProcessingInfo for architectures without a family of their own: transformers' processor, one item at a time.

Such a processor has no function from an item's size to its tokens. A blank item of that size is processed once, and every real
item must give the same tokens. Memory planning needs the counts of thousands of sizes: sizes with equal patch counts share one
measurement, or follow a linear rule that a few sizes establish.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...callers.errors import ConfigError, InputError, short_repr, typed
from ...mm.fields import BatchedField, FieldElem
from ...mm.hashing import digest
from ...mm.media.policy import DecodeSpec
from ...mm.types import AudioItem, ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ..bases.base import BaseProcessingInfo
from ..files import ProcessorFiles
from ..interface import Span, TokenRun

_MAX_RATIO = 200  # of the longer side to the shorter one
_INPUT_IDS = "input_ids"
_ARGUMENT = {"image": "images", "audio": "audio"}  # keyword of the processor
_PART = {"image": ("image_processor",), "audio": ("feature_extractor", "audio_processor")}
_PROBES = ((64, 64), (300, 420), (1024, 1024), (256, 1280), (1280, 256))  # pixels: sizes of different shapes
_SAMPLE = {"image": (224, 320), "audio": (32000, 0)}
_OURS = ("device", "return_tensors", "data_format", "input_data_format")  # options that callers may not set
_MAX_FACTOR = 16  # an option is at most this many times the processor's own number
_MAX_WITHOUT_DEFAULT = 4096  # limit of an option for which the processor has no number
# Errors of a processor that refuses an item.
_REFUSALS = (ValueError, TypeError, RuntimeError, LookupError, AttributeError, ZeroDivisionError)


@dataclass(frozen=True)
class ReadSpec:
    """Everything that an item's tensors depend on besides the item: processor, release, digest of its JSON, options as JSON."""

    processor: str
    release: str
    own: str
    options: str


class FallbackProcessingInfo(BaseProcessingInfo):
    """ProcessingInfo of any processor that has a placeholder token for images or audio.

    All tokens of an item count as its rows, because a model may also replace the embeddings of the tokens around them.
    `ItemGeometry.tiles` is the item's size, (height, width) or (samples, 0), which its tokens are looked up by.
    """

    embeds_layout = None

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        if files.folder is None:
            raise ConfigError("a processor of transformers needs the checkpoint's folder; give its path")
        self._processor, self._lock = _load(files.folder)
        self.modalities = tuple(name for name in _ARGUMENT if self._part(name) is not None and self._token(name) is not None)
        if not self.modalities:
            raise ConfigError(
                f"{type(self._processor).__name__} has no placeholder token for images or audio; "
                "text-only models are not served"
            )
        defaults = getattr(self._processor, "text_kwargs", {})  # those of its class
        self.adds_special_tokens = bool(defaults.get("add_special_tokens", True))
        self.placeholders = {name: (f"{name}_token", self._placeholder_id(name)) for name in self.modalities}
        self.valid_kwargs = {name: self._options(name) for name in self.modalities}
        self._blank_tokens = lru_cache(maxsize=4096)(self._tokenize_blank)
        self._measured: dict[object, int] = {}
        super().__init__(files, *options)

    def resolve_spec(self, modality: str) -> ReadSpec:
        import transformers

        options = {key: value for kwargs in self.processor_kwargs[modality] for key, value in kwargs.items()}
        for key, value in options.items():
            _check_limit(key, value, getattr(self._part(modality), key, None))
        files_digest = digest("sensorium.processor", self.files.image, self.files.audio)
        return ReadSpec(
            type(self._processor).__name__, transformers.__version__, files_digest, json.dumps(options, sort_keys=True)
        )

    def resolve_decode_spec(self) -> DecodeSpec:
        return DecodeSpec(rate=self._part("audio").sampling_rate) if "audio" in self.modalities else DecodeSpec()

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return one row per token of the processor; InputError if it refuses the item or would truncate the audio."""
        size = (header.samples, 0) if header.modality == "audio" else header.size
        if header.modality != "audio" and max(size) > _MAX_RATIO * min(size):
            text = f"differ by more than {_MAX_RATIO}:1, and the processor of transformers may enlarge the shorter one"
            raise InputError(f"its sides {size[1]}x{size[0]} {text}; crop it first")
        rows, rate = self._rows(header.modality, size), self.decode_spec.rate
        if header.modality == "audio" and size[0] > rate and rows == self._rows("audio", (size[0] - rate, 0)):
            raise InputError(f"it lasts {size[0] / rate:.2f} s, and the model takes only its beginning; cut it")
        return ItemGeometry(1, 1, rows, tiles=size)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return all tensors of the processor for one item, with the item's tokens."""
        if not isinstance(item, ImageItem | AudioItem):
            raise TypeError(f"a {type(item).__name__} is neither an image nor audio")
        grid, modality = self.geometry(item.header), item.header.modality
        data = Image.fromarray(item.pixels.numpy()) if isinstance(item, ImageItem) else item.samples.numpy()
        made = self._call(modality, data)
        written = _tokens(made)
        if written != self.span(modality, grid).token_ids:
            raise InputError(
                "the processor of this model gives other tokens for it than for a blank item of its size", code="unsupported"
            )
        return self._elements(made, dtype), self._with_grid(modality, replace(grid, w=len(written)), made)

    def _with_grid(self, modality: str, grid: ItemGeometry, made: Mapping[str, Tensor]) -> ItemGeometry:
        """Return the geometry with the processor's grid for positions, if it gives one with one row per merged patch."""
        shape = made.get(f"{modality}_grid_thw")
        if shape is None:
            return grid
        t, h, w = shape[0].tolist()
        merge = (self.files.config.get("vision_config") or {}).get("spatial_merge_size", 1)
        placed = replace(grid, t=t, h=h, w=w, merge=merge)
        return placed if placed.num_embeds == grid.num_embeds else grid

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        rows = geometry.num_embeds
        return Span(rows, rows, lambda: [TokenRun(self._blank_tokens(modality, geometry.tiles), 1, True)])

    def sample(self, modality: str, dtype: torch.dtype) -> tuple[dict[str, FieldElem], ItemGeometry, dict[str, Any]]:
        """Return a small item of noise as `process` does, and the processor's tensors of a prompt with that item."""
        size = _SAMPLE[modality]
        noise = np.random.default_rng(0).random((*size, 3) if modality == "image" else size[0], dtype=np.float32)
        data = Image.fromarray((noise * 255).astype(np.uint8)) if modality == "image" else noise - 0.5
        whole = self._call(modality, data, f"This is {self._token(modality)} and that is all")
        whole = {name: value.to(dtype) if value.is_floating_point() else value for name, value in whole.items()}
        made = self._call(modality, data)
        grid = ItemGeometry(1, 1, made[_INPUT_IDS].shape[1], tiles=size)
        return self._elements(made, dtype), self._with_grid(modality, grid, made), whole

    def _part(self, modality: str) -> Any:
        """Return the image processor or feature extractor, or None."""
        parts = (getattr(self._processor, name, None) for name in _PART[modality])
        return next((part for part in parts if part is not None), None)

    def _token(self, modality: str) -> str | None:
        token: str | None = getattr(self._processor, f"{modality}_token", None)
        return token

    def _placeholder_id(self, modality: str) -> int:
        """Return the id of the placeholder token; ConfigError if it is not a single token."""
        text = self._token(modality) or ""
        ids = self._processor.tokenizer(text, add_special_tokens=False)[_INPUT_IDS]
        if len(ids) != 1:
            raise ConfigError(f"the placeholder of {modality}s, {text!r}, is {len(ids)} tokens of this checkpoint, not one")
        return int(ids[0])

    def _options(self, modality: str) -> tuple[str, ...]:
        """Return the names of the options that the processor declares."""
        names = getattr(getattr(self._part(modality), "valid_kwargs", None), "__annotations__", ())
        return tuple(name for name in names if name not in _OURS)

    def _elements(self, made: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, FieldElem]:
        kept = {name: value for name, value in made.items() if name != "attention_mask"}
        cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in kept.items()}
        return {name: FieldElem(value, BatchedField()) for name, value in cast.items()}

    def _tokenize_blank(self, modality: str, size: tuple[int, int]) -> tuple[int, ...]:
        """Return the tokens of a blank item of this size. Images are tried on the meta device first."""
        if modality == "image":
            try:
                return _tokens(self._call(modality, torch.empty((3, *size), dtype=torch.uint8, device="meta")))
            except InputError:
                return _tokens(self._call(modality, Image.new("RGB", size[::-1])))
        return _tokens(self._call(modality, np.zeros(size[0], dtype=np.float32)))

    def _rows(self, modality: str, size: tuple[int, int]) -> int:
        """Return the number of tokens of an item of this size; for images, from `_count_of` if possible."""
        if modality == "audio":
            return len(self._blank_tokens(modality, size))
        count = self._count_of(size)
        if self._linear_rule is not None:
            slope, start = self._linear_rule
            return int(slope * (count or 0) + start)
        key = size if count is None else count
        if key not in self._measured:
            self._measured[key] = len(self._blank_tokens(modality, size))
        return self._measured[key]

    @cached_property
    def _linear_rule(self) -> tuple[Fraction, Fraction] | None:
        """Return slope and start of an image's tokens over `_count_of`; None if the probed sizes do not lie on one line."""
        points: set[tuple[int, int]] = set()
        for size in _PROBES:
            with suppress(InputError):  # a refused size is no evidence
                points.add((self._count_of(size) or 0, len(self._blank_tokens("image", size))))
        (x, y), (far_x, far_y) = min(points, default=(0, 0)), max(points, default=(0, 0))
        if self._count_of(_PROBES[0]) is None:
            return (Fraction(0), Fraction(y)) if len(points) == 1 else None
        if len({count for count, _ in points}) < 3:
            return None
        slope = Fraction(far_y - y, far_x - x)
        start = y - slope * x
        return (slope, start) if all(slope * count + start == rows for count, rows in points) else None

    def _count_of(self, size: tuple[int, int]) -> int | None:
        """Return the patches or tokens that the processor computes from a size alone; None if it has no such function."""
        patches = getattr(self._part("image"), "get_number_of_image_patches", None)
        tokens = getattr(self._processor, "_get_num_multimodal_tokens", None)
        try:
            if patches is not None:
                return int(patches(*size, self._merged))
            return int(tokens(image_sizes=[list(size)], **self._merged).num_image_tokens[0]) if tokens else None
        except _REFUSALS as error:
            raise InputError(f"the processor of this model refuses it: {line(error)}", code="unsupported") from None

    @cached_property
    def _merged(self) -> dict[str, Any]:
        """The processor's default options of images, updated by ours."""
        merged = self._processor._merge_kwargs(images_kwargs=json.loads(self.specs["image"].options))
        return dict(merged["images_kwargs"])

    def _call(self, modality: str, item: object, text: str = "") -> dict[str, Tensor]:
        """Return the processor's tensors of a prompt: `text`, or the placeholder alone."""
        options: dict[str, Any] = json.loads(self.specs[modality].options)
        if modality == "audio":
            options["sampling_rate"] = self._part("audio").sampling_rate
        elif isinstance(item, Tensor):
            options["input_data_format"] = "channels_first"  # otherwise it is guessed from the shape
        settings = {f"{_ARGUMENT[modality]}_kwargs": options, "text_kwargs": {"add_special_tokens": False}}
        inputs: dict[str, Any] = {"text": [text or self._token(modality)], _ARGUMENT[modality]: [item]}
        try:
            with self._lock:  # its tokenizer is not thread-safe
                made = self._processor(**inputs, **settings, return_tensors="pt")
        except _REFUSALS as error:
            raise InputError(f"the processor of this model refuses it: {line(error)}", code="unsupported") from None
        return {name: _tensor(name, value) for name, value in made.items()}


@lru_cache(maxsize=4)
def _load(folder: Path) -> tuple[Any, Lock]:
    """Load the processor of a folder, without remote code, and return it with a lock."""
    from transformers import AutoProcessor

    try:
        load: Any = AutoProcessor.from_pretrained
        processor = load(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        raise ConfigError(f"transformers cannot load a processor from {folder}: {line(error)}") from None
    logging.getLogger(type(processor).__module__).setLevel(logging.ERROR)  # it would warn about blank items
    return processor, Lock()


def _check_limit(key: str, value: object, default: object) -> None:
    """Raise ConfigError for numbers far above the processor's own: a processor may loop as often as they say."""
    most = max(_numbers(default), default=_MAX_WITHOUT_DEFAULT / _MAX_FACTOR) * _MAX_FACTOR
    beyond = next((number for number in _numbers(value) if not abs(number) <= most), None)
    if beyond is not None:
        reason = f"{key} is {short_repr(beyond)}, more than {_MAX_FACTOR} times the processor's own"
        raise ConfigError(f"{reason}; give at most {most:g}", param=key)


def _numbers(value: object) -> list[float]:
    """Return the numbers inside a number, mapping, list or object."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    inside = value if isinstance(value, list | tuple) else list(getattr(value, "__dict__", {}).values())
    return [number for entry in inside for number in _numbers(entry)]


def _tokens(made: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tuple(made[_INPUT_IDS][0].tolist())


def _tensor(name: str, value: Any) -> Tensor:
    """Return a value of one item as a tensor. Processors return ragged values as lists, here of one entry."""
    if isinstance(value, list) and len(value) == 1:
        return torch.as_tensor(value[0])[None]
    if not isinstance(value, Tensor):
        raise InputError(f"the processor of this model gives {name} as {typed(value)}, not as a tensor", code="unsupported")
    return value


def line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
