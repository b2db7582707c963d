"""The interface of what reads pictures of single lines."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .stop import StopSignal

Picture = NDArray[np.uint8]


class LineRecognizer(Protocol):
    """Reads pictures of lines, uint8 `[height, width, 3]`.

    Attributes:
        alphabet: the characters that it knows.
    """

    @property
    def alphabet(self) -> Set[str]: ...
    def recognize(self, pictures: Sequence[Picture], stop: StopSignal) -> list[tuple[str, float]]:
        """Return the text of each picture, and its score from 0 to 1."""
