"""The errors a caller can cause. Each message is one line that names the item, the limit and the next step."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 100  # characters of a name that is compared with the known ones
_VOWELS = ("a", "e", "i", "o", "nd")  # as they are said: a uint8, an ndarray


class SensoriumError(ValueError):
    """Base of all errors that come from what the caller gave; never a bug of ours."""


class ConfigError(SensoriumError):
    """An option, or a checkpoint's configuration, that contradicts itself, is unknown or asks for remote code."""


class CheckpointError(SensoriumError):
    """Weights or tokenizer files that are missing, surplus, of a wrong shape or unreadable."""


class InputError(SensoriumError):
    """A prompt, message or sampling parameter that cannot be served."""


class MediaError(InputError):
    """A picture, clip or sound that cannot be decoded or is over a limit.

    Args:
        modality: "image", "video" or "audio".
        index: position of the item among those of its modality in the request.
        reason: one clause: what is wrong, and the limit where there is one.
    """

    def __init__(self, modality: str, index: int, reason: str) -> None:
        super().__init__(f"{modality} {index}: {reason}")
        self.modality, self.index, self.reason = modality, index, reason


def hint(name: object, known: Iterable[str]) -> str:
    """What a message about an unknown name ends with: the nearest known one, where one is near, and all of them."""
    names = list(known)
    if not names:
        return "none is known"
    near = difflib.get_close_matches(str(name)[:_LONGEST], names, n=1, cutoff=0.5)
    return f"{f'did you mean {near[0]}? The' if near else 'the'} known ones are {', '.join(names)}"


def typed(value: object) -> str:
    """What a message calls it: its type with the article, as in "an int", or None."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name.lower().startswith(_VOWELS) else 'a'} {name}"
