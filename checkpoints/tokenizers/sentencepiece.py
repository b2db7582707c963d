"""SentencePiece models: their protobuf file, and its conversion into a `tokenizers.Tokenizer`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .byte_level import all_merges

_NORMAL, _UNKNOWN, CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # ModelProto.SentencePiece.Type
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_SPACE = "\u2581"
_NEVER = -1e6  # score of pieces that no text may form; far below trained scores, which are log probabilities


class Piece(NamedTuple):
    """An entry of the vocabulary. `kind`: one of the constants above."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The fields of a model file that tokenisation depends on. `named`: "bos_token" -> text, and so on."""

    pieces: tuple[Piece, ...]
    unigram: bool
    byte_fallback: bool
    unk_id: int
    named: dict[str, str]
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def read_model(data: bytes) -> SentencePieceModel:
    """Read a model file. Raise ValueError if it is broken or has an option that is not supported."""
    pieces: list[Piece] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            text, score = piece.get(1, b"").decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0]
            pieces.append(Piece(text, score, piece.get(3, _NORMAL)))
        elif number == 2:
            trainer.update(_fields(value))
        elif number == 3:
            normalizer.update(_fields(value))
    kind = trainer.get(3, _UNIGRAM)
    if not pieces or kind not in (_UNIGRAM, _BPE) or trainer.get(24, False) or not normalizer.get(5, True):
        raise ValueError("only BPE and Unigram models of SentencePiece with spaces before words are supported")
    ids = {"unk_token": trainer.get(40, 0), "bos_token": trainer.get(41, 1), "eos_token": trainer.get(42, 2)}
    if not 0 <= ids["unk_token"] < len(pieces):
        raise ValueError("it has no unknown piece")
    named = {name: pieces[number].text for name, number in ids.items() if number < len(pieces)}  # -1 is 2**64 - 1 here
    return SentencePieceModel(
        tuple(pieces),
        kind == _UNIGRAM,
        bool(trainer.get(35, False)),
        ids["unk_token"],
        named,
        normalizer.get(2, b""),
        bool(normalizer.get(3, True)),
        bool(normalizer.get(4, True)),
    )


def convert_model(model: SentencePieceModel, prefix: str) -> Any:
    """Return the `tokenizers.Tokenizer` of a model, by the rules of transformers' converters.

    Pieces that SentencePiece never makes of text (control, unknown, byte) take part in no merge.

    Args:
        prefix: where a space is put before text: "always" (before every text between added tokens, as SentencePiece does),
            "first" (at the start, if there is none: `legacy: false` of Llama) or "never".
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    texts = [piece.text for piece in model.pieces]
    if model.unigram:
        scores = [piece.score if piece.kind in (_NORMAL, _USER_DEFINED) else _NEVER for piece in model.pieces]
        core: Any = models.Unigram(list(zip(texts, scores, strict=True)), model.unk_id, model.byte_fallback)
    else:
        unknown = texts[model.unk_id]
        vocab = {text: number for number, text in enumerate(texts)}
        core = models.BPE(vocab, _merges(model), unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)
    tokenizer: Any = Tokenizer(core)
    tokenizer.normalizer = _normalizer(model, prefix)
    if prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "first", split=False)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), *([decoders.ByteFallback()] if model.byte_fallback else ())]
    steps += [decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if prefix != "never" else ())]
    tokenizer.decoder = decoders.Sequence(steps)
    for piece in model.pieces:
        if piece.kind in (_UNKNOWN, CONTROL):
            tokenizer.add_special_tokens([AddedToken(piece.text, special=True, normalized=False)])
        elif piece.kind == _USER_DEFINED:
            normalized = _SPACE in piece.text and prefix == "never"  # runs of spaces, found in normalised text
            tokenizer.add_tokens([AddedToken(piece.text, special=False, normalized=normalized)])
    return tokenizer


def siglip_steps(lowercase: bool) -> list[Any]:
    """Return the normalizers of transformers' SiglipTokenizer, which come before the model's own.

    They lowercase texts, remove ASCII punctuation, join whitespace, and strip both ends. transformers puts no space before a
    text that follows a special token; the converted model does.
    """
    from tokenizers import Regex, normalizers

    steps: list[Any] = [normalizers.Replace(_SPACE, " "), *([normalizers.Lowercase()] if lowercase else ())]
    patterns = ((r"[!-/:-@\[-`{-~]", ""), (r"[\s\x1c-\x1f]+", " "), (r"\A +| +\z", ""))
    return [*steps, *(normalizers.Replace(Regex(pattern), text) for pattern, text in patterns)]


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Return the merges in the order of the scores of the pieces that they make."""
    usable = [
        piece
        for piece in model.pieces
        if piece.kind == _NORMAL or (piece.kind == _USER_DEFINED and not piece.text.strip(_SPACE))
    ]
    ranked = sorted(usable, key=lambda piece: -piece.score)  # stable: by id among equal scores
    return all_merges([piece.text for piece in ranked])


def _normalizer(model: SentencePieceModel, prefix: str) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefix == "always":
        steps.append(normalizers.Prepend(_SPACE))
    if prefix != "first":
        steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps) if steps else None


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a protobuf message: integers, and bytes for all other types."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError("it is not a protobuf message")
        size, position = _varint(data, position) if kind == 2 else (8 if kind == 1 else 4, position)
        if position + size > len(data):
            raise ValueError("it is truncated")
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return an integer and the position after it."""
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ValueError("it is truncated")
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
