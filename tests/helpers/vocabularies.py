"""Tokenizer files as publishers ship them, written from small trained vocabularies, and plain reference tokenisers."""

from __future__ import annotations

import base64
import json
import os
import random
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTES = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
Piece = tuple[str, float, int]


def trained_text() -> list[str]:
    return [Path(os.__file__).with_name(name).read_text("utf-8") for name in ("glob.py", "shutil.py")]


def words(count: int = 400) -> list[str]:
    """Return the tokens of a small BPE over "\u2581" for spaces, in the order in which they were made."""
    tok: Any = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    lines = [line for text in trained_text() for line in text.splitlines()]
    tok.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=count, show_progress=False))
    return [token for token, _ in sorted(tok.get_vocab().items(), key=lambda entry: entry[1])]


def pieces(*more: Piece) -> list[Piece]:
    """Return a vocabulary: unknown, BOS, EOS, `more`, the bytes, and trained pieces with falling scores."""
    first: list[Piece] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    return [*first, *more, *BYTES, *((text, -float(rank), NORMAL) for rank, text in enumerate(words()))]


def model_file(entries: Sequence[Piece], *, unigram: bool = False, byte_fallback: bool = True, **normalizer: Any) -> bytes:
    """Return the bytes of a SentencePiece model. `normalizer`: precompiled_charsmap, add_dummy_prefix, and so on."""
    names = ("", "name", "precompiled_charsmap", "add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces")
    data = b"".join(_field(1, _field(1, text.encode()) + _field(2, score) + _field(3, kind)) for text, score, kind in entries)
    trainer = _field(3, 1 if unigram else 2) + _field(35, int(byte_fallback))
    options = b"".join(_field(names.index(name), value) for name, value in normalizer.items())
    return data + _field(2, trainer) + _field(3, options)


def _field(number: int, value: float | bytes) -> bytes:
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    return _varint(number << 3) + _varint(int(value))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def reference(entries: Sequence[Piece], text: str, prefix: bool) -> list[int]:
    """Return SentencePiece's ids of a text: merge the best-scored pair, the leftmost of equal ones, until none is left."""
    scores = {piece: score for piece, score, kind in entries if kind == NORMAL}
    ids = {piece: number for number, (piece, _, _) in enumerate(entries)}
    parts = list(("\u2581" if prefix and text else "") + text.replace(" ", "\u2581"))
    while True:
        pairs = [(-scores[a + b], place) for place, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    tokens = (part if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts)
    return [ids[one] for token in tokens for one in ([token] if isinstance(token, str) else token)]


def ranks_file(ranks: Mapping[bytes, int]) -> bytes:
    """Return the bytes of a tiktoken file."""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def texts(count: int, specials: Sequence[str] = (), seed: int = 0) -> list[str]:
    """Return texts from all planes of Unicode, with runs of spaces, digits, combining marks and special tokens in them."""
    draw = random.Random(seed)
    planes = [*[(32, 127)] * 6, (0xA0, 0x250), (0x300, 0x330), (0x370, 0x500), (0x5D0, 0x700), (0x900, 0xA00)]
    planes += [(0xE00, 0xE80), (0x2000, 0x2070), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xE010)]
    planes += [(0xFF00, 0xFF60), (0x1F300, 0x1F700), (0x20000, 0x20200)]
    known = ["import", "the path", "'s", "don't", "I'LL", "12345", "3.14", "\n", "\r\n", "\t\t", "return  x", "====", "\u2581"]
    known += ["e\u0301", "👩‍👩‍👧", "你好"]
    known += ["  ", " " * 7, " " * 33, *specials]
    out = ["", " ", "  ", "a", " a", "a "]
    while len(out) < count:
        parts = []
        for _ in range(draw.randint(1, 10)):
            low, high = draw.choice(planes)
            char = "".join(chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 6)))
            run = draw.choice(" =-a0\n") * draw.randint(1, 40)
            parts.append(draw.choice([char, char, draw.choice(known), draw.choice(known), run]))
        out.append(draw.choice(["", " "]).join(parts))
    return out


def change_added_tokens(folder: Path, flags: Mapping[str, bool], more: Sequence[str] = ()) -> None:
    """Set flags of all added tokens of a folder's tokenizer.json, such as `lstrip`, and add tokens with these texts."""
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    content, settings = json.loads(file.read_text()), json.loads(config.read_text())
    settings.pop("added_tokens_decoder", None)
    for token in content["added_tokens"]:
        token |= flags
    known = {token["content"] for token in content["added_tokens"]}
    number = max(*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    added = [text for text in more if text not in known]
    content["added_tokens"] += [{"id": number + index, "content": text} | plain for index, text in enumerate(added)]
    file.write_text(json.dumps(content))
    config.write_text(json.dumps(settings))
