"""Text to token ids and back, from a checkpoint's own files. Knows no family and no model; chat.py renders templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from ...mm.errors import CheckpointError, InputError
from ..files import read_json
from .token_bounds import TokenBounds, read_token_bounds, unknown_id

_REPLACEMENT = "\ufffd"  # what decoding writes for bytes that are no character, or not yet one


class _Backend(Protocol):
    """What a vocabulary file must answer; `plain` never yields a special id."""

    specials: dict[str, int]
    vocab_size: int

    def trusted(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def plain(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...
    def reach(self) -> TokenBounds: ...
    def vocabulary(self, end: int) -> object: ...


class Tokenizer:
    """The tokenizer of a checkpoint folder: `tokenizer.json`, or `tekken.json` through mistral-common.

    Args:
        path: the folder, or one of the two files.

    Raises:
        CheckpointError: neither file is there, or it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self._backend = _load(Path(path))
        self.specials = self._backend.specials  # text -> id
        self.all_special_ids = frozenset(self.specials.values())
        self.vocab_size = self._backend.vocab_size
        self.special_tokens = _named_specials(Path(path))  # "bos_token" -> text, and so on, for chat templates

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of trusted text: special tokens in it are recognised; `add_special_tokens` adds the checkpoint's own."""
        return self._backend.trusted(_utf8(text), add_special_tokens)

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of untrusted text: never a special token, whatever it spells."""
        return self._backend.plain(_utf8(text))

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Ids of pieces laid end to end, where a special token is recognised within a piece but never across two.

        Ordinary text is tokenised across the joints, so that one piece and many give the same ids. A piece of one
        character among several is text: there was no other way to cut it.
        """
        if len(pieces) == 1:
            ids = self.encode(pieces[0], add_special_tokens=False)
            if sum(map(self.is_special_token, ids)) == len(self._split.findall(pieces[0])):
                return ids  # otherwise a normaliser made a special token of text that does not spell one
        ids = []
        pending = ""
        for part, whole in ((part, part == piece) for piece in pieces for part in self._split.split(piece)):
            if part in self.specials and not (whole and len(part) == 1 and len(pieces) > 1):
                ids += [*self.encode_ordinary(pending), self.specials[part]]
                pending = ""
            else:
                pending += part
        return ids + self.encode_ordinary(pending)

    def remove_special_tokens(self, text: str) -> str:
        """A text that spells no special token: those that appear when others are taken out are taken out, too."""
        before = None
        while self.specials and before != text:
            before, text = text, "".join(part for part in self._split.split(text) if part not in self.specials)
        return text

    def min_tokens(self, text: str) -> int:
        """A lower bound on the length of any encoding of a text, in no time: its length over the longest token's.

        0 where none can be stated: for vocabularies that drop or join characters, such as unknown ones or whitespace.
        """
        return self._reach.min_tokens(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are no character become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """Id of one token's text, None where there is none."""
        return self._backend.token_to_id(token)

    def is_special_token(self, token_id: int) -> bool:
        return token_id in self.all_special_ids

    def grammar_vocabulary(self) -> tuple[Any, None, int]:
        """Arguments of llguidance's tokenizer: the vocabulary with its bytes, no other size, the token that ends a text."""
        end = self.specials.get(
            self.special_tokens.get("eos_token", ""), max(self.all_special_ids, default=self.vocab_size - 1)
        )
        return self._backend.vocabulary(end), None, end

    @cached_property
    def _reach(self) -> TokenBounds:
        return self._backend.reach()  # reads the whole vocabulary: not on load

    @cached_property
    def _split(self) -> re.Pattern[str]:
        return re.compile("(" + "|".join(map(re.escape, sorted(self.specials, key=len, reverse=True))) + ")")


class StreamDecoder:
    """Text of a growing list of ids, piece by piece: never half a character, and the pieces add up to the whole.

    Text is decoded from the last place where a character ended, with the token before it as context.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._decode: Callable[[Sequence[int]], str] = lambda ids: tokenizer.decode(ids, skip_special_tokens)
        self._ids: list[int] = []  # context, then what is not yet settled
        self._context = 0
        self._sent = 0  # characters of the decoded window that are out

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; an unfinished character is held back."""
        new_ids = list(ids)
        if not new_ids:
            return ""
        self._ids += new_ids
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT):
            return self._emit(text[:-1])
        new = self._emit(text)
        self._ids = self._ids[self._context :]
        self._context, self._sent = len(self._ids), len(self._decode(self._ids))
        return new

    def flush(self) -> str:
        """What was held back; the end of the stream."""
        return self._emit(self._decode(self._ids))

    def _emit(self, text: str) -> str:
        new, self._sent = text[self._sent :], max(self._sent, len(text))
        return new


