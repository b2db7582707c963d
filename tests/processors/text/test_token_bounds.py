"""The lower bound on tokens holds for every kind of vocabulary; tokenizers that can lose characters have none."""

from __future__ import annotations

from pathlib import Path

import measured
import mistral_common
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import SPECIALS, tokenizer
from sensorium.processors.text.token_bounds import read_token_bounds
from sensorium.processors.text.tokenizer import Tokenizer
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Fast

TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*SPECIALS, "<s>", "[INST]", " " * 40, "\n\n\n\t", "-" * 70, "e\u0301", "\u03b1\u0313\u0300\u0345"]),
        st.text(max_size=20),
    ),
    max_size=8,
).map("".join)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["a", "b", "\u2581", "e", "\u00e9", "ab", "\u2581ab", "\u2581\u2581"]


def bpe(vocab: list[str], merges: list[tuple[str, str]], **options: object) -> Fast:
    return Fast(models.BPE({word: number for number, word in enumerate(vocab)}, merges, **options))


def fallback() -> Fast:
    """Return a BPE tokenizer as converted from sentencepiece, like Llama's and Gemma's."""
    merges = [("a", "b"), ("\u2581", "ab"), ("\u2581", "\u2581")]
    fast = bpe(["<unk>", *BYTES, *WORDS], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fast.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return fast


def composed() -> Fast:
    """Return a byte-level tokenizer with NFC, which merges characters."""
    fast = Fast.from_str(tokenizer().to_str())
    fast.normalizer = normalizers.NFC()
    fast.add_tokens([AddedToken("\u03b1\u0313\u0300\u0345" * 30, normalized=True)])
    return fast


def unknowns() -> Fast:
    fast = bpe(["<unk>", *WORDS], [("a", "b")], unk_token="<unk>")
    fast.add_special_tokens([AddedToken("<s>", special=True, normalized=False, lstrip=True, rstrip=True)])
    return fast


def unigram() -> Fast:
    fast = Fast(models.Unigram([(word, -1.0) for word in ["<unk>", *BYTES, *WORDS]], 0, True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    return fast


BOUND = {"bytes": tokenizer, "fallback": fallback, "composed": composed, "unknowns": unknowns, "unigram": unigram}


@pytest.fixture(scope="module")
def tokenizers_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {"tekken": Tokenizer(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json")}
    for name, make in BOUND.items():
        folder = tmp_path_factory.mktemp(name)
        make().save(str(folder / "tokenizer.json"))
        made[name] = Tokenizer(folder)
    return made


@pytest.mark.parametrize("name", [*BOUND, "tekken"])
@given(TEXTS)
def test_no_encoding_is_shorter(name: str, tokenizers_by_name: dict[str, Tokenizer], text: str) -> None:
    tok = tokenizers_by_name[name]
    least = tok.min_tokens(text)
    assert least <= len(tok.encode(text, add_special_tokens=False))
    assert least <= len(tok.encode_ordinary(text))
    assert least <= len(tok.encode_pieces([(text[:7], True), (text[7:], False)]))


@pytest.mark.parametrize("name", [*BOUND, "tekken"])
def test_long_texts_are_bounded_without_a_copy(name: str, tokenizers_by_name: dict[str, Tokenizer]) -> None:
    tok = tokenizers_by_name[name]
    assert tok.min_tokens("") == 0
    assert tok.min_tokens("a") == 1
    for text in ("a b\n" * 25_000_000, "\u00e9" * 10_000_000):
        with measured.allocating_at_most(1 << 20):
            assert tok.min_tokens(text) > 10_000


def test_whitespace_that_tokens_absorb_is_not_counted(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    tok, text = tokenizers_by_name["unknowns"], " " * 1000 + "<s>" + " " * 1000
    assert len(tok.encode(text)) == 1
    assert tok.min_tokens(text) == 0
    assert tok.min_tokens(" " * 1000) > 100


def lossy(**parts: object) -> Fast:
    fast = Fast.from_str(tokenizer().to_str())
    for name, part in parts.items():
        setattr(fast, name, part)
    return fast


@pytest.mark.parametrize(
    "fast",
    [
        Fast(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        Fast(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)),
        bpe(["a", "b"], []),  # unknown characters vanish
        bpe(["<unk>", "a"], [], unk_token="<unk>", fuse_unk=True),
        bpe(["a</w>", "a"], [], end_of_word_suffix="</w>"),
        bpe(["<unk>", "a", *BYTES[1:]], [], byte_fallback=True),
        lossy(normalizer=normalizers.Strip()),
        lossy(normalizer=normalizers.Replace("x", "")),
        lossy(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(" +"), " ")])),
        lossy(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])),
        lossy(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])),
    ],
)
def test_tokenizers_that_lose_characters_have_no_bound(fast: Fast) -> None:
    assert read_token_bounds(fast).min_tokens("a" * 10_000) == 0


def test_longer_patterns_lower_the_bound() -> None:
    fast = lossy(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("aaa", "b")]))
    assert read_token_bounds(fast).characters == 4 * 3 * read_token_bounds(tokenizer()).characters
