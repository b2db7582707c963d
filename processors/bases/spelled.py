"""Base of families whose prompts spell placeholders as plain text, which some tokenizers of the family have as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .base import BaseProcessingInfo, replace_text


class SpelledPlaceholders(BaseProcessingInfo):
    """Replaces the placeholders' texts, and tokens with these texts, by the placeholders' own tokens.

    `spelled`: modality -> text.
    """

    spelled: Mapping[str, str] = {}

    @property
    def text_placeholders(self) -> Mapping[str, int]:  # type: ignore[override]
        return {self.spelled[name]: token for name, token in self.placeholder_ids.items() if self._known(name) is None}

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        for name, token in self.placeholder_ids.items():
            if not items.get(name):
                continue
            known = self._known(name)
            if known is None:
                ids = replace_text(ids, self.spelled[name], token, self.files)
            else:
                ids = [token if one == known else one for one in ids]
        return ids

    def _known(self, modality: str) -> int | None:
        """Return the tokenizer's own token for the text."""
        return None if self.files.token_to_id is None else self.files.token_to_id(self.spelled[modality])
