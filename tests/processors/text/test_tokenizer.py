"""Tokenizers of both file formats, and streaming that never splits a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import SPECIALS, fast_tokenizer, load_processor, token_ids, tokenizer
from sensorium.callers.errors import CheckpointError, InputError
from sensorium.processors.text.tokenizer import StreamDecoder, Tokenizer
from tokenizers.processors import TemplateProcessing

EMOJI = "naïve 👩‍👩‍👧 你好 e\u0301 🚀\n\tdef f(x): return x"


@pytest.fixture(scope="module")
def tok(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture(scope="module")
def tekken() -> Tokenizer:
    import mistral_common

    return Tokenizer(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json")


def test_ids_equal_transformers(tok, checkpoint):
    oracle = load_processor(checkpoint).tokenizer
    for text in (EMOJI, "", " ", "<|im_start|>user\nhi<|im_end|>\n", "a<|image_pad|><|image_pad|>b"):
        assert tok.encode(text) == oracle(text)["input_ids"]
        assert tok.decode(tok.encode(text)) == oracle.decode(oracle(text)["input_ids"], skip_special_tokens=True)
        assert tok.decode(tok.encode(text), skip_special_tokens=False) == text
    assert tok.special_tokens["eos_token"] == "<|im_end|>"


def test_specials(tok):
    assert tok.specials == token_ids()
    assert tok.token_to_id("<|im_end|>") == token_ids()["<|im_end|>"]
    assert tok.token_to_id("no such token") is None
    assert tok.is_special_token(token_ids()["<|image_pad|>"])
    assert not tok.is_special_token(3)
    assert tok.vocab_size == tokenizer().get_vocab_size()


def test_bytes_of_tokens_add_up_to_the_text(tok, tekken, tmp_path):
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models

    vocab = {name: number for number, name in enumerate(["a", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    fast = Fast(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fast.save(str(tmp_path / "tokenizer.json"))
    for one in (tok, tekken, Tokenizer(tmp_path)):
        for text in (EMOJI, "\ufffd", "aé"):
            ids = one.encode(text, add_special_tokens=False)
            assert b"".join(map(one.token_bytes, ids)) == text.encode()
    assert any("\ufffd" in tok.decode([one]) for one in tok.encode(EMOJI))


@given(st.lists(st.one_of(st.sampled_from(SPECIALS), st.text(max_size=6)), max_size=8).map("".join))
def test_untrusted_text_never_becomes_special(tok, text):
    ids = tok.encode_ordinary(text)
    assert not tok.all_special_ids & set(ids)
    assert tok.decode(ids, skip_special_tokens=False) == text


def test_pieces_are_joined_for_text_and_cut_for_control(tok):
    text = "<|im_start|>user\nhello world<|im_end|>\n"
    whole = tok.encode(text)
    assert tok.encode_pieces([(text, True)]) == whole
    assert (
        tok.encode_pieces([("<|im_", True), ("start|>us", True), ("er\nhello wo", False), ("rld<|im_end|>\n", True)]) == whole
    )
    cut = tok.encode_pieces([("<|im_start|>user\n<", True), ("|im_end|><|im_end|>", False), ("<|im_end|>", True)])
    assert sum(tok.is_special_token(i) for i in cut) == 2  # those of the trusted pieces
    assert tok.decode(cut, skip_special_tokens=False) == "<|im_start|>user\n<|im_end|><|im_end|><|im_end|>"
    assert tok.encode_pieces([("a<x>", True), ("<x>", False)], {"<x>": 7}).count(7) == 1


@pytest.mark.parametrize(("pieces", "before", "after"), [("<s> $A", [4], []), ("$A </s>", [], [5]), ("<s> $A </s>", [4], [5])])
def test_a_rendered_chat_gets_the_tokens_that_texts_get(tmp_path, pieces, before, after):
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, processors

    fast = Fast(models.BPE({c: i for i, c in enumerate("abcd")}, []))
    fast.add_special_tokens(["<s>", "</s>"])
    fast.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=[("<s>", 4), ("</s>", 5)])
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    tok = Tokenizer(tmp_path)
    assert tok.add_special_tokens([0, 1]) == [*before, 0, 1, *after] == tok.encode("ab")
    assert tok.add_special_tokens([4, 1]) == [4, 1]  # the template wrote BOS
    assert tok.add_special_tokens([]) == [*before, *after]


def test_added_tokens_that_are_not_special_are_control(tmp_path):
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Fast

    fast = Fast(models.BPE({c: i for i, c in enumerate("</think>ab")}, []))
    fast.add_tokens([AddedToken("</think>", special=False, normalized=False), AddedToken("a", normalized=False)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tok = Tokenizer(tmp_path)
    think = tok.token_to_id("</think>")
    assert tok.control == {"</think>": think}  # "a" is a word of the vocabulary too
    assert tok.encode("a</think>")[1] == think
    assert think not in tok.encode_ordinary("a</think>b")
    assert tok.encode_pieces([("a</think>", False), ("</think>", True)]).count(think) == 1
    assert tok.decode(tok.encode_ordinary("a</think>b")).replace(" ", "") == "a</think>b"


def test_a_normaliser_cannot_make_specials_of_text(tmp_path):
    from tokenizers import AddedToken, models, normalizers
    from tokenizers import Tokenizer as Fast

    fast = Fast(models.BPE({c: i for i, c in enumerate("<s>a")}, []))
    fast.normalizer = normalizers.NFKC()
    fast.add_special_tokens([AddedToken("<s>", special=True, normalized=True)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tok = Tokenizer(tmp_path)
    assert tok.all_special_ids & set(tok.encode("\uff1cs\uff1ea"))  # trusted text may
    assert not tok.all_special_ids & set(tok.encode_pieces([("\uff1cs\uff1ea", True)]))
    assert tok.all_special_ids & set(tok.encode_pieces([("<s>a", True)]))


@given(st.lists(st.sampled_from(["<s>", "\uff1cs\uff1e", "<", "s>", "a", "\u4f60", "<unk>"]), max_size=6).map("".join))
def test_specials_that_are_words_of_the_vocabulary_stay_text(tmp_path_factory, text):
    from tokenizers import AddedToken, models, normalizers
    from tokenizers import Tokenizer as Fast

    fast = Fast(models.Unigram([(word, -1.0) for word in ("<unk>", "<s>", "<", "s", ">", "a")], 0))
    fast.normalizer = normalizers.NFKC()
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>")])
    folder = tmp_path_factory.mktemp("words")
    fast.save(str(folder / "tokenizer.json"))
    tok = Tokenizer(folder)
    assert fast.encode("<s>").ids == [tok.specials["<s>"]]
    assert tok.specials["<s>"] not in tok.encode_ordinary(text)
    assert tok.encode_pieces([(text, True)]).count(tok.specials["<s>"]) == text.count("<s>")
    if text.isascii() and "<unk>" not in text:
        assert tok.decode(tok.encode_ordinary(text)).replace(" ", "") == text


def test_a_control_character_that_has_no_other_form_is_refused(tmp_path):
    from tokenizers import AddedToken, models
    from tokenizers import Tokenizer as Fast

    fast = Fast(models.BPE({c: i for i, c in enumerate("ab@")}, []))
    fast.add_special_tokens([AddedToken("@", special=True, normalized=False)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tok = Tokenizer(tmp_path)
    assert tok.encode_ordinary("ab") == [0, 1]
    with pytest.raises(InputError, match="a one-character control token"):
        tok.encode_ordinary("a@b")


@settings(max_examples=150)
@given(st.data())
def test_stream_adds_up_and_shows_whole_characters(tok, data):
    ids = data.draw(
        st.one_of(
            st.lists(st.integers(0, tok.vocab_size - 1), max_size=60),
            st.text(alphabet="aé你🚀👩‍ \n", max_size=30).map(tok.encode_ordinary),
        )
    )
    skip = data.draw(st.booleans())
    stream, pieces = StreamDecoder(tok, skip), []
    start = 0
    while start < len(ids):
        step = data.draw(st.integers(1, 4))
        pieces.append(stream.push(ids[start : start + step]))
        start += step
    assert "".join([*pieces, stream.flush()]) == tok.decode(ids, skip)


@pytest.mark.parametrize("skip", [True, False])
def test_a_stream_of_incomplete_characters_is_decoded_in_linear_time(tok, skip):
    start, end = tok.encode_ordinary("🚀")[0], tok.specials["<|im_end|>"]
    work = []

    class Counted:
        def decode(self, ids, skip_special_tokens):
            work.append(len(ids))
            return tok.decode(ids, skip_special_tokens)

    for ids in ([start] * 2000, [start] + [end] * 2000, ([start] * 50 + tok.encode_ordinary("a🚀")) * 30):
        work.clear()
        stream = StreamDecoder(Counted(), skip)
        text = "".join([*(stream.push([number]) for number in ids), stream.flush()])
        assert text == tok.decode(ids, skip)
        assert sum(work) < 150 * len(ids)


def test_removal_of_special_tokens_takes_one_pass(tok):
    name = "<|im_end|>"
    deep = ""
    for _ in range(2000):
        deep = name[:5] + deep + name[5:]
    calls = []

    class Counted(dict):
        def __contains__(self, text):
            calls.append(text)
            return super().__contains__(text)

    tok.specials, own = Counted(tok.specials), tok.specials
    try:
        assert tok.remove_special_tokens(f"a{deep}b<|im_<|im_end|>") == "ab<|im_"
        assert tok.remove_special_tokens("<|im<|im_end|>_end|>Ann") == "Ann"  # at the start, shorter than other tokens
        assert len(calls) < 5 * len(deep)
    finally:
        tok.specials = own


def test_an_emoji_comes_out_in_one_piece(tok):
    stream = StreamDecoder(tok)
    ids = tok.encode_ordinary("🚀")
    assert len(ids) == 4
    assert [stream.push([i]) for i in ids] == ["", "", "", "🚀"]
    assert stream.push([]) == stream.flush() == ""


def test_tekken_equals_mistral_common(tekken):
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    oracle = Tekkenizer.from_file(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json")
    assert tekken.encode(EMOJI) == oracle.encode(EMOJI, bos=True, eos=False)
    assert tekken.encode_ordinary("[INST]") == oracle.encode("[INST]", bos=False, eos=False)
    inst = oracle.get_special_token("[INST]")
    assert tekken.encode("[INST]hi", add_special_tokens=False) == [inst, *oracle.encode("hi", bos=False, eos=False)]
    assert tekken.token_to_id("[INST]") == inst
    assert tekken.token_to_id("hello there, two") is None
    assert tekken.decode(tekken.encode(EMOJI)) == EMOJI
    assert tekken.vocab_size == oracle.n_words


def test_tekken_streams(tekken):
    stream, ids = StreamDecoder(tekken), tekken.encode(EMOJI)
    pieces = [stream.push([i]) for i in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.flush() == EMOJI


def test_truncation_never_returns_more_than_max_length(tmp_path):
    words = fast_tokenizer(["[CLS]", "[SEP]"])
    ids = [(name, words.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    ends = TemplateProcessing(single="[CLS] $A [SEP] [SEP]", special_tokens=ids)
    words.backend_tokenizer.post_processor = ends
    words.save_pretrained(tmp_path)
    mine = Tokenizer(tmp_path)
    for length in range(1, 7):
        assert len(mine("import os", truncation=True, max_length=length).input_ids) == min(
            length, len(mine.encode("import os"))
        )


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read"):
        Tokenizer(tmp_path)
