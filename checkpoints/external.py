"""Parts of a checkpoint that are in other repositories, which its config.json names, or in folders of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..callers.errors import CheckpointError, short_repr


@dataclass(frozen=True)
class ExternalPart:
    """A part that may be in another repository or folder.

    Args:
        key: names the repository or a folder; true names `folder`. section: the part's section of config.json.
        prefix: prefix of its tensors' names in a checkpoint that holds them.
        stored: prefix of their names in the other repository, whose other tensors are not used.
    """

    key: str
    section: str
    prefix: str
    stored: str = ""
    folder: str = ""

    def rename(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the part's tensors of the other repository under the names of a checkpoint that holds them."""
        for name, tensor in weights:
            if name.startswith(self.stored):
                yield self.prefix + name[len(self.stored) :], tensor


ExternalWeights = tuple[ExternalPart, Path]
"""A part whose weights have to be read from this folder."""
_NAME = re.compile(r"(?!\.{1,2}(?:/|$))[^/\\\0]+(?:/(?!\.{1,2}$)[^/\\\0]+)?")  # one or two parts of a path, none of them ".."
PARTS = (
    ExternalPart("text_model_id", "text_config", "language_model."),
    ExternalPart("audio_model_id", "audio_config", "audio_tower.", "model.encoder."),
    ExternalPart("use_whisper_feature", "audio_config", "audio_tower.", "model.encoder.", "whisper-large-v3"),  # Kimi-Audio
)


def external_parts(config: Mapping[str, Any]) -> list[tuple[ExternalPart, str]]:
    """Return the parts for which config.json names another repository or folder, and that name.

    Raises:
        CheckpointError: a name is neither a model's name on the Hub nor a folder's name. A checkpoint may not open other paths.
    """
    values = [(part, config.get(part.key)) for part in PARTS]
    named = [(part, part.folder if value is True else value) for part, value in values]
    parts = [(part, name) for part, name in named if isinstance(name, str) and name]
    for part, name in parts:
        if not _NAME.fullmatch(name):
            reason = "is neither a folder's name nor a model's name on the Hub; move the folder beside the checkpoint's"
            raise CheckpointError(f"config.json has {part.key}={short_repr(name)}, which {reason} and give its name alone")
    return parts


def find_part_folder(path: Path, name: str) -> Path | None:
    """Return the folder with a name of `external_parts` that is in a checkpoint's folder or beside it; None without one."""
    places = (path / name, *([] if "/" in name else [path.absolute().parent / name]))
    return next((folder for folder in places if os.path.isdir(folder)), None)


def lacks_weights(headers: Mapping[str, Tensor], part: ExternalPart) -> bool:
    """Return True if none of the stored tensors belongs to the part."""
    return bool(headers) and not any(name.startswith(part.prefix) for name in headers)
