"""The names that GGUF files give to tokenizers, and the rules by which these split text.

Source: the conversion scripts and the vocabulary code of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..tokenizers.byte_level import OTHER_TIKTOKEN, TIKTOKEN_RULES, VOCAB_RULES, ByteLevelRules

BYTE_LEVEL, PIECES = "gpt2", "llama"
"""Values of `tokenizer.ggml.model`: byte-level BPE, and SentencePiece's BPE."""
ADDS_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "midm-2.0", "lfm2", "jina-v5-nano")
"""Values of `tokenizer.ggml.pre` that add BOS if the metadata do not say."""
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_ENGLISH}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_ENGLISH}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = ByteLevelRules(
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    before=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+"),
)
_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 "
    "1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE "
    "1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 "
    "2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A "
    "10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
"""Code points of cased letters, as the tokenizer of DeepSeek-V2 lists them."""
_CASED = "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in _LETTERS.split())
_DEEPSEEK_LLM = ByteLevelRules(
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    before=(
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
    ),
    single_digits=True,
)
_DEEPSEEK_CODER = ByteLevelRules(
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", before=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+"), single_digits=True
)
_FALCON = ByteLevelRules(
    "[0-9][0-9][0-9]",
    before=(
        r"[\p{P}\$\+<=>\^~\|`]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    ),
)
_BLOOM = ByteLevelRules(" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+")
_BAILING = ByteLevelRules(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = ByteLevelRules(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EXAONE_MOE = ByteLevelRules(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_GPT2, _QWEN2 = ByteLevelRules(), VOCAB_RULES["Qwen2Tokenizer"]
_LLAMA3 = replace(OTHER_TIKTOKEN, whole_words=True)
RULES: Mapping[str, ByteLevelRules] = {
    "gpt-2": _GPT2,
    **dict.fromkeys(("phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais", "trillion"), _GPT2),
    "granite-docling": _GPT2,
    "qwen2": _QWEN2,
    **dict.fromkeys(("stablelm2", "megrez", "kormo", "f2llmv2", "hunyuan", "solar-open", "grok-2"), replace(_QWEN2, nfc=False)),
    "qwen35": VOCAB_RULES["Qwen3_5Tokenizer"],
    "deepseek-r1-qwen": replace(_QWEN2, nfc=False),
    **dict.fromkeys(ADDS_BOS, _LLAMA3),
    **dict.fromkeys(("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), OTHER_TIKTOKEN),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), ByteLevelRules(_O200K)),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), ByteLevelRules(_O200K, before=(r"\d{1,3}(?=(?:\d{3})*\b)",))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": _FALCON,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "viking": replace(_BLOOM, single_digits=True),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": _SEED_CODER,
    "exaone-moe": _EXAONE_MOE,
    "laguna": replace(_QWEN2, nfc=False, before=(r"[^\n]+|[\n]+",)),
    "kimi-k2": TIKTOKEN_RULES["TikTokenTokenizer"],
    **dict.fromkeys(
        ("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        replace(_GPT2, single_digits=True),
    ),
    **dict.fromkeys(("tekken", "pixtral"), ByteLevelRules(_TEKKEN, whole_words=True)),
}
"""`tokenizer.ggml.pre` -> how text is split."""
