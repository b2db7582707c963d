"""Base of families whose prompts spell placeholders as plain text, which some tokenizers of the family have as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .base import BaseProcessingInfo, replace_text


class TextPlaceholders(BaseProcessingInfo):
    """Replaces the placeholders' texts, and tokens with these texts, by the placeholders' own tokens.

    `placeholder_texts`: modality -> text.
    """

    placeholder_texts: Mapping[str, str] = {}

    @property
    def text_placeholders(self) -> Mapping[str, int]:
        return {
            self.placeholder_texts[name]: token for name, token in self.placeholder_ids.items() if self._known(name) is None
        }

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        for name, token in self.placeholder_ids.items():
            if not items.get(name):
                continue
            written_id = self._known(name)
            if written_id is None:
                ids = replace_text(ids, self.placeholder_texts[name], token, self.files)
            else:
                ids = [token if token_id == written_id else token_id for token_id in ids]
        return ids

    def _known(self, modality: str) -> int | None:
        """Return the tokenizer's own token for the text."""
        return None if self.files.token_to_id is None else self.files.token_to_id(self.placeholder_texts[modality])
