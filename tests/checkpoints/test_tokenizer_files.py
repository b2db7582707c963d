"""Tokenizers as publishers ship them, against the publishers' own libraries and plain references; their cache."""

from __future__ import annotations

import json
import os
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sensorium.callers.errors import CheckpointError
from sensorium.checkpoints.tokenizers import byte_level
from sensorium.checkpoints.tokenizers import files as tokenizer_files
from sensorium.processors.text.tokenizer import StreamDecoder, Tokenizer
from sensorium.processors.text.tokenizer_backends import splitter
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Fast
from vocabularies import BYTES, CONTROL, NORMAL, USER_DEFINED, model_file, pieces, ranks_file, reference, texts

COUNT = 2000
PLAIN = {"add_dummy_prefix": 1, "remove_extra_whitespaces": 0}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "sensorium" / "tokenizers"


def write(folder: Path, config: dict[str, Any] | None = None, **files: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def entries() -> list[tuple[str, float, int]]:
    return pieces(("<img>", 0.0, USER_DEFINED))


def split_encode(tok: Tokenizer, text: str, encode: Any) -> list[int]:
    """Return ids with special tokens recognised and every text between them encoded by `encode`."""
    parts = splitter(tok.specials).split(text)
    return [number for part in parts for number in ([tok.specials[part]] if part in tok.specials else encode(part))]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe(entries: Any, tmp_path: Path, prefix: bool) -> None:
    vocabulary = [(text, score, NORMAL if kind == USER_DEFINED else kind) for text, score, kind in entries]
    data = model_file(vocabulary, **PLAIN | {"add_dummy_prefix": int(prefix)})
    tok = Tokenizer(write(tmp_path, LLAMA, tokenizer__model=data))
    assert tok.kind == "SentencePiece"
    for text in texts(300, ["<s>", "</s>"]):
        want = split_encode(tok, text, lambda part: reference(vocabulary, part, prefix))
        assert tok.encode(text) == [1, *want], repr(text)
        assert tok.encode_ordinary(text) == reference(vocabulary, text, prefix), repr(text)
        assert tok.decode(tok.encode_ordinary(text)) == text.replace("\u2581", " "), repr(text)


@pytest.mark.parametrize("options", [{}, {"add_prefix_space": False}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_llama_without_legacy_equals_transformers(entries: Any, tmp_path: Path, options: Any) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write(tmp_path, LLAMA | options | {"legacy": False}, tokenizer__model=model_file(entries, **PLAIN))
    tok = Tokenizer(folder)
    ranked = [text for text, _, kind in entries if kind == NORMAL]
    vocab = {text: number for number, (text, _, _) in enumerate(entries)}
    flags = {"add_bos_token": True} | options
    oracle = transformers.LlamaTokenizer(vocab=vocab, merges=byte_level.all_merges(ranked), legacy=False, **flags)
    oracle.add_tokens(["<img>"])
    for text in texts(COUNT, ["<s>", "</s>", "<img>"]):
        assert tok.encode(text) == oracle(text)["input_ids"], repr(text)


def test_runs_of_spaces_that_are_user_defined(tmp_path: Path) -> None:
    """Gemma's vocabulary has runs of up to 31 spaces; the longest one that fits comes first."""
    runs = [("\u2581" * length, 0.0, USER_DEFINED) for length in range(2, 32)]
    vocabulary = pieces(*runs)
    data = model_file(vocabulary, add_dummy_prefix=0, remove_extra_whitespaces=0)
    tok = Tokenizer(write(tmp_path, {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>"}, tokenizer__model=data))
    ids = {text: number for number, (text, _, _) in enumerate(vocabulary)}
    assert tok.encode("a" + " " * 40 + "b") == [1, ids["a"], ids["\u2581" * 31], ids["\u2581" * 9], ids["b"]]
    assert tok.decode(tok.encode("a" + " " * 40 + "b")) == "a" + " " * 40 + "b"


def test_unigram(tmp_path: Path) -> None:
    scored = [("\u2581", -3.0), ("a", -2.0), ("b", -2.5), ("ab", -3.0), ("\u2581a", -2.2), ("aa", -5.0)]
    vocabulary = [("<unk>", 0.0, 2), ("<s>", 0.0, CONTROL), *BYTES, *((text, score, NORMAL) for text, score in scored)]
    data = model_file(vocabulary, unigram=True, add_dummy_prefix=1, remove_extra_whitespaces=1)
    tok = Tokenizer(write(tmp_path, tokenizer__model=data))
    names = [text for text, _, _ in vocabulary]
    want = ["\u2581a", "b", "\u2581a", "a", "\u2581", "<0xC3>", "<0xA9>"]
    assert [names[number] for number in tok.encode("  ab   aa é ")] == want
    assert tok.specials["<s>"] not in tok.encode_ordinary("<s> a")
    assert tok.decode(tok.encode("ab é")) == "ab é"


def test_names_for_unused_pieces_and_added_tokens(tmp_path: Path) -> None:
    vocabulary = pieces(("[UNUSED_0]", 0.0, USER_DEFINED))
    size = len(vocabulary)
    token = {"special": True, "normalized": False}
    named = {"3": token | {"content": "<|im_start|>"}, str(size + 2): token | {"content": "<img>"}}
    config = {"tokenizer_class": "InternLM2Tokenizer", "bos_token": "<s>", "added_tokens_decoder": named}
    tok = Tokenizer(write(tmp_path, config, tokenizer__model=model_file(vocabulary, **PLAIN | {"add_dummy_prefix": 0})))
    assert tok.encode("<|im_start|>a<img>")[:2] == [1, 3]
    assert tok.encode("<img>") == [1, size + 2]
    assert tok.token_to_id("[UNUSED_0]") is None
    assert tok.decode([3, size + 2], skip_special_tokens=False) == "<|im_start|><img>"
    wrong = config | {"added_tokens_decoder": {str(size + 3): token | {"content": "<s>"}}}
    with pytest.raises(CheckpointError, match=rf"gives token '<s>' the id {size + 3}, the vocabulary gives it 1"):
        Tokenizer(write(tmp_path, wrong))


def test_vocab_and_merges_equal_transformers(checkpoint: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    merges = "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"])
    files = {"vocab__json": json.dumps(model["vocab"]).encode(), "merges__txt": merges.encode()}
    size = len(model["vocab"])
    flags = {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    added = (("<|endoftext|>", True), ("<|im_end|>", True), ("<think>", False))
    extra = {str(size + i): {"content": text, "special": special, **flags} for i, (text, special) in enumerate(added)}
    for name in ("Qwen2Tokenizer", "GPT2Tokenizer"):
        named = {
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "bos_token": "<|im_end|>",
        }
        folder = write(tmp_path / name, {"tokenizer_class": name, "added_tokens_decoder": extra, **named}, **files)
        tok, oracle = Tokenizer(folder), getattr(transformers, name).from_pretrained(folder)
        for text in texts(COUNT, ["<|endoftext|>", "<|im_end|>", "<think>"]):
            ids = oracle(text)["input_ids"]
            assert tok.encode(text) == ids, repr(text)
            assert tok.decode(ids) == oracle.decode(ids, skip_special_tokens=True), repr(text)
    write(tmp_path / name, {"tokenizer_class": "CTRLTokenizer"})
    with pytest.raises(CheckpointError, match=r"names the class 'CTRLTokenizer'; vocab\.json and merges\.txt are read for"):
        Tokenizer(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "file", "rules"),
    [
        ("TikTokenTokenizer", "tiktoken__model", byte_level.TIKTOKEN_RULES["TikTokenTokenizer"]),
        (byte_level.KIMIA_CLASS, "tiktoken__model", byte_level.TIKTOKEN_RULES[byte_level.KIMIA_CLASS]),
        ("QWenTokenizer", "qwen__tiktoken", byte_level.TIKTOKEN_RULES["QWenTokenizer"]),
        ("Llama3", "tokenizer__model", byte_level.OTHER_TIKTOKEN),
    ],
)
def test_tiktoken(checkpoint: Path, tmp_path: Path, name: str, file: str, rules: Any) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    vocab = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    letters = {letter: byte for byte, letter in byte_level.LETTERS.items()}
    ranks = {bytes(letters[letter] for letter in token): rank for token, rank in vocab.items()}
    added = {str(len(ranks) + 1): {"content": "[EOS]", "special": True}} if name != "QWenTokenizer" else {}
    config = {
        "tokenizer_class": name.split(".")[-1],
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": [name, None]},
    }
    tok = Tokenizer(write(tmp_path, config, **{file: ranks_file(ranks)}))
    assert tok.kind == "tiktoken"
    sizes = {"TikTokenTokenizer": 258, "QWenTokenizer": 208, byte_level.KIMIA_CLASS: 421}
    assert tok.vocab_size == len(ranks) + sizes.get(name, 2)
    oracle = tiktoken.Encoding(name, pat_str=rules.pattern, mergeable_ranks=ranks, special_tokens=tok.specials)
    for text in texts(COUNT, [*tok.specials][:4]):
        read = unicodedata.normalize("NFC", text) if rules.nfc else text
        assert tok.encode(text) == oracle.encode(read, allowed_special="all"), repr(text)
        assert tok.encode_ordinary(text) == oracle.encode(read, disallowed_special=()), repr(text)
        assert tok.decode(tok.encode(text), skip_special_tokens=False) == read


def test_kimi_audios_control_tokens_have_their_published_ids() -> None:
    """The vocabulary has 151,643 tokens; tokenizer_config.json need not list those after it."""
    places = {text: 151_643 + place for place, text in enumerate(byte_level.TIKTOKEN_RULES[byte_level.KIMIA_CLASS].specials)}
    published = {
        "<|im_msg_end|>": 151645, "<|reserved_token_0|>": 151648, "<|im_media_begin|>": 151661, "<|im_media_end|>": 151663,
        "<|im_kimia_text_blank|>": 151666, "<|im_kimia_user_msg_start|>": 151670, "<|im_kimia_speech_ct_id|>": 151675,
        "<|reserved_token_20|>": 151677,
    }  # fmt: skip
    assert places | published == places
    assert len(places) == 421


@given(
    st.lists(st.sampled_from(["<s>", "</s>", "<0x41>", "<img>", "<", "s>", "a", " ", "你", "<unk>"]), max_size=6).map("".join)
)
def test_untrusted_text_never_becomes_control(folders: dict[str, Tokenizer], text: str) -> None:
    for tok in folders.values():
        assert not set(tok.control.values()) & set(tok.encode_ordinary(text))
        assert not set(tok.control.values()) & set(tok.encode_pieces([(text, False)]))
        trusted = tok.encode_pieces([(text, False), ("<s>", True), (text, False)])
        assert [number for number in trusted if number in tok.control.values()] == [tok.control["<s>"]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Return a tokenizer for each way to write spaces, with and without a writable cache folder."""
    root = tmp_path_factory.mktemp("spaces")
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.devnull)
        for name, prefix, config in (("sp", 1, {}), ("none", 0, {}), ("first", 1, {"legacy": False})):
            data = model_file(pieces(), **PLAIN | {"add_dummy_prefix": prefix})
            made[name] = Tokenizer(write(root / name, LLAMA | config, tokenizer__model=data))
    return made


@given(st.data())
def test_streams_add_up(folders: dict[str, Tokenizer], data: Any) -> None:
    """Prefix spaces, bytes of characters, and special tokens that are left out come in any order."""
    tok = folders[data.draw(st.sampled_from(sorted(folders)))]
    space, first = tok.encode_ordinary("a  b")[1:3], tok.encode_ordinary(" ")
    chosen = [1, 2, *space, *first, *tok.encode_ordinary(" import a🚀é")]
    ids = data.draw(st.lists(st.one_of(st.sampled_from(chosen), st.integers(0, tok.vocab_size - 1)), max_size=30))
    skip = data.draw(st.booleans())
    stream, start, shown = StreamDecoder(tok, skip), 0, list[str]()
    while start < len(ids):
        step = data.draw(st.integers(1, 3))
        shown.append(stream.push(ids[start : start + step]))
        start += step
    assert "".join([*shown, stream.flush()]) == tok.decode(ids, skip)


def test_characters_of_bytes_are_streamed_whole(folders: dict[str, Tokenizer]) -> None:
    for tok in folders.values():
        stream = StreamDecoder(tok)
        ids = tok.encode_ordinary("x🚀你")
        shown = [stream.push([number]) for number in ids]
        assert "".join(shown) == "x🚀你"
        assert [text for text in shown if text] == ["x", "🚀", "你"]
        assert tok.decode(ids[:-1]) == "x🚀\ufffd"  # as SentencePiece reads bytes; the library would lose the rocket


def test_list_form_of_extra_special_tokens(checkpoint: Path, tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer__json=(checkpoint / "tokenizer.json").read_bytes())
    size = Tokenizer(folder).vocab_size
    config = {"extra_special_tokens": ["<|im_start|>", "<new>", {"content": "<newer>"}], "eos_token": "<|im_end|>"}
    tok = Tokenizer(write(folder, config))
    assert tok.encode("<|im_start|><new><newer>") == [tok.specials["<|im_start|>"], size, size + 1]
    assert tok.special_tokens == {"eos_token": "<|im_end|>"}
    assert not {size, size + 1} & set(tok.encode_ordinary("<new><newer>"))
    named = Tokenizer(write(folder, {"extra_special_tokens": {"image_token": "<|image_pad|>"}}))
    assert named.special_tokens == {"image_token": "<|image_pad|>"}


def test_added_tokens_json_changes_no_token(tmp_path: Path) -> None:
    """It lists texts and ids alone; tokenizer.json knows whether they are special."""
    fast = Fast(models.BPE({"a": 0}, []))
    fast.add_special_tokens([AddedToken("<img>", special=True, normalized=False)])
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<img>": 1, "<new>": 2}))
    tok = Tokenizer(tmp_path)
    assert tok.specials == {"<img>": 1}
    assert tok.control == {"<img>": 1, "<new>": 2}
    added = {"1": {"content": "<img>", "special": False, "normalized": False}}
    tok = Tokenizer(write(tmp_path, {"added_tokens_decoder": added}))
    assert tok.specials == {}
    assert tok.encode("<img>a") == [1, 0]


def test_cache(entries: Any, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    convert = tokenizer_files._convert
    monkeypatch.setattr(tokenizer_files, "_convert", lambda files: made.append(1) or convert(files))
    folder = write(tmp_path, LLAMA, tokenizer__model=model_file(entries, **PLAIN))
    want = Tokenizer(folder).encode("import os")
    assert len(made) == 1
    (entry,) = cache.iterdir()
    assert entry.stat().st_mode & 0o777 == 0o600
    assert Tokenizer(folder).encode("import os") == want
    assert len(made) == 1
    sealed = entry.read_bytes()
    for spoil in (
        lambda: entry.write_bytes(sealed[: len(sealed) // 2]),
        lambda: entry.write_bytes(b""),
        lambda: entry.write_bytes(sealed.replace(b"import", b"export")),
        lambda: entry.chmod(0o666),
    ):
        made.clear()
        spoil()
        assert Tokenizer(folder).encode("import os") == want
        assert made == [1]
        assert entry.read_bytes() == sealed
        assert entry.stat().st_mode & 0o777 == 0o600
    made.clear()
    os.truncate(folder / "tokenizer.model", os.path.getsize(folder / "tokenizer.model") - 3)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model cannot be read"):
        Tokenizer(folder)
    write(folder, LLAMA | {"add_bos_token": False}, tokenizer__model=model_file(entries, **PLAIN))
    other = Tokenizer(folder)
    assert len(made) == 2
    assert other.encode("import os") == want[1:]
    first, second = sorted(cache.iterdir(), key=lambda path: path != entry)
    shutil.copy(first, second)  # another entry under this key is no answer
    assert Tokenizer(folder).encode("import os") == want[1:]


def test_another_users_file_is_not_read(entries: Any, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, LLAMA, tokenizer__model=model_file(entries, **PLAIN))
    want = Tokenizer(folder).encode("import os")
    made = []
    convert = tokenizer_files._convert
    monkeypatch.setattr(tokenizer_files, "_convert", lambda files: made.append(1) or convert(files))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert Tokenizer(folder).encode("import os") == want
    assert Tokenizer(folder).encode("import os") == want
    assert len(made) == 2  # what was just written belongs to someone else as well


def test_broken_files(tmp_path: Path) -> None:
    for data in (b"\n\xff\xff\xff", b"\n\x05\n\x01a", b"\x0a" * 7, b"", b"PK\x03\x04" * 20):
        with pytest.raises(CheckpointError, match=r"tokenizer\.model cannot be read"):
            Tokenizer(write(tmp_path, tokenizer__model=data))
    with pytest.raises(CheckpointError, match=r"tokenizer\.model cannot be read"):
        Tokenizer(write(tmp_path, tokenizer__model=b"YQ== 0\nno\n"))


@pytest.mark.shared
def test_published_sentencepiece(shared_data: Path, tmp_path: Path) -> None:
    """InternVL2-2B against SentencePiece, and a model with a normaliser against the publisher's tokenizer.json."""
    source = shared_data / "published" / "others" / "cohere-transcribe"
    for name in ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(source / name, tmp_path)
    tok, published = Tokenizer(tmp_path), Tokenizer(source)
    for text in texts(COUNT, [*tok.specials][:20]):
        assert tok.encode(text) == published.encode(text), repr(text)
    folder = shared_data / "published" / "internvl" / "InternVL2-2B"
    tok = Tokenizer(folder)
    assert tok.encode("<|im_start|>Hello<|im_end|>") == [1, 92543, 9843, 92542]
    oracle = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in texts(COUNT, [*tok.specials]):
        assert tok.encode(text) == [1, *split_encode(tok, text, oracle.encode)], repr(text)


@pytest.mark.shared
def test_published_vocab_and_merges(shared_data: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = shared_data / "published" / "qwen3_asr" / "Qwen3-ASR-0.6B"
    tok, oracle = Tokenizer(folder), transformers.Qwen2Tokenizer.from_pretrained(folder)
    assert set(tok.control) == set(oracle.get_added_vocab())
    for text in texts(COUNT, [*tok.control]):
        assert tok.encode(text) == oracle(text)["input_ids"], repr(text)
