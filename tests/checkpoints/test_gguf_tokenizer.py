"""Tokenizers in the metadata of GGUF files, against plain references and the publishers' libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import add, finish
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from oracle import SPECIALS, small_tekken, small_tokenizer
from sensorium.callers.errors import CheckpointError
from sensorium.checkpoints.tokenizers.byte_level import LETTERS, all_merges
from sensorium.processors.text.tokenizer import Tokenizer
from sensorium.processors.text.tokenizer_backends import splitter
from vocabularies import CONTROL, NORMAL, USER_DEFINED, pieces, reference, texts


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def load(folder: Path, model: str, tokens: list[str], kinds: list[int], **more: Any) -> Tokenizer:
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    lists = {"model": model, "tokens": tokens, "token_type": kinds}
    for key, value in (lists | more).items():
        add(writer, f"tokenizer.ggml.{key}", value)
    finish(writer)
    return Tokenizer(folder / "model.gguf")


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    entries = [(text, score, NORMAL if kind == USER_DEFINED else kind) for text, score, kind in pieces()]
    tokens, scores, kinds = (list(column) for column in zip(*entries, strict=True))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    tok = load(tmp_path, "llama", tokens, kinds, scores=scores, add_space_prefix=prefix, **ids)
    assert tok.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for text in texts(300, ["<s>", "</s>"]):
        parts = splitter(tok.specials).split(text)
        want = [
            n for part in parts for n in ([tok.specials[part]] if part in tok.specials else reference(entries, part, prefix))
        ]
        assert tok.encode(text) == [1, *want], repr(text)
        assert tok.encode_ordinary(text) == reference(entries, text, prefix), repr(text)


def test_qwen2_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    fast = small_tokenizer(())
    vocab, merges = fast.get_vocab(), [" ".join(pair) for pair in all_merges(ordered(fast))]
    oracle = transformers.Qwen2Tokenizer(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges])
    own = [*SPECIALS[1:], "<tool_call>"]
    oracle.add_special_tokens({"additional_special_tokens": own[:-1]})
    oracle.add_tokens(own[-1:])
    known = oracle.get_vocab()
    tokens = [token for token, _ in sorted(known.items(), key=lambda entry: entry[1])]
    kinds = [NORMAL if token in vocab else USER_DEFINED if token == "<tool_call>" else CONTROL for token in tokens]
    unused = ["[PAD700]", "[PAD701]"]
    tok = load(tmp_path, "gpt2", [*tokens, *unused], [*kinds, 5, 5], pre="qwen2", merges=merges)
    for text in texts(1000, [*own, "<|endoftext|>"]):
        assert tok.encode(text) == oracle(text)["input_ids"], repr(text)
        assert not set(tok.encode_ordinary(text)) & set(tok.control.values())
    assert tok.control.keys() >= set(own)


def ordered(fast: Any) -> list[str]:
    return [token for token, _ in sorted(fast.get_vocab().items(), key=lambda entry: entry[1])]


def test_tekken_equals_mistral_common(tmp_path: Path) -> None:
    (tmp_path / "tekken").mkdir()
    source = tmp_path / "tekken" / "tekken.json"
    source.write_text(json.dumps(small_tekken()))
    oracle = Tekkenizer.from_file(source)
    special = [oracle.id_to_piece(number) for number in range(oracle.num_special_tokens)]
    words = [
        oracle.id_to_byte_piece(number, SpecialTokenPolicy.KEEP).decode("latin-1").translate(LETTERS)
        for number in range(len(special), oracle.n_words)
    ]
    merges = [" ".join(pair) for pair in all_merges(words)]
    kinds = [CONTROL] * len(special) + [NORMAL] * len(words)
    tok = load(tmp_path, "gpt2", [*special, *words], kinds, pre="tekken", merges=merges, bos_token_id=oracle.bos_id)
    for text in texts(1000):
        assert tok.encode_ordinary(text) == oracle.encode(text, bos=False, eos=False), repr(text)
    assert tok.encode("a[INST]") == [tok.token_to_id("a"), oracle.get_special_token("[INST]")]


def test_contradictions_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lists 'a' twice"):
        load(tmp_path, "gpt2", ["a", "b", "a"], [NORMAL, NORMAL, CONTROL], pre="gpt-2", merges=[])
    with pytest.raises(CheckpointError, match="merges has an entry that is not two tokens"):
        load(tmp_path, "gpt2", ["a", "b"], [NORMAL, NORMAL], pre="gpt-2", merges=["a b c"])
