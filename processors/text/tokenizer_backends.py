"""The two kinds of tokenizers: of the `tokenizers` library, and tekken.json through mistral-common."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from ...callers.errors import CheckpointError, ConfigError, InputError, SensoriumError
from ...checkpoints.files import read_json
from ...checkpoints.gguf.reader import SUFFIX
from ...checkpoints.tokenizers.byte_level import LETTER_BYTES
from ...checkpoints.tokenizers.files import TokenizerFiles, find_files, read_named
from ...mm.truncation import Truncation, pair_lengths
from .token_bounds import TokenBounds, read_state, read_token_bounds, unknown_id

_EMPTY = json.dumps({"model": {"type": "WordLevel", "vocab": {"<none>": 0, "<item>": 1}, "unk_token": "<none>"}}).encode()


_EDGE = "<edge>"  # around the characters of a prompt, and any that is unknown
_CHARACTERS = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}


def load_backend(path: Path) -> FastBackend | TekkenBackend:
    """Load the tokenizer of a folder, or of a file in it. CheckpointError if there is none, or it cannot be read."""
    folder = path.parent if path.is_file() and path.suffix != SUFFIX else path
    tekken = path if path.is_file() and "tekken" in path.name else folder / "tekken.json"
    try:
        if tekken == path or (tekken.is_file() and not (folder / "tokenizer.json").is_file()):
            return TekkenBackend(tekken)
        files = find_files(folder)
    except SensoriumError:
        raise
    except Exception as error:  # of mistral-common, or of a value of the wrong type
        raise CheckpointError(f"the tokenizer of {str(folder)!r} cannot be read ({error})") from None
    content = _of_config(read_json(folder / "config.json")) if files is None else None
    if content is not None:
        files = TokenizerFiles("tokenizer.json", {"tokenizer.json": content}, {}, {}, {}, ())
    if files is None:
        raise CheckpointError(
            f"no tokenizer.json, tekken.json, tokenizer.model, spiece.model, tiktoken.model, *.tiktoken, or vocab.json with "
            f"merges.txt in {str(folder)!r}; download it as well"
        )
    try:
        return FastBackend(files)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises bare Exception on a broken file
        raise CheckpointError(f"{' and '.join(files.vocabulary)} cannot be read ({error}); download it again") from None


def _of_config(config: Mapping[str, Any]) -> bytes | None:
    """Return the tokenizer.json of a model that has none: of a model of tensors, or of one whose tokens are characters."""
    if "pretrained_cfg" in config:  # see mm.raw_tensors
        return _EMPTY
    vocab = config.get("vocab")
    if not isinstance(vocab, Mapping) or not all(len(character) == 1 for character in vocab):
        return None
    model = {"type": "WordLevel", "vocab": {**vocab, _EDGE: 0}, "unk_token": _EDGE}
    return json.dumps({"model": model, "pre_tokenizer": _CHARACTERS}).encode()


def splitter(specials: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern whose `split` cuts a text at special tokens and keeps them."""
    return re.compile("(" + "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) + ")")


