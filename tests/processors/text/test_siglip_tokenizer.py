"""Tokenizers of SigLIP (spiece.model) and of SigLIP 2, whose published tokenizer.json leaves lowercasing to its class."""

import json
import unicodedata
from pathlib import Path

import pytest
from oracle import tokenizer
from sensorium.callers.errors import CheckpointError
from sensorium.processors.text.tokenizer import Tokenizer
from vocabularies import CONTROL, NORMAL, UNKNOWN, model_file, texts, trained_text, words


@pytest.mark.parametrize(
    ("kind", "name", "lowercases"),
    [
        ("siglip2", "Siglip2Tokenizer", True),
        ("siglip", "GemmaTokenizerFast", True),
        ("siglip", "SiglipTokenizer", False),
        ("gemma3", "GemmaTokenizer", False),
    ],
)
def test_siglip_2_lowercases_texts(tmp_path, kind, name, lowercases):
    (tmp_path / "tokenizer.json").write_text(tokenizer().to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    tok = Tokenizer(tmp_path)
    for encode in (tok.encode, tok.encode_ordinary):
        assert (encode("Import OS") == encode("import os")) == lowercases


@pytest.fixture
def spiece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder like SigLIP's, with a model of lowercase pieces that have scores."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pieces = dict.fromkeys(["\u2581", "i", *(one for one in words() if one == one.lower())])
    entries = [("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN)]
    entries += [(one, -8.0 - rank / 50, NORMAL) for rank, one in enumerate(pieces)]
    (tmp_path / "spiece.model").write_bytes(model_file(entries, unigram=True, byte_fallback=False, add_dummy_prefix=1))
    named = {"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "SiglipTokenizer", **named}))
    return tmp_path


def test_spiece_model(spiece: Path) -> None:
    tok = Tokenizer(spiece)
    assert tok.kind == "SentencePiece"
    plain = tok.encode("import the path")
    assert plain[-1] == 1
    assert 2 not in plain
    for text in ("Import  the PATH.", " import\tthe\u2581path!\n", "(im-port) {the} 'path'"):
        assert tok.encode(text) == plain, text
        assert tok.encode_ordinary(text) == plain[:-1], text


def test_spiece_model_of_another_class(spiece: Path) -> None:
    (spiece / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    with pytest.raises(CheckpointError, match=r"the class 'T5Tokenizer'; spiece\.model is read for SiglipTokenizer"):
        Tokenizer(spiece)


def test_spiece_model_against_transformers(spiece: Path) -> None:
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    pytest.importorskip("google.protobuf")
    from transformers import SiglipTokenizer

    (spiece / "text").write_text("".join(trained_text()).lower())
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    trainer.train(input=str(spiece / "text"), model_prefix=str(spiece / "spiece"), vocab_size=400, minloglevel=2, **ids)
    tok, oracle = Tokenizer(spiece), SiglipTokenizer(str(spiece / "spiece.model"))
    for text in texts(2000):
        if any(map(unicodedata.combining, text)):  # the `tokenizers` library applies a charsmap to whole graphemes
            continue
        assert tok.encode(text) == oracle(text)["input_ids"], repr(text)
