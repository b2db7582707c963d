"""What Ultravox wants to be fed: sounds in windows of 30 s as log-mel frames, a token for 160 ms. Knows no model.

Source: the published processor. It fills up the last of several windows with zeros, which the model does here; a sound's only
window is as long as the sound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from torch import Tensor
from torch.nn import functional as F

from .mel import MelSpec, log_mel
from .windows import WindowedInfo

PLACEHOLDER = "<|audio|>"
_LEAST = 2  # frames


class UltravoxProcessingInfo(WindowedInfo):
    """ProcessingInfo of Ultravox. The slot is written as a text that is no token; the text beside it is read alone."""

    slots = {"audio": ("audio_token_index", 32000)}
    published = {"hidden_size": 4096, "max_position_embeddings": 2048}
    mel = MelSpec(mels=80)

    @property
    def joined(self) -> int:  # type: ignore[override]
        return int(self.files.config.get("stack_factor", 8))

    def num_rows(self, frames: int) -> int:
        """A group that is not full is filled up, in each window."""
        window, group = self.window.piece // self.window.hop, 2 * self.joined
        whole, rest = divmod(frames, window)
        return whole * -(-window // group) + -(-rest // group)

    def prompt_ids(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Slots for what spells one; nothing is read across a special token."""
        encode, decode, slot = self.files.encode, self.files.decode, self.slot_ids["audio"]
        if not items.get("audio") or encode is None or decode is None:
            return ids
        out: list[int] = []
        for plain, run in groupby(ids, lambda token: token != slot and decode([token]) != ""):
            tokens = list(run)
            first, *others = decode(tokens).split(PLACEHOLDER) if plain else ("",)
            out += encode(first) if others else tokens
            for text in others:
                out += [slot, *encode(text)]
        return out

    def windows(self, samples: Tensor) -> list[Tensor]:
        spec = self.window
        frames = max(_LEAST, spec.frames(len(samples)))
        whole = F.pad(samples, (0, frames * spec.hop - len(samples)))
        return list(log_mel(whole, spec).split(spec.piece // spec.hop))
