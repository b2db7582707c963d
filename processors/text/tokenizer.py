"""Tokenizers from a checkpoint's own files: text to token ids and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from ...mm.errors import CheckpointError, InputError, check_utf8
from ..files import read_json
from .token_bounds import TokenBounds, read_token_bounds, unknown_id

_WINDOW = 32  # ids that are decoded again while their text ends in an incomplete character
_MAX_CHARACTERS = 16 << 20  # characters of a rendered prompt
_REPLACEMENT = "\ufffd"  # decoded from bytes that are not, or not yet, a character


class Tokenizer:
    """The tokenizer of a checkpoint folder: `tokenizer.json`, or `tekken.json` through mistral-common.

    Args:
        path: the folder, or one of the two files.

    Raises:
        CheckpointError: neither file exists, or it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self._backend = _load(Path(path))
        self.specials = self._backend.specials  # text -> id
        self.control = self._backend.control  # text -> id; `specials`, and added tokens that text alone cannot form
        self._control_ids = frozenset(self.control.values())
        self.all_special_ids = frozenset(self.specials.values())
        self.vocab_size = self._backend.vocab_size
        self.special_tokens = _named_specials(Path(path))  # "bos_token" -> text, and so on, for chat templates

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return ids of trusted text: special tokens in it are recognised; `add_special_tokens` adds the checkpoint's own."""
        return self._backend.trusted(check_utf8(text), add_special_tokens)

    def encode_ordinary(self, text: str) -> list[int]:
        """Return ids of untrusted text: never a control token, whatever it spells."""
        return self._backend.plain(check_utf8(text))

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], placeholders: Mapping[str, int] = {}) -> list[int]:
        """Return ids of concatenated pieces `(text, trusted)`.

        Control tokens, and `placeholders` (text -> id), are recognised in trusted text. Adjacent trusted pieces are one.
        All other text is tokenised across pieces, so its ids do not depend on where it was cut.
        """
        control = {**self.control, **placeholders}
        split = _splitter(control) if placeholders else self._split
        runs = [("".join(text for text, _ in run), trusted) for trusted, run in groupby(pieces, lambda piece: piece[1])]
        parts = [
            (part, trusted and part in control) for text, trusted in runs for part in (split.split(text) if trusted else [text])
        ]
        found = [part for part, is_control in parts if is_control]
        text = "".join(text for text, _ in runs)
        if not placeholders and found == split.findall(text):
            ids = self.encode(text, add_special_tokens=False)
            if [number for number in ids if number in self._control_ids] == [control[part] for part in found]:
                return ids  # otherwise the normaliser turned ordinary text into a control token
        ids = []
        for is_control, run in groupby(parts, lambda part: part[1]):
            texts = [text for text, _ in run]
            ids += [control[text] for text in texts] if is_control else self.encode_ordinary("".join(texts))
        return ids

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

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; invalid bytes become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens)

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
    def _token_bounds(self) -> TokenBounds:
        return self._backend.token_bounds()  # not on load: it reads the whole vocabulary

    @cached_property
    def _split(self) -> re.Pattern[str]:
        return _splitter(self.control)


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


class _Fast:
    """A tokenizer.json, loaded twice: one instance recognises special tokens, the other treats them as text."""

    _trusted: Any
    _plain: Any

    def __init__(self, path: Path) -> None:
        import tokenizers

        load: Any = tokenizers.Tokenizer
        source = path.read_text("utf-8")
        self._trusted, self._plain = load.from_str(source), load.from_str(source)
        for tokenizer in (self._trusted, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._plain.encode_special_tokens = True
        added = self._trusted.get_added_tokens_decoder()
        self.specials = {token.content: int(number) for number, token in added.items() if token.special}
        vocab = self._trusted.get_vocab(with_added_tokens=False)
        self.control = {
            token.content: number
            for number, token in added.items()
            if token.special
            or (token.content not in vocab and token.content.replace("\u2581", " ").strip())  # runs of spaces are text
        }
        self._control = frozenset(self.control.values())
        self._plain.add_special_tokens([added[number] for number in self._control])  # `encode_special_tokens` is for these
        self.vocab_size = int(self._trusted.get_vocab_size())

    def trusted(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._trusted.encode(text, add_special_tokens=add_special_tokens).ids)

    def plain(self, text: str) -> list[int]:
        encoding = self._plain.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self._control.isdisjoint(ids) or self._control.isdisjoint(set(ids) - {self._unknown}):
            return ids
        # some vocabularies, mostly Unigram, also have their special tokens as words: cut the text inside them
        spelled = [
            span for number, span in zip(ids, encoding.offsets, strict=True) if number in self._control - {self._unknown}
        ]
        if any(end - start < 2 for start, end in spelled):
            raise InputError("the text contains a one-character control token, which cannot be encoded as text; remove it")
        cuts = [0, *(start + 1 for start, _ in spelled), len(text)]
        return [number for start, end in pairwise(cuts) for number in self.plain(text[start:end])]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._trusted.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str) -> int | None:
        number = self._trusted.token_to_id(token)
        return None if number is None else int(number)

    def token_bounds(self) -> TokenBounds:
        return read_token_bounds(self._trusted)

    def vocabulary(self, end: int) -> str:
        return str(self._trusted.to_str())

    @cached_property
    def _unknown(self) -> int | None:
        return unknown_id(self._trusted)


