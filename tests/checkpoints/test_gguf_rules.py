"""How names in `tokenizer.ggml.pre` split text, against llama.cpp's expressions in another regex engine."""

from __future__ import annotations

import pytest
import regex
from sensorium.checkpoints.gguf.tokenizer_rules import RULES
from sensorium.checkpoints.tokenizers.byte_level import LETTERS, convert_byte_level

BYTES = {letter: byte for byte, letter in LETTERS.items()}
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
SHORT = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
LEAD, REST = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{SHORT}|{LEAD}\p{{L}}+|\p{{N}}{REST}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = (
    rf"{LEAD}{UPPER}*{LOWER}+{SHORT}?|{LEAD}{UPPER}+{LOWER}*{SHORT}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
EXPRESSIONS = {
    "olmo": [GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "stablelm2": [QWEN2],
    "falcon3": [rf"{SHORT}|{LEAD}\p{{L}}+|\p{{N}}{{1,3}}{REST}"],
    "minimax-m2": [GPT4O],
    "cohere2moe": [r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "bloom": [BLOOM],
    "viking": [BLOOM, r"\p{N}"],
    "bailingmoe": [
        rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "seed-coder": [rf"{SHORT}|{LEAD}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "exaone-moe": [
        rf"{SHORT}|{LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "laguna": [r"[^\n]+|[\n]+", QWEN2],
}
TEXTS = (
    "It's 12345 km/h, DON'T\n\n  x=y+1 $5; Ab12 naïve",
    "你好，мир 日本語 1234567. a\tb  \r\n (c)|d` हिन्दी नमस्ते",
    "f(x):\n    return 'q'   \n#! ... ।",
    "HTTPServer's  tail ",
)


def split(text: str, expressions: list[str]) -> list[str]:
    """Apply each expression to all pieces; matches and what is between them are pieces."""
    pieces = [text]
    for expression in expressions:
        found = [regex.split(f"({expression})", piece) for piece in pieces]
        pieces = [part for parts in found for part in parts if part]
    return pieces


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_text_is_split_as_published(name: str) -> None:
    splitter = convert_byte_level({}, [], RULES[name]).pre_tokenizer
    for text in TEXTS:
        found = [bytes(BYTES[letter] for letter in piece).decode() for piece, _ in splitter.pre_tokenize_str(text)]
        assert found == split(text, EXPRESSIONS[name])
        assert "".join(found) == text
