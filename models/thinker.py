"""The part of a model that sees, hears and writes, whose checkpoint may also speak: config and names. Knows no family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..mm.errors import ConfigError
from .interface import Work
from .native_model import NativeModel

SPEAKING = ("talker.", "token2wav.", "code2wav.")
"""Beginnings of the names of tensors that make speech."""


def thinker(config: Mapping[str, Any], tied: bool = False, **defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that such a model is made from, nested or not: `defaults` by section, each of them needed.

    Only this part says whether the head is tied (`tied`: if it leaves that out), whatever its text section does.

    Raises:
        ConfigError: a section that is no object.
    """
    inner = config.get("thinker_config", config)
    for section in defaults:
        if not isinstance(inner, Mapping) or not isinstance(inner.get(section), Mapping):
            raise ConfigError(f"{section} in config.json must be an object")
    sections = {section: {**known, **inner[section]} for section, known in defaults.items()}
    sections["text_config"]["tie_word_embeddings"] = None
    return {"tie_word_embeddings": tied, **inner, **sections}


def nested(prefixes: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Names as they are, and below `thinker.`."""
    return (*((f"thinker.{stored}", name) for stored, name in prefixes), ("thinker.", ""), *prefixes)


class Thinker(NativeModel, ABC):
    """A NativeModel with an `audio_tower`; of each item "audio" it reads `input_features` and `audio_frames`.

    A family makes the tower, says how many frames at most so many rows are made of, and what the tower takes for them. Sounds
    have no levels: theirs are zeros.
    """

    audio_tower: Any
    mels: int

    @abstractmethod
    def frames_of(self, rows: int) -> int:
        """At most, of so many rows."""

    @abstractmethod
    def audio_bytes(self, frames: int, work: Work) -> int:
        """As `encoder_bytes`, for so many frames."""

    def embed_audio(self, features: Tensor, frames: Sequence[int]) -> list[Tensor]:
        """`[rows, hidden]` of each sound."""
        return self.audio_tower(features, frames)  # type: ignore[no-any-return]

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        if modality != "audio":
            return super().embed_multimodal(modality, tensors)
        rows = self.embed_audio(tensors["input_features"], tensors["audio_frames"].tolist())
        return [F.pad(one, (0, self.row_size - self.hidden_size)) for one in rows]

    def input_bytes(self, modality: str, rows: int) -> int:
        if modality != "audio":
            return super().input_bytes(modality, rows)
        return self.frames_of(rows) * self.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        if modality != "audio":
            return super().encoder_bytes(modality, rows, work)
        made = rows * (self.hidden_size + self.row_size) * self.dtype.itemsize
        return max(self.audio_bytes(self.frames_of(rows), work), made)
