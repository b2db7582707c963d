"""What a class of transformers wants to be fed: its own processor, one item at a time. Knows no family and no model.

Such a processor has no function from an item's size to its tokens. So an item of that size is processed without its content,
once, and each real item is held to what is written for it. How many tokens they are is asked of thousands of sizes when memory
is planned: there, sizes of which the processor tells the same count as one, or lie on a line.
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

from ...mm.errors import ConfigError, InputError, typed
from ...mm.fields import BatchedField, FieldElem
from ...mm.hashing import digest
from ...mm.media.policy import DecodeSpec
from ...mm.types import AudioItem, ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ..bases.base import BaseProcessingInfo
from ..files import ProcessorFiles
from ..interface import Span, TokenRun

RUN = "input_ids"  # the tokens of the item, which the class writes its rows over
_ARGUMENT = {"image": "images", "audio": "audio"}  # of the processor
_PART = {"image": ("image_processor",), "audio": ("feature_extractor", "audio_processor")}
_PROBES = ((64, 64), (300, 420), (1024, 1024), (256, 1280), (1280, 256))  # pixels: sizes unlike each other
_SAMPLE = {"image": (224, 320), "audio": (32000, 0)}
_OURS = ("device", "return_tensors", "data_format", "input_data_format")  # options that are not the caller's
_TIMES, _LEAST = 16, 4096  # how far an option may go beyond the processor's own number, or where it has none
_REFUSES = (
    ValueError,
    TypeError,
    RuntimeError,
    LookupError,
    AttributeError,
    ZeroDivisionError,
)  # of one that takes no such item


@dataclass(frozen=True)
class ReadSpec:
    """What an item's tensors depend on beside the item: the processor, its release, its JSON's digest, options as JSON."""

    processor: str
    release: str
    own: str
    options: str


class FallbackProcessingInfo(BaseProcessingInfo):
    """ProcessingInfo of any processor that writes a token of its own in place of each picture or sound.

    All tokens it writes for an item are the item's rows, since a class may give other embeddings to those around too.
    `ItemGeometry.tiles` is the item's size, (height, width) or (samples, 0), from which its tokens are found again.
    """

    embeds_layout = None

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        if files.folder is None:
            raise ConfigError("a processor of transformers is read from a checkpoint's folder")
        self._processor, self._lock = _load(files.folder)
        self.modalities = tuple(name for name in _ARGUMENT if self._part(name) is not None and self._token(name) is not None)
        if not self.modalities:
            raise ConfigError(
                f"{type(self._processor).__name__} names no token that stands for a picture or a sound; "
                "a model of text alone is not served here"
            )
        self.placeholders = {name: (f"{name}_token", self._slot(name)) for name in self.modalities}
        self.valid_kwargs = {name: self._options(name) for name in self.modalities}
        self._run = lru_cache(maxsize=4096)(self._written)
        self._kinds: dict[object, int] = {}
        super().__init__(files, *options)

    def resolve_spec(self, modality: str) -> ReadSpec:
        import transformers

        given = {key: value for kwargs in self.processor_kwargs[modality] for key, value in kwargs.items()}
        for key, value in given.items():
            _bound(key, value, getattr(self._part(modality), key, None))
        own = digest("sensorium.processor", self.files.image, self.files.audio)
        return ReadSpec(type(self._processor).__name__, transformers.__version__, own, json.dumps(given, sort_keys=True))

    def resolve_decode_spec(self) -> DecodeSpec:
        return DecodeSpec(rate=self._part("audio").sampling_rate) if "audio" in self.modalities else DecodeSpec()

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """One row per token that the processor writes; InputError for what it refuses, and for a sound that it would cut."""
        size = (header.samples, 0) if header.modality == "audio" else header.size
        rows, rate = self._rows(header.modality, size), self.decode_spec.rate
        if header.modality == "audio" and size[0] > rate and rows == self._rows("audio", (size[0] - rate, 0)):
            raise InputError(f"it lasts {size[0] / rate:.2f} s, and the model hears no more than its beginning; cut it")
        return ItemGeometry(1, 1, rows, tiles=size)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """The processor's tensors as they are, each of one item, and the item's tokens."""
        if not isinstance(item, ImageItem | AudioItem):
            raise TypeError(f"a {type(item).__name__} is neither picture nor sound")
        grid, modality = self.geometry(item.header), item.header.modality
        data = Image.fromarray(item.pixels.numpy()) if isinstance(item, ImageItem) else item.samples.numpy()
        made = self._call(modality, data)
        written = _tokens(made)
        if written != self.span(modality, grid).token_ids:
            raise InputError("the processor of this model writes other tokens for it than for a blank one of its size")
        return self._elements(made, dtype), self._placed(modality, replace(grid, w=len(written)), made)

    def _placed(self, modality: str, grid: ItemGeometry, made: Mapping[str, Tensor]) -> ItemGeometry:
        """With the grid that positions follow, where the processor tells one and it is one row per merged patch."""
        shape = made.get(f"{modality}_grid_thw")
        if shape is None:
            return grid
        t, h, w = shape[0].tolist()
        merge = (self.files.config.get("vision_config") or {}).get("spatial_merge_size", 1)
        placed = replace(grid, t=t, h=h, w=w, merge=merge)
        return placed if placed.num_embeds == grid.num_embeds else grid

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        rows = geometry.num_embeds
        return Span(rows, rows, lambda: [TokenRun(self._run(modality, geometry.tiles), 1, True)])

    def sample(self, modality: str, dtype: torch.dtype) -> tuple[dict[str, FieldElem], ItemGeometry, dict[str, Any]]:
        """A small item of noise, as `process` gives it, and all that the processor makes of a prompt with it in between."""
        size = _SAMPLE[modality]
        noise = np.random.default_rng(0).random((*size, 3) if modality == "image" else size[0], dtype=np.float32)
        data = Image.fromarray((noise * 255).astype(np.uint8)) if modality == "image" else noise - 0.5
        whole = self._call(modality, data, f"This is {self._token(modality)} and that is all")
        whole = {name: value.to(dtype) if value.is_floating_point() else value for name, value in whole.items()}
        made = self._call(modality, data)
        grid = ItemGeometry(1, 1, made[RUN].shape[1], tiles=size)
        return self._elements(made, dtype), self._placed(modality, grid, made), whole

    def _part(self, modality: str) -> Any:
        """Of the processor, that which takes items; None where it has none."""
        found = (getattr(self._processor, name, None) for name in _PART[modality])
        return next((part for part in found if part is not None), None)

    def _token(self, modality: str) -> str | None:
        token: str | None = getattr(self._processor, f"{modality}_token", None)
        return token

    def _slot(self, modality: str) -> int:
        """The id of the one token that is written for an item not yet expanded."""
        text = self._token(modality) or ""
        ids = self._processor.tokenizer(text, add_special_tokens=False)[RUN]
        if len(ids) != 1:
            raise ConfigError(
                f"{modality}s stand in a prompt as {text!r}, which is {len(ids)} tokens of this checkpoint, not one"
            )
        return int(ids[0])

    def _options(self, modality: str) -> tuple[str, ...]:
        """Names that the processor takes, as far as it says."""
        names = getattr(getattr(self._part(modality), "valid_kwargs", None), "__annotations__", ())
        return tuple(name for name in names if name not in _OURS)

    def _elements(self, made: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, FieldElem]:
        kept = {name: value for name, value in made.items() if name != "attention_mask"}
        cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in kept.items()}
        return {name: FieldElem(value, BatchedField()) for name, value in cast.items()}

    def _written(self, modality: str, size: tuple[int, int]) -> tuple[int, ...]:
        """The tokens of an item of this size: of a picture of so many pixels without any, where the processor does not look."""
        if modality == "image":
            try:
                return _tokens(self._call(modality, torch.empty((3, *size), dtype=torch.uint8, device="meta")))
            except InputError:
                return _tokens(self._call(modality, Image.new("RGB", size[::-1])))
        return _tokens(self._call(modality, np.zeros(size[0], dtype=np.float32)))

    def _rows(self, modality: str, size: tuple[int, int]) -> int:
        """How many they are; those of a picture follow from what is told of it, where something is."""
        if modality == "audio":
            return len(self._run(modality, size))
        told = self._told(size)
        if self._law is not None:
            slope, start = self._law
            return int(slope * (told or 0) + start)
        kind = size if told is None else told
        if kind not in self._kinds:
            self._kinds[kind] = len(self._run(modality, size))
        return self._kinds[kind]

    @cached_property
    def _law(self) -> tuple[Fraction, Fraction] | None:
        """Slope and start of a picture's tokens over `_told`; None where unlike sizes do not show that they lie on a line."""
        points: set[tuple[int, int]] = set()
        for size in _PROBES:
            with suppress(InputError):  # a size that is refused tells nothing
                points.add((self._told(size) or 0, len(self._run("image", size))))
        (x, y), (far_x, far_y) = min(points, default=(0, 0)), max(points, default=(0, 0))
        if self._told(_PROBES[0]) is None:
            return (Fraction(0), Fraction(y)) if len(points) == 1 else None
        if len({told for told, _ in points}) < 3:
            return None
        slope = Fraction(far_y - y, far_x - x)
        start = y - slope * x
        return (slope, start) if all(slope * told + start == rows for told, rows in points) else None

    def _told(self, size: tuple[int, int]) -> int | None:
        """What the processor says of a size without processing it: its patches or tokens; None where it says nothing."""
        patches = getattr(self._part("image"), "get_number_of_image_patches", None)
        tokens = getattr(self._processor, "_get_num_multimodal_tokens", None)
        try:
            if patches is not None:
                return int(patches(*size, self._merged))
            return int(tokens(image_sizes=[list(size)], **self._merged).num_image_tokens[0]) if tokens else None
        except _REFUSES as error:
            raise InputError(f"the processor of this model refuses it: {line(error)}") from None

    @cached_property
    def _merged(self) -> dict[str, Any]:
        """Options of pictures over the processor's own defaults."""
        merged = self._processor._merge_kwargs(images_kwargs=json.loads(self.specs["image"].options))
        return dict(merged["images_kwargs"])

    def _call(self, modality: str, item: object, text: str = "") -> dict[str, Tensor]:
        """Tensors by name of one prompt that is `text`, or else nothing but the item."""
        options: dict[str, Any] = json.loads(self.specs[modality].options)
        if modality == "audio":
            options["sampling_rate"] = self._part("audio").sampling_rate
        elif isinstance(item, Tensor):
            options["input_data_format"] = "channels_first"  # else it is guessed from the sides
        settings = {f"{_ARGUMENT[modality]}_kwargs": options, "text_kwargs": {"add_special_tokens": False}}
        inputs: dict[str, Any] = {"text": [text or self._token(modality)], _ARGUMENT[modality]: [item]}
        try:
            with self._lock:  # its tokenizer is not to be used by two at once
                made = self._processor(**inputs, **settings, return_tensors="pt")
        except _REFUSES as error:
            raise InputError(f"the processor of this model refuses it: {line(error)}") from None
        return {name: _tensor(name, value) for name, value in made.items()}


