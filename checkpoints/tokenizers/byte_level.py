"""Byte-level BPE vocabularies (vocab.json with merges.txt, and tiktoken's), converted into `tokenizers.Tokenizer`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any


def _pattern(letters: str, digits: str) -> str:
    """Return a pattern of the cl100k family: `letters` is a character class without brackets."""
    words = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+"
    return rf"{words}|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_KIMI = (
    rf"[\p{{Han}}]+|{_LEAD}{_UPPER}*{_LOWER}+{_ENGLISH}|{_LEAD}{_UPPER}+{_LOWER}*{_ENGLISH}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN, _QWEN3_5 = _pattern(r"\p{L}", r"\p{N}"), _pattern(r"\p{L}\p{M}", r"\p{N}")
_LLAMA3 = _pattern(r"\p{L}", r"\p{N}{1,3}")


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + number) for number, byte in enumerate(_OTHERS)}
"""Byte -> its letter in byte-level vocabularies."""
LETTER_BYTES = {letter: byte for byte, letter in LETTERS.items()}


@dataclass(frozen=True)
class ByteLevelRules:
    """Rules by which a tokenizer class splits text.

    Args:
        pattern: regular expression of the pieces that are tokenised on their own; None for GPT-2's.
        before: regular expressions that split text, in order, before `pattern` does.
        nfc: normalise to NFC first.
        specials: the first special tokens after a tiktoken vocabulary.
        reserved: number of special tokens after a tiktoken vocabulary; those without a name are `<|reserved_token_ID|>`.
        single_digits: digits are split from each other before GPT-2's pattern.
        whole_words: a piece that is a token is not merged from its letters.
    """

    pattern: str | None = None
    before: tuple[str, ...] = ()
    nfc: bool = False
    specials: tuple[str, ...] = ()
    reserved: int = 0
    single_digits: bool = False
    whole_words: bool = False


VOCAB_RULES = {
    "Qwen2Tokenizer": ByteLevelRules(_QWEN, nfc=True),
    "Qwen3_5Tokenizer": ByteLevelRules(_QWEN3_5, nfc=True),
    "CodeGenTokenizer": ByteLevelRules(),
    "GPT2Tokenizer": ByteLevelRules(),
}
"""Classes that read vocab.json and merges.txt."""

_QWEN1 = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
_KIMIA = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_msg_end|>", 3: "<|im_user_msg_start|>", 4: "<|im_assistant_msg_start|>", 9: "[EOT]",
    18: "<|im_media_begin|>", 20: "<|im_media_end|>", 23: "<|im_kimia_text_blank|>", 24: "<|im_kimia_text_eos|>",
    27: "<|im_kimia_user_msg_start|>", 28: "<|im_kimia_assistant_msg_start|>", 32: "<|im_kimia_speech_ct_id|>",
    33: "<|im_kimia_speech_ctd_id|>",
}  # fmt: skip
_UNNAMED = (f"<|reserved_token_{number}|>" for number in count())
KIMIA_CLASS = "tokenization_kimia.TikTokenTokenizer"  # with its module, since another class has the same name
TIKTOKEN_RULES = {
    "TikTokenTokenizer": ByteLevelRules(_KIMI, reserved=258),
    KIMIA_CLASS: ByteLevelRules(_QWEN, specials=tuple(_KIMIA.get(place) or next(_UNNAMED) for place in range(421))),
    "QWenTokenizer": ByteLevelRules(_QWEN, nfc=True, specials=_QWEN1),
}
"""Classes that read tiktoken's files. Other classes split text as Llama 3 does."""
OTHER_TIKTOKEN = ByteLevelRules(_LLAMA3)


def all_merges(ranked: Sequence[str]) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes a third one, ordered by the rank of the third, then by the length of the first."""
    tokens = frozenset(ranked)
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    ]


def read_merges(data: bytes) -> list[tuple[str, str]]:
    """Read a merges.txt. Raise ValueError for a line that is not two tokens."""
    lines = data.decode("utf-8").split("\n")
    pairs = [line.rstrip("\r").split(" ") for line in lines if line.strip() and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("merges.txt has a line that is not two tokens")
    return [(left, right) for left, right in pairs]


def read_tiktoken(data: bytes) -> dict[str, int]:
    """Read a tiktoken file. Return token (in the letters of byte-level vocabularies) -> rank, in ascending order."""
    pairs = [line.split() for line in data.splitlines() if line]
    ranks = {base64.b64decode(token, validate=True).decode("latin-1"): int(rank) for token, rank in pairs}
    return {token.translate(LETTERS): rank for token, rank in sorted(ranks.items(), key=lambda entry: entry[1])}


def convert_byte_level(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]] | None, rules: ByteLevelRules, add_prefix_space: bool = False
) -> Any:
    """Return the `tokenizers.Tokenizer` of a byte-level vocabulary.

    Args:
        merges: None for tiktoken's vocabularies: any two tokens that make a third one merge, by its rank.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = all_merges(list(vocab)) if merges is None else list(merges)
    tokenizer: Any = Tokenizer(models.BPE(dict(vocab), pairs, ignore_merges=merges is None or rules.whole_words))
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=rules.pattern is None)
    split: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rules.single_digits else []
    patterns = (*rules.before, *([] if rules.pattern is None else [rules.pattern]))
    split += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
