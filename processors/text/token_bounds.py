"""Lower bounds on the number of tokens of a text, from the longest token of a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Normaliser -> the most characters that it merges to one. Canonical decompositions have at most four (UAX #15). Normalisers
# that may drop characters (Strip, StripAccents, Nmt, BertNormalizer, Precompiled) are not listed: they give no bound.
_SHRINK = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_KEEPING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")  # pre-tokenizers that drop no character


@dataclass(frozen=True)
class TokenBounds:
    """The largest number of characters that one token covers; None: no bound.

    `greedy`: tokens that absorb whitespace around them; a text that contains one has no bound.
    """

    characters: int | None
    greedy: tuple[str, ...] = ()

    def min_tokens(self, text: str) -> int:
        """Return a lower bound on the tokens of a text, 0 if there is none. Does not copy the text."""
        if self.characters is None or any(literal in text for literal in self.greedy):
            return 0
        return -(-len(text) // self.characters)


def read_token_bounds(tokenizer: Any) -> TokenBounds:
    """Return the bounds of a `tokenizers.Tokenizer`.

    A token of a byte-level vocabulary has one letter per byte, so its length bounds its characters too.
    """
    normalizer, splitter = read_state(tokenizer.normalizer), read_state(tokenizer.pre_tokenizer)
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder().values()
    greedy = [token for token in added if token.lstrip or token.rstrip]
    shrink = _shrink(normalizer)
    level = any("ByteLevel" in _kinds(part) for part in (normalizer, splitter))
    if shrink is None or not _keeps(splitter) or not _complete(tokenizer.model, vocab, level):
        return TokenBounds(None)
    if any(token.normalized for token in greedy):
        return TokenBounds(None)
    normalise = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    longest = [max(len(token.content), len(normalise(token.content))) for token in added]
    return TokenBounds(max([1, *map(len, vocab), *longest]) * shrink, tuple(token.content for token in greedy))


def unknown_id(tokenizer: Any) -> int | None:
    """Return the id of the unknown token, or None."""
    state = read_state(tokenizer.model)
    name = state.get("unk_token")
    number = state.get("unk_id") if name is None else tokenizer.token_to_id(name)
    return None if number is None else int(number)


def read_state(component: Any) -> Mapping[str, Any]:
    """Return the JSON of a part of a `tokenizers.Tokenizer`; empty for None."""
    return {} if component is None else json.loads(component.__getstate__())


def _kinds(part: Mapping[str, Any]) -> list[str]:
    return [part.get("type", ""), *(kind for inner in _parts(part) for kind in _kinds(inner))]


def _parts(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*part.get("normalizers", ()), *part.get("pretokenizers", ())]


def _shrink(normalizer: Mapping[str, Any]) -> int | None:
    """Return the most characters that the normaliser merges to one; None: no bound."""
    if not normalizer:
        return 1
    if normalizer["type"] == "Sequence":
        product = 1
        for factor in map(_shrink, normalizer["normalizers"]):
            if factor is None:
                return None
            product *= factor
        return product
    if normalizer["type"] == "Replace":
        pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
        return -(-len(pattern) // len(content)) if pattern and content else None
    return _SHRINK.get(normalizer["type"])


def _keeps(splitter: Mapping[str, Any]) -> bool:
    """Return whether every character reaches the model."""
    if not splitter or splitter["type"] in _KEEPING:
        return True
    if splitter["type"] == "Sequence":
        return all(map(_keeps, splitter["pretokenizers"]))
    return splitter["type"] in ("Split", "Punctuation") and splitter["behavior"] != "Removed"


def _complete(model: Any, vocab: Mapping[str, int], byte_level: bool) -> bool:
    """Return whether the model drops no character and never merges several into one unknown token."""
    kind = type(model).__name__
    if kind not in ("BPE", "Unigram") or (kind == "BPE" and (model.continuing_subword_prefix or model.end_of_word_suffix)):
        return False
    if byte_level:
        from tokenizers.pre_tokenizers import ByteLevel

        return all(letter in vocab for letter in ByteLevel.alphabet())
    if kind == "BPE" and model.unk_token in vocab and not model.fuse_unk:
        return True
    return bool(read_state(model)["byte_fallback"]) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