class _Fast:
    """A tokenizer.json. Two instances: one recognises special tokens, the other takes them for text."""

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
        self._control = frozenset(self.specials.values())
        self.vocab_size = int(self._trusted.get_vocab_size())

    def trusted(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._trusted.encode(text, add_special_tokens=add_special_tokens).ids)

    def plain(self, text: str) -> list[int]:
        encoding = self._plain.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self._control.isdisjoint(ids) or self._control.isdisjoint(set(ids) - {self._unknown}):
            return ids
        # Some vocabularies, Unigram ones above all, hold their special tokens as words too: cut within.
        spelled = [
            span for number, span in zip(ids, encoding.offsets, strict=True) if number in self._control - {self._unknown}
        ]
        if any(end - start < 2 for start, end in spelled):
            raise InputError("the text holds a control token of one character, which this vocabulary cannot write as text")
        cuts = [0, *(start + 1 for start, _ in spelled), len(text)]
        return [number for start, end in pairwise(cuts) for number in self.plain(text[start:end])]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._trusted.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str) -> int | None:
        number = self._trusted.token_to_id(token)
        return None if number is None else int(number)

    def reach(self) -> TokenBounds:
        return read_token_bounds(self._trusted)

    def vocabulary(self, end: int) -> str:
        return str(self._trusted.to_str())

    @cached_property
    def _unknown(self) -> int | None:
        return unknown_id(self._trusted)


class _Tekken:
    """A tekken.json, whose text encoder knows no special tokens: trusted text is cut at them first."""

    def __init__(self, path: Path) -> None:
        try:
            from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
            from mistral_common.tokens.tokenizers.tekken import Tekkenizer
        except ImportError:
            raise CheckpointError("tekken.json needs mistral-common; pip install 'sensorium[mistral]'") from None
        self._tekken = Tekkenizer.from_file(path)
        self._policies = SpecialTokenPolicy
        ids = range(self._tekken.num_special_tokens)
        self.specials = {self._tekken.id_to_piece(number): number for number in ids}
        self.vocab_size = int(self._tekken.n_words)
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(self.specials, key=len, reverse=True))) + ")")

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

    def reach(self) -> TokenBounds:
        pieces = (self._tekken.id_to_byte_piece(number, self._policies.KEEP) for number in range(self.vocab_size))
        return TokenBounds(max(map(len, pieces)))  # a character is one byte at least

    def vocabulary(self, end: int) -> object:
        from llguidance import TokenizerWrapper

        pieces = [self._tekken.id_to_byte_piece(number, self._policies.KEEP) for number in range(self.vocab_size)]
        return TokenizerWrapper(_Pieces(pieces, end, tuple(self.specials.values()), self.plain))


@dataclass(frozen=True)
class _Pieces:
    """A vocabulary by the bytes of its tokens."""

    tokens: Sequence[bytes]
    eos_token_id: int
    special_token_ids: Sequence[int]
    encode: Callable[[str], list[int]]
    bos_token_id: None = None

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


def _utf8(text: str) -> str:
    """The text itself; InputError when it cannot be written as UTF-8 (half a surrogate pair)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the text holds half a character (a lone surrogate) at position {error.start}") from None
    return text


def _load(path: Path) -> _Backend:
    folder = path if path.is_dir() else path.parent
    file = (
        path if path.is_file() else next((f for f in (folder / "tokenizer.json", folder / "tekken.json") if f.is_file()), None)
    )
    if file is None:
        made = "; save one with transformers' AutoTokenizer" if (folder / "tokenizer_config.json").is_file() else ""
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
