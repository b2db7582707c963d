"""The names that GGUF files give to tokenizers, and the rules by which these split text.

Source: the conversion scripts and the vocabulary code of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .byte_level import OTHER_TIKTOKEN, VOCAB_RULES, ByteLevelRules

BYTE_LEVEL, PIECES = "gpt2", "llama"
"""Values of `tokenizer.ggml.model`: byte-level BPE, and SentencePiece's BPE."""
ADDS_BOS = ("llama-bpe", "llama3", "llama-v3")
"""Values of `tokenizer.ggml.pre` that add BOS if the metadata do not say."""
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _QWEN2 = ByteLevelRules(), VOCAB_RULES["Qwen2Tokenizer"]
_LLAMA3 = replace(OTHER_TIKTOKEN, whole_words=True)
RULES: Mapping[str, ByteLevelRules] = {
    "gpt-2": _GPT2,
    "qwen2": _QWEN2,
    "qwen35": VOCAB_RULES["Qwen3_5Tokenizer"],
    "deepseek-r1-qwen": replace(_QWEN2, nfc=False),
    **dict.fromkeys(ADDS_BOS, _LLAMA3),
    **dict.fromkeys(("glm4", "chatglm-bpe"), OTHER_TIKTOKEN),
    **dict.fromkeys(("smollm", "refact"), replace(_GPT2, single_digits=True)),
    **dict.fromkeys(("tekken", "pixtral"), ByteLevelRules(_TEKKEN, whole_words=True)),
}
"""`tokenizer.ggml.pre` -> how text is split."""
