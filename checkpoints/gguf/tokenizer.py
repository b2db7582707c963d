"""Tokenizers in the metadata of GGUF files, converted for the `tokenizers` library.

Source: the conversion scripts and the vocabulary code of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...callers.errors import CheckpointError, short_repr
from ..tokenizers import byte_level, sentencepiece
from ..tokenizers.byte_level import ByteLevelRules
from .tokenizer_rules import ADDS_BOS, BYTE_LEVEL, PIECES, RULES

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # token types, those of SentencePiece
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "mask": "mask_token"}


def with_placeholder(metadata: Mapping[str, Any], encoder: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata with the image placeholder at the end of the vocabulary. LLaVA's files leave it out."""
    tokens = _tokens(metadata)
    if encoder.get("clip.projector_type") != "mlp" or "<image>" in tokens:
        return metadata
    added = {"tokens": "<image>", "token_type": _CONTROL, "scores": 0.0}
    lists = {name: metadata.get(f"tokenizer.ggml.{name}") for name in added}
    plain = {
        name: values if isinstance(values, list) else values.tolist() for name, values in lists.items() if values is not None
    }
    return {**metadata, **{f"tokenizer.ggml.{name}": [*values, added[name]] for name, values in plain.items()}}


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a tokenizer_config.json: named tokens, and whether BOS and EOS are added."""
    tokens, pieces = _tokens(metadata), metadata.get("tokenizer.ggml.model") == PIECES
    numbers = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in _NAMED.items()}
    config: dict[str, Any] = {
        name: tokens[number] for name, number in numbers.items() if isinstance(number, int) and 0 <= number < len(tokens)
    }
    adds_bos = pieces or metadata.get("tokenizer.ggml.pre") in ADDS_BOS
    config["add_bos_token"] = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and "bos_token" in config
    config["add_eos_token"] = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos_token" in config
    return config


def vocabulary(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that `convert` reads, as JSON values. Raise CheckpointError if they contradict each other."""
    tokens = _tokens(metadata)
    lists = {name: metadata.get(f"tokenizer.ggml.{name}") for name in ("token_type", "scores", "merges")}
    columns = {name: value if isinstance(value, list) else value.tolist() for name, value in lists.items() if value is not None}
    for name in ("token_type", "scores"):
        if name in columns and len(columns[name]) != len(tokens):
            raise CheckpointError(f"tokenizer.ggml.{name} has {len(columns[name])} entries for {len(tokens)} tokens")
    single = {name: metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre", "add_space_prefix", "unknown_token_id")}
    return {"tokens": tokens, "token_type": [_NORMAL] * len(tokens), **columns, **single}


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError("the GGUF file holds no tokenizer.ggml.tokens; use another file of the model")
    return tokens


def convert(content: Mapping[str, Any]) -> Any:
    """Return the `tokenizers.Tokenizer` of a `vocabulary`.

    Raises:
        CheckpointError: the model or the rules of splitting are not supported.
    """
    model = content["model"]
    if model == PIECES:
        return _convert_pieces(content)
    if model != BYTE_LEVEL:
        supported = f"{BYTE_LEVEL} and {PIECES}"
        raise CheckpointError(f"tokenizer.ggml.model {short_repr(model)} is not supported; known are {supported}")
    rules = RULES.get(content["pre"])
    if rules is None:
        supported = ", ".join(RULES)
        raise CheckpointError(f"tokenizer.ggml.pre {short_repr(content['pre'])} is not supported; known are {supported}")
    return _convert_byte_level(content, rules)


def _convert_pieces(content: Mapping[str, Any]) -> Any:
    kinds = [kind if kind != _UNUSED else _CONTROL for kind in content["token_type"]]
    scores = content.get("scores") or [0.0] * len(kinds)
    pieces = tuple(map(sentencepiece.Piece, content["tokens"], scores, kinds))
    unknown = content["unknown_token_id"]
    model = sentencepiece.SentencePieceModel(
        pieces,
        unigram=False,
        byte_fallback=_BYTE in kinds,
        unk_id=unknown if isinstance(unknown, int) and 0 <= unknown < len(pieces) else 0,
        named={},
        charsmap=b"",
        add_dummy_prefix=content["add_space_prefix"] is not False,
        remove_extra_whitespaces=False,
    )
    return sentencepiece.convert_model(model, "always" if model.add_dummy_prefix else "never")


def _convert_byte_level(content: Mapping[str, Any], rules: ByteLevelRules) -> Any:
    """Convert a byte-level vocabulary. Special tokens, and all after the last normal one, become added tokens."""
    from tokenizers import AddedToken

    tokens: Sequence[str] = content["tokens"]
    kinds: Sequence[int] = content["token_type"]
    size = max((number for number, kind in enumerate(kinds) if kind == _NORMAL), default=-1) + 1
    pairs = [tuple(merge.split(" ")) for merge in content.get("merges", [])]
    if any(len(pair) != 2 for pair in pairs):
        raise CheckpointError("tokenizer.ggml.merges has an entry that is not two tokens")
    vocab = {token: number for number, token in enumerate(tokens[:size])}
    merges = [pair for pair in pairs if len(pair) == 2 and pair[0] in vocab and pair[1] in vocab and "".join(pair) in vocab]
    tokenizer = byte_level.convert_byte_level(vocab, merges, rules)
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind != _NORMAL or number >= size:
            special = kind != _USER_DEFINED
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
            if tokenizer.token_to_id(token) != number:
                raise CheckpointError(f"tokenizer.ggml.tokens lists {short_repr(token)} twice; use another file of the model")
    return tokenizer
