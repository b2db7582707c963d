"""Tokenizers from a checkpoint's own files: text to token ids and back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from ...mm.errors import CheckpointError, ConfigError, InputError, SensoriumError, check_utf8
from ...mm.gguf import SUFFIX
from ..files import read_json
from .byte_level import LETTER_BYTES
from .token_bounds import TokenBounds, read_state, read_token_bounds, unknown_id
from .tokenizer_files import TokenizerFiles, find_files, read_named
from .tokenizer_names import TransformersNames

_WINDOW = 32  # ids that are decoded again while their text ends in an incomplete character
_MAX_CHARACTERS = 16 << 20  # characters of a rendered prompt
_EMPTY = json.dumps({"model": {"type": "WordLevel", "vocab": {"<none>": 0, "<item>": 1}, "unk_token": "<none>"}}).encode()
_REPLACEMENT = "\ufffd"  # decoded from bytes that are not, or not yet, a character


class Tokenizer(TransformersNames):
    """The tokenizer of a checkpoint folder: any of the files of `tokenizer_files`, or `tekken.json` through mistral-common.

    Args:
        path: the folder, or tokenizer.json or tekken.json in it.

    Raises:
        CheckpointError: the folder has no such file, or it cannot be read or converted.
    """

    def __init__(self, path: str | Path) -> None:
        self._backend = _load(Path(path))
        self.kind = self._backend.kind  # of its files, as in TokenizerFiles
        self.specials = self._backend.specials  # text -> id
        self.control = self._backend.control  # text -> id; `specials`, and added tokens that text alone cannot form
        self._control_ids = frozenset(self.control.values())
        self.all_special_ids = frozenset(self.specials.values())
        self.vocab_size = self._backend.vocab_size
        config = read_json(Path(path) / "tokenizer_config.json") if Path(path).is_dir() else {}
        self.padding_side = "left" if config.get("padding_side") == "left" else "right"
        self.special_tokens = self._backend.named  # "bos_token" -> text, and so on, for chat templates

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return ids of trusted text: special tokens in it are recognised; `add_special_tokens` adds the checkpoint's own."""
        return self._backend.trusted(check_utf8(text), add_special_tokens)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the ids of a pair of trusted texts, and how many tokens come before those of type 1, the second text's.

        Raises:
            ConfigError: the tokenizer cannot join two texts.
        """
        if not isinstance(self._backend, _Fast):
            raise ConfigError("the tokenizer of this checkpoint cannot join two texts; use a cross-encoder's checkpoint")
        return self._backend.pair(check_utf8(first), check_utf8(second))

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

    def add_special_tokens(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a rendered chat with the tokens that the checkpoint's tokenizer puts around a text.

        Ids that start with BOS are returned as they are, as by transformers' processors.
        """
        before, after = self._around
        bos = self.control.get(self.special_tokens.get("bos_token", ""))
        return list(ids) if bos is not None and list(ids[:1]) == [bos] else [*before, *ids, *after]

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
    def _token_bounds(self) -> TokenBounds:
        return self._backend.token_bounds()  # not on load: it reads the whole vocabulary

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Ids that `encode` adds before and after a text."""
        inner, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        added = len(whole) - len(inner)
        start = next(place for place in range(added + 1) if whole[place : place + len(inner)] == inner)
        return whole[:start], whole[start + len(inner) :]

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


class _Fast:
    """A tokenizer of the `tokenizers` library, loaded twice: one recognises special tokens, the other treats them as text."""

    _trusted: Any
    _plain: Any

    def __init__(self, files: TokenizerFiles) -> None:
        self.kind, self.named = files.kind, files.named
        self._trusted, self._plain = files.load(), files.load()
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
        falls_back = "ByteFallback" in json.dumps(read_state(self._trusted.decoder))
        self._bytes = {vocab[name]: byte for byte in range(256) if falls_back and (name := f"<0x{byte:02X}>") in vocab}

    def trusted(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._trusted.encode(text, add_special_tokens=add_special_tokens).ids)

    def pair(self, first: str, second: str) -> tuple[list[int], int]:
        joined = self._trusted.encode(first, second)
        return list(joined.ids), next((place for place, kind in enumerate(joined.type_ids) if kind), len(joined.ids))

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
        if self._bytes.keys().isdisjoint(ids):
            return str(self._trusted.decode(list(ids), skip_special_tokens=skip_special_tokens))
        # the library gives U+FFFD for every byte of a run that has one invalid byte, or a character that is not complete yet
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        shown, texts = [number for number in ids if number not in skipped], list[str]()
        for is_byte, run in groupby(shown, self._bytes.__contains__):
            numbers = list(run)
            if is_byte:
                texts.append(bytes(self._bytes[number] for number in numbers).decode("utf-8", "replace"))
            else:
                texts += [text for text in map(self._trusted.id_to_token, numbers) if text is not None]
        return str(self._trusted.decoder.decode(texts))

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a byte token, or of a token of a byte-level vocabulary; None for other tokens."""
        if token_id in self._bytes:
            return bytes([self._bytes[token_id]])
        letters = [LETTER_BYTES.get(letter) for letter in self._trusted.id_to_token(token_id) or ""]
        return None if None in letters else bytes(byte for byte in letters if byte is not None)

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

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.specials.values())


class _Tekken:
    """A tekken.json. Its encoder does not recognise special tokens, so trusted text is split at them first."""

    kind = "tekken.json"

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
        config = read_json(path.parent / "special_tokens_map.json") | read_json(path.parent / "tokenizer_config.json")
        self.named = read_named(config)

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

    def token_bytes(self, token_id: int) -> bytes:
        return bytes(self._tekken.id_to_byte_piece(token_id, self._policies.KEEP))

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
    folder = path.parent if path.is_file() and path.suffix != SUFFIX else path
    tekken = path if path.is_file() and "tekken" in path.name else folder / "tekken.json"
    try:
        if tekken == path or (tekken.is_file() and not (folder / "tokenizer.json").is_file()):
            return _Tekken(tekken)
        files = find_files(folder)
    except SensoriumError:
        raise
    except Exception as error:  # of mistral-common, or of a value of the wrong type
        raise CheckpointError(f"the tokenizer of {str(folder)!r} cannot be read ({error})") from None
    if files is None and "pretrained_cfg" in read_json(folder / "config.json"):  # a model of tensors, see mm.raw_tensors
        files = TokenizerFiles("tokenizer.json", {"tokenizer.json": _EMPTY}, {}, {}, {}, ())
    if files is None:
        raise CheckpointError(
            f"no tokenizer.json, tekken.json, tokenizer.model, spiece.model, tiktoken.model, *.tiktoken, or vocab.json with "
            f"merges.txt in {str(folder)!r}; download it as well"
        )
    try:
        return _Fast(files)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises bare Exception on a broken file
        raise CheckpointError(f"{' and '.join(files.vocabulary)} cannot be read ({error}); download it again") from None
