"""Base of audio families whose items stand between a start and an end token, which prompts may omit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .audio import AudioInfo
from .base import add_brackets
from .speech import SpeechMixin

AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"


class BracketedAudioInfo(AudioInfo, SpeechMixin):
    """An AudioInfo with Qwen2-Audio's tokens. Prompts get the start and end token where both are absent, as published."""

    rewrites_prompts = True
    placeholders: Mapping[str, tuple[str | int, ...]] = {"audio": ("audio_token_id", "audio_token_index", 151646)}
    brackets: tuple[int | None, int | None] = (None, None)

    def resolve_token_ids(self) -> None:
        token_id = self.files.token_to_id
        if token_id is not None:
            self.brackets = token_id("<|audio_bos|>"), token_id("<|audio_eos|>")

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return add_brackets(ids, self.placeholder_ids["audio"], items.get("audio", 0), *self.brackets)

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return self.preprocess_prompt(ids, items)