class _Tekken:
    """A tekken.json. Its encoder does not recognise special tokens, so trusted text is split at them first."""

    def __init__(self, path: Path) -> None:
        try:
            from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
            from mistral_common.tokens.tokenizers.tekken import Tekkenizer
        except ImportError:
            raise CheckpointError("tekken.json needs mistral-common; pip install 'sensorium[mistral]'") from None
        self._tekken = Tekkenizer.from_file(path)
        self._policies = SpecialTokenPolicy
        ids = range(self._tekken.num_special_tokens)
        self.specials = self.control = {self._tekken.id_to_piece(number): number for number in ids}
        self.vocab_size = int(self._tekken.n_words)
        self._split = _splitter(self.specials)

    def trusted(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = [int(self._tekken.bos_id)] if add_special_tokens else []
        for part in self._split.split(text):
            ids += [self.specials[part]] if part in self.specials else self.plain(part)
        return ids

    def plain(self, text: str) -> list[int]:
        return list(self._tekken.encode(text, bos=False, eos=False)) if text else []

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        policy = self._policies.IGNORE if skip_special_tokens else self._policies.KEEP
        return str(self._tekken.decode(list(ids), special_token_policy=policy))

    def token_to_id(self, token: str) -> int | None:
        if token in self.specials:
            return self.specials[token]
        ids = self.plain(token)
        return ids[0] if len(ids) == 1 else None

    def token_bounds(self) -> TokenBounds:
        pieces = (self._tekken.id_to_byte_piece(number, self._policies.KEEP) for number in range(self.vocab_size))
        return TokenBounds(max(map(len, pieces)))  # a character has at least one byte

    def vocabulary(self, end: int) -> object:
        from llguidance import TokenizerWrapper

        pieces = [self._tekken.id_to_byte_piece(number, self._policies.KEEP) for number in range(self.vocab_size)]
        return TokenizerWrapper(_Pieces(pieces, end, tuple(self.specials.values()), self.plain))


@dataclass(frozen=True)
class _Pieces:
    """The tokenizer object that llguidance expects: the vocabulary as bytes, and an encoder."""

    tokens: Sequence[bytes]
    eos_token_id: int
    special_token_ids: Sequence[int]
    encode: Callable[[str], list[int]]
    bos_token_id: None = None

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


def _remove(text: str, literals: Collection[str]) -> str:
    """Remove literals from a text in one pass, including those that form when others are removed."""
    if not literals:
        return text
    lengths = {
        end: sorted({len(one) for one in literals if one[-1] == end}, reverse=True) for end in {one[-1] for one in literals}
    }
    kept: list[str] = []
    for char in "".join(part for part in _splitter(literals).split(text) if part not in literals):
        kept.append(char)
        count = next((n for n in lengths.get(char, ()) if n <= len(kept) and "".join(kept[-n:]) in literals), 0)
        del kept[len(kept) - count :]
    return "".join(kept)


def _splitter(specials: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern whose `split` cuts a text at special tokens and keeps them."""
    return re.compile("(" + "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) + ")")


def _load(path: Path) -> _Fast | _Tekken:
    folder = path if path.is_dir() else path.parent
    file = (
        path if path.is_file() else next((f for f in (folder / "tokenizer.json", folder / "tekken.json") if f.is_file()), None)
    )
    if file is None:
        made = "; save tokenizer.json with transformers' AutoTokenizer" if (folder / "tokenizer_config.json").is_file() else ""
        raise CheckpointError(f"no tokenizer.json or tekken.json in {str(path)!r}{made}")
    try:
        return _Tekken(file) if "tekken" in file.name else _Fast(file)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises bare Exception on a broken file
        raise CheckpointError(f"{file.name} cannot be read ({error})") from None


def _named_specials(path: Path) -> dict[str, str]:
    folder = path if path.is_dir() else path.parent
    merged = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in merged.items()}
    return {key: value for key, value in named.items() if key.endswith("_token") and isinstance(value, str)}
