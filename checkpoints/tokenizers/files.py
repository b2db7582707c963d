"""Tokenizers as publishers ship them: finds a folder's files and converts them for the `tokenizers` library.

`tokenizer.json` is used as it is. Folders without one have SentencePiece's `tokenizer.model` or SigLIP's `spiece.model`,
tiktoken's `tiktoken.model`, `*.tiktoken` or `tokenizer.model`, or `vocab.json` with `merges.txt`. tokenizer_config.json,
added_tokens.json and special_tokens_map.json complete all of them. GGUF files hold a tokenizer in their metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ...callers.errors import CheckpointError
from ...mm.hashing import digest
from ..files import read_file, read_json
from ..gguf.reader import find_encoder, find_gguf, read_gguf
from . import byte_level
from .cache import cached_text

_RULES = 2  # version of the conversion; part of the cache's key
_CONFIGS = ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s")  # the first line of a tiktoken file; SentencePiece's starts with "\n"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ADD_BOS = ("CodeLlamaTokenizer", "GemmaTokenizer", "InternLM2Tokenizer", "InternLM3Tokenizer", "LlamaTokenizer")
_SIGLIP = "SiglipTokenizer"


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer.

    Args:
        kind: "tokenizer.json", "SentencePiece", "tiktoken", "vocab.json and merges.txt" or "GGUF".
        vocabulary: the files of the vocabulary, by name.
        config: tokenizer_config.json.
        named: "bos_token" -> text, and so on.
        added: added tokens by id, as tokenizer_config.json or added_tokens.json lists them.
        extra: special tokens that have no name.
        lowercases: texts are lowercased first, which the published tokenizer.json of SigLIP 2 leaves to its class.
    """

    kind: str
    vocabulary: Mapping[str, bytes]
    config: Mapping[str, Any]
    named: Mapping[str, str]
    added: Mapping[int, Mapping[str, Any]]
    extra: tuple[str, ...]
    lowercases: bool = False

    @property
    def tokenizer_class(self) -> str:
        """The class that tokenizer_config.json names, without "Fast"; may be ""."""
        return str(self.config.get("tokenizer_class") or "").removesuffix("Fast")

    @cached_property
    def text(self) -> str:
        """The content of tokenizer.json. A conversion is read from the cache if it was done before."""
        from tokenizers import __version__

        if self.kind == "tokenizer.json":
            return self.vocabulary["tokenizer.json"].decode("utf-8")
        added = {str(number): token for number, token in self.added.items()}
        contents = (self.vocabulary, self.config, added, self.named, self.extra)
        key = digest("sensorium.tokenizer", _RULES, __version__, self.kind, *contents)
        return cached_text("tokenizers", key, partial(_convert, self))

    def load(self) -> Any:
        """Return a new `tokenizers.Tokenizer`."""
        from tokenizers import Tokenizer, normalizers

        from_json: Any = Tokenizer.from_str
        tokenizer = from_json(self.text)
        if self.kind == "tokenizer.json":
            _add_tokens(tokenizer, self, exact=False)
        if self.lowercases:
            _put_first(tokenizer, [normalizers.Lowercase()])
        return tokenizer


def find_files(folder: Path) -> TokenizerFiles | None:
    """Read the tokenizer files of a folder; None if it has none that `load` could use."""
    gguf = find_gguf(folder)
    if gguf is not None:
        from ..gguf import tokenizer as gguf_tokenizer

        encoder = find_encoder(gguf)
        metadata = read_gguf(gguf).metadata
        if encoder is not None:
            metadata = gguf_tokenizer.with_placeholder(metadata, read_gguf(encoder).metadata)
        config = gguf_tokenizer.tokenizer_config(metadata)
        content = json.dumps(gguf_tokenizer.vocabulary(metadata)).encode()
        return TokenizerFiles("GGUF", {gguf.name: content}, config, read_named(config), {}, ())
    vocabulary, kind = _find_vocabulary(folder)
    if not vocabulary:
        return None
    config, legacy_added, legacy_named = (read_json(folder / name) for name in _CONFIGS)
    merged = legacy_named | config
    named = read_named(merged)
    lists = (merged.get(key) for key in ("additional_special_tokens", "extra_special_tokens"))
    extra = [_text(token) for tokens in lists if isinstance(tokens, list) for token in tokens]
    special = {*named.values(), *extra}
    if isinstance(config.get("added_tokens_decoder"), dict):
        added = {int(number): _mapping(token) for number, token in config["added_tokens_decoder"].items()}
    else:
        added = {
            int(number): {"content": text, "special": text in special, "normalized": text not in special}
            for text, number in legacy_added.items()
        }
    files = TokenizerFiles(kind, vocabulary, config, named, added, tuple(filter(None, extra)))
    is_siglip = read_json(folder / "config.json").get("model_type") in ("siglip", "siglip2")
    return replace(files, lowercases=is_siglip and files.tokenizer_class in ("GemmaTokenizer", "Siglip2Tokenizer"))


