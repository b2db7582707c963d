"""Tokenizers from a checkpoint's own files: text to token ids and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from ...callers.errors import ConfigError, check_utf8
from ...checkpoints.files import read_json
from ...mm.truncation import Truncation
from .token_bounds import TokenBounds
from .tokenizer_backends import FastBackend, load_backend, splitter
from .tokenizer_names import TransformersNames

_CHARACTERS_PER_TOKEN = 64  # far more than any text has on average
_WINDOW = 32  # ids that are decoded again while their text ends in an incomplete character
_MAX_CHARACTERS = 16 << 20  # characters of a rendered prompt
_REPLACEMENT = "\ufffd"  # decoded from bytes that are not, or not yet, a character


class Tokenizer(TransformersNames):
    """The tokenizer of a checkpoint folder: any of the files of `tokenizer_files`, or `tekken.json` through mistral-common.

    Args:
        path: the folder, or tokenizer.json or tekken.json in it.

    Raises:
        CheckpointError: the folder has no such file, or it cannot be read or converted.
    """

    def __init__(self, path: str | Path) -> None:
        self._backend = load_backend(Path(path))
        self.kind = self._backend.kind  # of its files, as in TokenizerFiles
        self.specials = self._backend.specials  # text -> id
        self.control = self._backend.control  # text -> id; `specials`, and added tokens that text alone cannot form
        self._control_ids = frozenset(self.control.values())
        self.all_special_ids = frozenset(self.specials.values())
        self.vocab_size = self._backend.vocab_size
        config = read_json(Path(path) / "tokenizer_config.json") if Path(path).is_dir() else {}
        self.padding_side = "left" if config.get("padding_side") == "left" else "right"
        self.truncation_side = "left" if config.get("truncation_side") == "left" else "right"
        self.model_max_length = config.get("model_max_length")  # transformers writes 1e30 if there is no limit
        self.special_tokens = self._backend.named  # "bos_token" -> text, and so on, for chat templates

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return ids of trusted text: special tokens in it are recognised; `add_special_tokens` adds the checkpoint's own."""
        return self._backend.trusted(check_utf8(text), add_special_tokens)

    def encode_truncated(self, text: str, cut: Truncation, add_special_tokens: bool = True) -> tuple[list[int], bool]:
        """Return the ids of a trusted text cut to `cut.max_tokens`, special tokens included, and whether it was cut.

        Of a long text, only as much is tokenised as is needed.
        """
        check_utf8(text)
        length = _CHARACTERS_PER_TOKEN * (cut.max_tokens + _CHARACTERS_PER_TOKEN)
        while length < len(text):  # a cut between words does not change the tokens of the words before it
            part = _cut_text(text, length, cut.side == "left")
            ids, is_cut = self._backend.truncated(part, cut, add_special_tokens)
            if is_cut:
                return ids, True
            length *= 4
        return self._backend.truncated(text, cut, add_special_tokens)

    def encode_pair(self, first: str, second: str, cut: Truncation | None = None) -> tuple[list[int], int, bool]:
        """Return the ids of a pair of trusted texts, how many of them precede the second text, and whether the pair was cut.

        `cut` limits the tokens of both texts together. It takes them from the longer text first, as transformers'
        "longest_first".

        Raises:
            ConfigError: the tokenizer cannot join two texts.
        """
        if not isinstance(self._backend, FastBackend):
            raise ConfigError("the tokenizer of this checkpoint cannot join two texts; use a cross-encoder's checkpoint")
        check_utf8(first)
        check_utf8(second)
        length = 0 if cut is None else _CHARACTERS_PER_TOKEN * (cut.max_tokens + _CHARACTERS_PER_TOKEN)
        if cut is not None and max(len(first), len(second)) > length:  # tokenise only as much as is needed
            from_left = cut.side == "left"
            encoded = self._backend.pair(_cut_text(first, length, from_left), _cut_text(second, length, from_left), cut)
            if encoded[2]:
                return encoded
        return self._backend.pair(first, second, cut)

    def lower_case(self) -> None:
        """Lower-case all texts before anything else is done to them. Do nothing if the tokenizer lower-cases already."""
        self._backend.lower_case()

    def encode_ordinary(self, text: str) -> list[int]:
        """Return ids of untrusted text: never a control token, whatever it spells."""
        return self._backend.plain(check_utf8(text))

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], placeholders: Mapping[str, int] = {}) -> list[int]:
        """Return ids of concatenated pieces `(text, trusted)`.

        Control tokens, and `placeholders` (text -> id), are recognised in trusted text. Adjacent trusted pieces are one.
        All other text is tokenised across pieces, so its ids do not depend on where it was cut.
        """
        control = {**self.control, **placeholders}
        split = splitter(control) if placeholders else self._split
        runs = [("".join(text for text, _ in run), trusted) for trusted, run in groupby(pieces, lambda piece: piece[1])]
        parts = [
            (part, trusted and part in control) for text, trusted in runs for part in (split.split(text) if trusted else [text])
        ]
        controls = [part for part, is_control in parts if is_control]
        text = "".join(text for text, _ in runs)
        if not placeholders and controls == split.findall(text):
            ids = self.encode(text, add_special_tokens=False)
            if [number for number in ids if number in self._control_ids] == [control[part] for part in controls]:
                return ids  # otherwise the normaliser turned ordinary text into a control token
        ids = []
        for is_control, run in groupby(parts, lambda part: part[1]):
            texts = [text for text, _ in run]
            ids += [control[text] for text in texts] if is_control else self.encode_ordinary("".join(texts))
        return ids

    def add_special_tokens(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a rendered chat with the tokens that the checkpoint's tokenizer puts around a text.

        Ids that start with BOS are returned as they are, as by transformers' processors.
        """
        before, after = self._around
        bos = self.control.get(self.special_tokens.get("bos_token", ""))
        return list(ids) if bos is not None and list(ids[:1]) == [bos] else [*before, *ids, *after]

    def reset_special_tokens(self, texts: Iterable[str]) -> None:
        """Make added tokens special, without flags such as `lstrip`. Those that the tokenizer lacks are left out."""
        added = [text for text in texts if text in self.control]
        if added:
            self._backend.reset(added)
            self.specials = self._backend.specials
            self.all_special_ids = frozenset(self.specials.values())
            for name in ("joining_ids", "splitting_ids"):
                self.__dict__.pop(name, None)

    def remove_special_tokens(self, text: str) -> str:
        """Remove special tokens from a text, including those that form when others are removed."""
        return _remove(text, self.specials)

    def max_characters(self, num_tokens: int | None) -> int:
        """Return a limit on the characters of a text of `num_tokens` tokens, from the longest token's length: 1 to 16 Mi."""
        longest = self._token_bounds.characters
        if num_tokens is None or longest is None:
            return _MAX_CHARACTERS
        return min(max(num_tokens * longest, 1 << 20), _MAX_CHARACTERS)

    def min_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of a text without encoding it, from the longest token's length.

        0 for vocabularies that drop or merge characters, which have no such bound.
        """
        return self._token_bounds.min_tokens(text)

    def stream_decoder(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """Return an incremental detokenizer."""
        return StreamDecoder(self, skip_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; invalid bytes become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token, which may be a part of a character."""
        text = self.decode([token_id], skip_special_tokens=False)
        return text.encode() if _REPLACEMENT not in text else self._backend.token_bytes(token_id) or text.encode()

    def token_to_id(self, token: str) -> int | None:
        """Return the id of the token with this text, or None."""
        return self._backend.token_to_id(token)

    def is_special_token(self, token_id: int) -> bool:
        return token_id in self.all_special_ids

    def grammar_vocabulary(self) -> tuple[Any, None, int]:
        """Return arguments of llguidance's tokenizer: vocabulary, vocabulary size (None: its own), end-of-text token."""
        end = self.specials.get(
            self.special_tokens.get("eos_token", ""), max(self.all_special_ids, default=self.vocab_size - 1)
        )
        return self._backend.vocabulary(end), None, end

    @cached_property
    def splitting_ids(self) -> frozenset[int]:
        """Added tokens at which a text is cut, whatever is beside them: each side is tokenised by itself."""
        return frozenset(self.control.values()) - self.joining_ids

    @cached_property
    def joining_ids(self) -> frozenset[int]:
        """Added tokens that absorb whitespace beside them, or are recognised depending on what is beside them."""
        return self._backend.joining

    @cached_property
    def _token_bounds(self) -> TokenBounds:
        return self._backend.token_bounds()  # not on load: it reads the whole vocabulary

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Ids that `encode` adds before and after a text."""
        inner, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        added = len(whole) - len(inner)
        start = next(position for position in range(added + 1) if whole[position : position + len(inner)] == inner)
        return whole[:start], whole[start + len(inner) :]

    @cached_property
    def _split(self) -> re.Pattern[str]:
        return splitter(self.control)


class StreamDecoder:
    """Incremental detokenizer: the pieces never split a character and concatenate to the whole text.

    Decoding starts at the last place where a character ended, with the tokens before it as context.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._decode: Callable[[Sequence[int]], str] = lambda ids: tokenizer.decode(ids, skip_special_tokens)
        self._ids: list[int] = []  # context, then ids whose text is incomplete
        self._context = 0
        self._sent = 0  # characters of their text that were returned

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that these ids complete; an incomplete character is held back."""
        new_ids = list(ids)
        if not new_ids:
            return ""
        self._ids += new_ids
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT):
            new = self._emit(text[:-1])
            return new + self._shorten(text) if len(self._ids) - self._context > 2 * _WINDOW else new
        new = self._emit(text)
        if not new and not self._decode(new_ids * 2):  # no context: decoders drop one space at the start of the visible text
            del self._ids[-len(new_ids) :]
            return ""
        self._ids = self._ids[self._context :]
        self._context, self._sent = len(self._ids), len(self._decode(self._ids))
        return new

    def _shorten(self, text: str) -> str:
        """Drop the first of many ids whose text stays incomplete: a character has at most four bytes."""
        tail = self._decode(self._ids[-_WINDOW:])
        new = "" if tail.endswith(_REPLACEMENT) and len(tail) > _WINDOW // 4 else self._emit(text)
        self._ids, self._context, self._sent = self._ids[-_WINDOW:], 0, len(tail) - (not new)
        return new

    def flush(self) -> str:
        """Return what was held back, at the end of the stream."""
        return self._emit(self._decode(self._ids))

    def _emit(self, text: str) -> str:
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return new


def _cut_text(text: str, length: int, from_left: bool) -> str:
    """Return the first or last characters of a text, at most `length`, without a word that the cut divides."""
    if len(text) <= length:
        return text
    if from_left:
        part = text[-length:]
        words = part.split(None, 1)
        return words[1] if len(words) == 2 else part
    part = text[:length]
    words = part.rsplit(None, 1)
    return words[0] if len(words) == 2 else part


def _remove(text: str, literals: Collection[str]) -> str:
    """Remove literals from a text in one pass, including those that form when others are removed."""
    if not literals:
        return text
    lengths = {
        end: sorted({len(literal) for literal in literals if literal[-1] == end}, reverse=True)
        for end in {literal[-1] for literal in literals}
    }
    kept: list[str] = []
    for char in "".join(part for part in splitter(literals).split(text) if part not in literals):
        kept.append(char)
        count = next((n for n in lengths.get(char, ()) if n <= len(kept) and "".join(kept[-n:]) in literals), 0)
        del kept[len(kept) - count :]
    return "".join(kept)