@lru_cache(maxsize=4)
def _load(folder: Path) -> tuple[Any, Lock]:
    """The processor of a folder, never with code of its own, and a lock for it."""
    from transformers import AutoProcessor

    try:
        load: Any = AutoProcessor.from_pretrained
        processor = load(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        raise ConfigError(f"transformers makes no processor of {folder}: {line(error)}") from None
    logging.getLogger(type(processor).__module__).setLevel(logging.ERROR)  # it would warn of blank items that nobody gave
    return processor, Lock()


def _bound(key: str, value: object, own: object) -> None:
    """ConfigError for numbers far beyond the processor's own: it may count up to them."""
    most = max(_numbers(own), default=_LEAST / _TIMES) * _TIMES
    beyond = next((number for number in _numbers(value) if number > most), None)
    if beyond is not None:
        raise ConfigError(f"{key} is {beyond:g}, more than {_TIMES} times the processor's own; give at most {most:g}")


def _numbers(value: object) -> list[float]:
    """Those in a number, or in a mapping, a list or an object of them."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    inside = value if isinstance(value, list | tuple) else list(getattr(value, "__dict__", {}).values())
    return [number for entry in inside for number in _numbers(entry)]


def _tokens(made: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tuple(made[RUN][0].tolist())


def _tensor(name: str, value: Any) -> Tensor:
    """A processor keeps ragged values in lists; of one item there is one."""
    if isinstance(value, list) and len(value) == 1:
        return torch.as_tensor(value[0])[None]
    if not isinstance(value, Tensor):
        raise InputError(f"the processor of this model gives {name} as {typed(value)}, not as a tensor")
    return value


def line(error: Exception) -> str:
    """What it says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