def read_named(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens of tokenizer_config.json: "bos_token" -> text, and so on."""
    nested = _mapping(config.get("extra_special_tokens")) | _mapping(config.get("model_specific_special_tokens"))
    named = {key: _text(value) for key, value in {**nested, **config}.items() if key.endswith("_token")}
    return {key: text for key, text in named.items() if text}


def _find_vocabulary(folder: Path) -> tuple[dict[str, bytes], str]:
    """Return the contents of the vocabulary files by name, and their kind; empty if there are none."""
    for names, kind in (
        (("tokenizer.json",), "tokenizer.json"),
        (("tokenizer.model",), "SentencePiece"),
        (("tiktoken.model",), "tiktoken"),
        (tuple(sorted(file.name for file in folder.glob("*.tiktoken"))[:1]), "tiktoken"),
        (("vocab.json", "merges.txt"), "vocab.json and merges.txt"),
        (("spiece.model",), "SentencePiece"),
    ):
        contents = {name: data for name in names if (data := read_file(folder / name)) is not None}
        if contents and len(contents) == len(names):
            is_ranks = names == ("tokenizer.model",) and _TIKTOKEN.match(contents["tokenizer.model"])
            return contents, "tiktoken" if is_ranks else kind
    return {}, ""


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    """Return the text of a token that is written as text or as an object; "" for anything else."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _convert(files: TokenizerFiles) -> str:
    """Return the tokenizer.json of files of another kind."""
    default_named: dict[str, str] = {}
    if files.kind == "GGUF":
        from ..gguf import tokenizer as gguf_tokenizer

        tokenizer = gguf_tokenizer.convert(json.loads(next(iter(files.vocabulary.values()))))
    elif files.kind == "SentencePiece":
        tokenizer, default_named = _convert_sentencepiece(files)
    else:
        tokenizer = _convert_byte_level(files)
    _add_tokens(tokenizer, files, exact=True)
    _add_post_processor(tokenizer, files, {**default_named, **files.named})
    return str(tokenizer.to_str())


def _convert_sentencepiece(files: TokenizerFiles) -> tuple[Any, dict[str, str]]:
    ((file, data),) = files.vocabulary.items()
    is_siglip = files.tokenizer_class == _SIGLIP
    if file == "spiece.model" and not is_siglip:
        raise CheckpointError(
            f"tokenizer_config.json names the class {files.tokenizer_class!r}; spiece.model is read for {_SIGLIP}: "
            "save tokenizer.json with transformers' AutoTokenizer"
        )
    from . import sentencepiece

    model = sentencepiece.read_model(data)
    pieces = list(model.pieces)
    for number, token in files.added.items():  # finetunes name unused pieces
        text = _text(token)
        if 0 <= number < len(pieces) and text not in ("", pieces[number].text):
            pieces[number] = sentencepiece.Piece(text, 0.0, sentencepiece.CONTROL)
    model = replace(model, pieces=tuple(pieces))
    is_llama, config = files.tokenizer_class in ("LlamaTokenizer", "CodeLlamaTokenizer"), files.config
    prefix = config.get("add_prefix_space") if is_llama else None
    prefix = model.add_dummy_prefix if prefix is None else bool(prefix)
    where = "first" if is_llama and config.get("legacy") is False else "always"
    tokenizer = sentencepiece.convert_model(model, where if prefix or is_siglip else "never")
    if is_siglip:
        _put_first(tokenizer, sentencepiece.siglip_steps(bool(config.get("do_lower_case", True))))
    return tokenizer, model.named


def _convert_byte_level(files: TokenizerFiles) -> Any:
    name, space = files.tokenizer_class, bool(files.config.get("add_prefix_space"))
    if files.kind == "tiktoken":
        rules = _tiktoken_rules(files)
        vocab = byte_level.read_tiktoken(next(iter(files.vocabulary.values())))
        tokenizer = byte_level.convert_byte_level(vocab, None, rules, space)
        names = {len(vocab) + index: text for index, text in enumerate(rules.specials)}
        reserved = range(len(vocab), len(vocab) + rules.reserved)
        added = {number: _text(token) for number, token in files.added.items()}
        for number, text in sorted(({number: _reserved(number) for number in reserved} | names | added).items()):
            _add_at(tokenizer, number, text, {"special": True, "normalized": False})
        return tokenizer
    if name not in byte_level.VOCAB_RULES:
        known_names = ", ".join(byte_level.VOCAB_RULES)
        raise CheckpointError(
            f"tokenizer_config.json names the class {name!r}; vocab.json and merges.txt are read for {known_names}: "
            "save tokenizer.json with transformers' AutoTokenizer"
        )
    rules, regex = byte_level.VOCAB_RULES[name], files.config.get("pretokenize_regex")
    if isinstance(regex, str) and rules.pattern is not None:
        rules = replace(rules, pattern=regex)
    content = json.loads(files.vocabulary["vocab.json"])
    merges = byte_level.read_merges(files.vocabulary["merges.txt"])
    return byte_level.convert_byte_level(content, merges, rules, space)


def _put_first(tokenizer: Any, steps: Sequence[Any]) -> None:
    """Normalise texts with these normalizers before the tokenizer's own."""
    from tokenizers import normalizers

    tokenizer.normalizer = normalizers.Sequence([*steps, *([tokenizer.normalizer] if tokenizer.normalizer else [])])


def _tiktoken_rules(files: TokenizerFiles) -> byte_level.ByteLevelRules:
    """Return the rules of the tokenizer's class, of which two have the same name in different modules."""
    added = [_text(token) for token in files.added.values()]
    is_kimia = byte_level.KIMIA_CLASS in str(files.config.get("auto_map")) or "<|im_kimia_text_blank|>" in added
    name = byte_level.KIMIA_CLASS if is_kimia else files.tokenizer_class
    return byte_level.TIKTOKEN_RULES.get(name, byte_level.OTHER_TIKTOKEN)


def _add_tokens(tokenizer: Any, files: TokenizerFiles, exact: bool) -> None:
    """Add the tokens that the other files list.

    Args:
        exact: give each token of tokenizer_config.json its id; CheckpointError if that is not possible. Else the ids are the
            vocabulary's, as transformers takes them.
    """
    from tokenizers import AddedToken

    present = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for number, token in sorted(files.added.items()):
        text, flags = _text(token), {name: bool(token[name]) for name in _FLAGS if name in token}
        if not text:
            continue
        if exact:
            _add_at(tokenizer, number, text, flags)
        elif text not in present or (
            "added_tokens_decoder" in files.config  # the flags of added_tokens.json are only those of missing tokens
            and any(getattr(present[text], name) != flag for name, flag in flags.items())
        ):
            tokenizer.add_tokens([AddedToken(text, **flags)])
    present = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for text in (*files.named.values(), *files.extra):
        if text not in present and (text in files.extra or tokenizer.token_to_id(text) is not None):
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _add_at(tokenizer: Any, number: int, text: str, flags: Mapping[str, bool]) -> None:
    """Add a token with this id. Ids before it that have no token get reserved ones."""
    from tokenizers import AddedToken

    size = tokenizer.get_vocab_size()
    if tokenizer.token_to_id(text) is None:
        if number - size > 1 << 16:
            raise CheckpointError(f"token {text[:40]!r} has the id {number}, but the vocabulary has {size} tokens")
        tokenizer.add_special_tokens([_reserved(free) for free in range(size, number)])
    tokenizer.add_tokens([AddedToken(text, **flags)])
    if tokenizer.token_to_id(text) != number:
        raise CheckpointError(
            f"tokenizer_config.json gives token {text[:40]!r} the id {number}, the vocabulary gives it "
            f"{tokenizer.token_to_id(text)}; download the folder again"
        )


def _reserved(number: int) -> str:
    return f"<|reserved_token_{number}|>"


def _add_post_processor(tokenizer: Any, files: TokenizerFiles, named: Mapping[str, str]) -> None:
    """Make `add_special_tokens` add BOS and EOS where tokenizer_config.json, or else the tokenizer's class, adds them."""
    from tokenizers import processors

    add_bos = files.config.get("add_bos_token", files.kind == "SentencePiece" and files.tokenizer_class in _ADD_BOS)
    marks: Sequence[str] = [named.get(f"{name}_token", "") for name in ("bos", "eos")]
    first = marks[0] if add_bos else ""
    add_eos = files.config.get("add_eos_token", files.kind == "SentencePiece" and files.tokenizer_class == _SIGLIP)
    last = marks[1] if add_eos else ""
    ids = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys((first, last)) if text]
    if any(number is None for _, number in ids):
        raise CheckpointError(f"the vocabulary has no token {ids[0][0]!r}, which tokenizer_config.json adds to texts")
    if ids:
        pieces = [*([first] if first else ()), "$A", *([last] if last else ())]
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)
