"""Voices of text-to-speech models: files `voices/<name>.pt` beside the weights, with a style vector per number of phonemes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..callers.errors import InputError, hint, short_repr, typed
from ..checkpoints.torch_file import read_saved_tensor
from ..mm.speech import PhonemeRule

_FOLDER, _SUFFIX = "voices", ".pt"
_MAX_BLENDED = 8
Voice = str | os.PathLike[str] | Tensor
"""A name, several names joined by commas (their mean), a Path of a voice file, or a tensor `[phonemes, 1, style]`."""


@dataclass(frozen=True, eq=False)
class Voices:
    """The voices of a checkpoint. Each is read when it is first used.

    Args:
        files: name -> path. rule: of the model.
    """

    files: Mapping[str, Path]
    rule: PhonemeRule
    _read: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.files)

    def find(self, voice: Voice | None) -> Tensor:
        """Return the styles of a voice, float32 `[phonemes, style]`. None: the first voice.

        Raises:
            InputError: an unknown name, a tensor of another shape, voices of different lengths, or another type.
            CheckpointError: the file of a voice cannot be read.
        """
        if isinstance(voice, Tensor):
            return self._checked("the tensor", voice)
        if isinstance(voice, os.PathLike):
            return self._checked(os.fspath(voice), read_saved_tensor(Path(voice)))
        if voice is None:
            if not self.files:
                reason = "the checkpoint has no folder voices; download it, or give <<param>>, a file or a tensor"
                raise InputError(reason, code="unsupported", param="voice")
            voice = self.names[0]
        if not isinstance(voice, str):
            reason = f"<<param>> must be a name, a path or a tensor, not {typed(voice)}"
            raise InputError(reason, code="invalid_value", param="voice")
        names = [name.strip() for name in voice.split(",", _MAX_BLENDED)]
        if len(names) > _MAX_BLENDED:
            reason = f"<<param>> names more than {_MAX_BLENDED} voices"
            raise InputError(reason, code="over_limit", param="voice", limit=_MAX_BLENDED)
        voices = [self._named(name) for name in names]
        if len({len(each) for each in voices}) > 1:
            reason = f"<<param=>>{short_repr(voice)} mixes voices of different lengths"
            raise InputError(f"{reason}; give one of them", code="invalid_value", param="voice")
        return torch.stack(voices).mean(0)

    def style(self, voice: Tensor, phonemes: int) -> tuple[float, ...]:
        """Return the style for a sentence of this many phonemes. `voice`: the styles that `find` returned."""
        return tuple(voice[min(phonemes, len(voice)) - 1].tolist())

    def _named(self, name: str) -> Tensor:
        if name not in self.files:
            reason = f"<<param=>>{short_repr(name)} is no voice of this model; {hint(name, self.names)}"
            raise InputError(reason, code="unsupported", param="voice", value=name)
        if name not in self._read:
            self._read[name] = self._checked(str(self.files[name]), read_saved_tensor(self.files[name]))
        return self._read[name]

    def _checked(self, what: str, voice: Tensor) -> Tensor:
        if voice.ndim not in (2, 3) or not len(voice) or voice.shape[1:].numel() != self.rule.style:
            reason = f"{what} has the shape {list(voice.shape)}; a voice of this model has [phonemes, 1, {self.rule.style}]"
            raise InputError(f"<<param>>: {reason}", code="invalid_value", param="voice")
        styles = voice.detach().reshape(len(voice), self.rule.style).float().cpu()
        if not voice.is_floating_point() or not styles.isfinite().all():
            raise InputError(f"<<param>>: {what} must be finite floating-point numbers", code="invalid_value", param="voice")
        return styles


def find_voices(folder: Path, rule: PhonemeRule) -> Voices:
    """Return the voices in the folder of a checkpoint; there may be none."""
    files = sorted((folder / _FOLDER).glob(f"*{_SUFFIX}"))
    return Voices({file.name.removesuffix(_SUFFIX): file for file in files}, rule)