class FastBackend:
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
        self.joining = frozenset(
            int(number)
            for number, token in added.items()
            if token.lstrip or token.rstrip or token.single_word or token.normalized
        )
        self._plain.add_special_tokens([added[number] for number in self._control])  # `encode_special_tokens` is for these
        self.vocab_size = int(self._trusted.get_vocab_size())
        falls_back = "ByteFallback" in json.dumps(read_state(self._trusted.decoder))
        self._bytes = {vocab[name]: byte for byte in range(256) if falls_back and (name := f"<0x{byte:02X}>") in vocab}

    def reset(self, texts: Sequence[str]) -> None:
        from tokenizers import AddedToken

        for tokenizer in (self._trusted, self._plain):
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
        self.specials |= {text: self.control[text] for text in texts}
        self.joining -= {self.control[text] for text in texts}

    def trusted(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._trusted.encode(text, add_special_tokens=add_special_tokens).ids)

    def truncated(self, text: str, cut: Truncation, add_special_tokens: bool) -> tuple[list[int], bool]:
        content = self._trusted.encode(text, add_special_tokens=False)
        special = self._trusted.num_special_tokens_to_add(False) if add_special_tokens else 0
        room = max(0, cut.max_tokens - special)
        is_cut = len(content.ids) > room
        if is_cut:
            content.truncate(room, direction=cut.side)
        whole = self._trusted.post_process(content, None, True) if add_special_tokens else content
        ids = list(whole.ids)
        return ids[: cut.max_tokens], is_cut

    def pair(self, first: str, second: str, cut: Truncation | None = None) -> tuple[list[int], int, bool]:
        joined, is_cut = self._trusted.encode(first, second), False
        if cut is not None and len(joined.ids) > cut.max_tokens:
            is_cut = True
            parts = [self._trusted.encode(text, add_special_tokens=False) for text in (first, second)]
            room = max(0, cut.max_tokens - self._trusted.num_special_tokens_to_add(True))
            lengths = pair_lengths(len(parts[0].ids), len(parts[1].ids), room)
            for part, tokens in zip(parts, lengths, strict=True):
                part.truncate(tokens, direction=cut.side)
            joined = self._trusted.post_process(*parts, True)
        ids = list(joined.ids)
        return ids, next((position for position, kind in enumerate(joined.type_ids) if kind), len(ids)), is_cut

    def lower_case(self) -> None:
        from tokenizers.normalizers import Lowercase, Sequence

        for tokenizer in (self._trusted, self._plain):
            normalizer = tokenizer.normalizer
            state = "" if normalizer is None else json.dumps(read_state(normalizer))
            if '"Lowercase"' not in state and '"lowercase": true' not in state:
                tokenizer.normalizer = Sequence([Lowercase(), *([] if normalizer is None else [normalizer])])

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

    def vocabulary(self, end: int) -> object:
        """Return the vocabulary for llguidance, whose own encoder would take the text of a special token for the token."""
        from llguidance import LLTokenizer, TokenizerWrapper

        inner = LLTokenizer(str(self._trusted.to_str()), None, end, slices=[])
        special = frozenset(filter(inner.is_special_token, range(inner.vocab_size)))

        def encode(text: str) -> list[int]:
            ids = inner.tokenize_str(text)
            return ids if special.isdisjoint(ids) else inner.greedy_tokenize(text)  # which knows no special tokens

        pieces = [inner.decode_bytes([number]) for number in range(inner.vocab_size)]
        return TokenizerWrapper(_Pieces(pieces, end, sorted(special), encode))

    @cached_property
    def _unknown(self) -> int | None:
        return unknown_id(self._trusted)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.specials.values())


class TekkenBackend:
    """A tekken.json. Its encoder does not recognise special tokens, so trusted text is split at them first."""

    kind = "tekken.json"
    joining = frozenset[int]()

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
        self._split = splitter(self.specials)
        config = read_json(path.parent / "special_tokens_map.json") | read_json(path.parent / "tokenizer_config.json")
        self.named = read_named(config)

    def reset(self, texts: Sequence[str]) -> None:
        """Do nothing: its special tokens have no flags."""

    def trusted(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = [int(self._tekken.bos_id)] if add_special_tokens else []
        for part in self._split.split(text):
            ids += [self.specials[part]] if part in self.specials else self.plain(part)
        return ids

    def truncated(self, text: str, cut: Truncation, add_special_tokens: bool) -> tuple[list[int], bool]:
        start, content = [int(self._tekken.bos_id)] if add_special_tokens else [], self.trusted(text, False)
        kept = cut.apply(content, max(0, cut.max_tokens - len(start)))
        return (start + kept)[: cut.max_tokens], len(kept) < len(content)

    def lower_case(self) -> None:
        raise ConfigError("do_lower_case is not supported with tekken.json")

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
