"""Texts of SigLIP 2 are lowercased, which its published tokenizer.json leaves to the tokenizer's class."""

import json

import pytest
from oracle import tokenizer
from sensorium.processors.text.tokenizer import Tokenizer


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
