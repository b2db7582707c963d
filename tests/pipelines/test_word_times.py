"""Times of words: from cross-attention, compared with transformers, and from a CTC model, compared with all paths."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import family
import numpy as np
import pytest
import soundfile
import torch
from sensorium import LLM, AsyncLLM, PoolingParams, SamplingParams, Segment, Transcript, Word
from sensorium.benchmarks import word_times
from sensorium.callers.errors import ConfigError, EngineDeadError, ErrorInfo, InputError
from sensorium.engine.outputs import CompletionOutput, RequestOutput
from sensorium.pipelines.speech import alignment_heads, skipped
from sensorium.pipelines.speech.alignment import alignment_matrix, time_warp, token_starts
from sensorium.pipelines.speech.alignment_heads import find_alignment_heads
from sensorium.pipelines.speech.forced_alignment import CtcAligner, forced_align
from sensorium.pipelines.speech.merge import split_words
from sensorium.pipelines.speech.word_times import AttentionAligner
from sensorium.pipelines.speech.words import (
    drop_segment_words,
    drop_words,
    end_at_pauses,
    merge_punctuation,
    put_in_order,
    separate_segments,
    shorten_long_words,
    split_tokens,
)

RATE = 16_000
SHORT = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(whisper: Path) -> LLM:
    return LLM(whisper, max_num_seqs=4, max_num_batched_tokens=16)


def make_audio(seed: int, seconds: float) -> tuple[np.ndarray, int]:
    return family.make_media("audio", (round(seconds * RATE),), seed), RATE


@pytest.mark.parametrize("shape", [(1, 1, 4), (2, 3, 2), (3, 7, 30), (2, 40, 9), (2, 12, 12)])
def test_time_warp_is_that_of_transformers(shape: tuple[int, int, int]) -> None:
    from transformers.models.whisper import generation_whisper as theirs

    weights = torch.rand(*shape, generator=torch.manual_seed(0)).mul(6).round().softmax(-1)  # with ties
    weights[:, 0] += 0.1
    std, mean = torch.std_mean(weights, -2, keepdim=True, unbiased=False)
    expected = theirs._median_filter((weights - mean) / std.clamp(min=1e-20), 7).mean(0).double().numpy()
    matrix = alignment_matrix(weights)
    assert np.array_equal(matrix, expected)
    for costs in (-matrix, np.zeros_like(matrix)):
        assert all(map(np.array_equal, time_warp(costs), theirs._dynamic_time_warping(costs)))


def test_weights_are_those_of_transformers(whisper: Path, llm: LLM) -> None:
    """Prompts in chunks of at most 16 tokens, beside each other and after a cached transcription of the same audio."""
    model, processor = family.load(whisper)
    model.set_attn_implementation("eager")
    heads, seen = ((0, 1), (2, 3), (2, 0)), {}
    prompts = []
    for seed in range(3):
        samples = make_audio(seed, 0.7)[0]
        ids = llm.get_tokenizer().encode("<|startoftranscript|><|de|><|transcribe|><|notimestamps|>", False)
        ids += list(range(20, 40 + 7 * seed))
        prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"audio": [(samples, RATE)]}})
        made = processor.feature_extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
        with torch.inference_mode():
            done = model(input_features=made, decoder_input_ids=torch.tensor([ids]), output_attentions=True)
        seen[seed] = torch.stack([done.cross_attentions[layer][0, head] for layer, head in heads])
    llm.generate(prompts[0], SHORT, use_tqdm=False)
    calls = llm.stats.encoder_calls
    found = llm.encode(prompts, PoolingParams(cross_attention=heads), use_tqdm=False)
    for seed, one in enumerate(found):
        assert one.data.shape == seen[seed].shape
        assert (one.data - seen[seed]).abs().max() < 1e-4
    assert llm.stats.encoder_calls == calls + 2


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        ([(0, 9)], r"cross_attention holds \(0, 9\)"),
        ([(7, 0)], "has the layers 0 to 2 with the heads 0 to 3"),
        ([(0,)], "must be a list"),
        ([(0, -1)], "must be a list"),
        ("all", "must be a list"),
        ([(0, 0)] * 2000, "at most 1024"),
    ],
)
def test_wrong_heads(llm: LLM, heads: Any, said: str) -> None:
    prompt = {"prompt_token_ids": [5, 6], "multi_modal_data": {"audio": [make_audio(0, 0.1)]}}
    with pytest.raises(InputError, match=said):
        raise InputError(llm.encode(prompt, PoolingParams(cross_attention=heads), use_tqdm=False)[0].error.message)


def all_words(transcript: Any) -> list[Word]:
    return [word for part in transcript.segments for word in part.words]


def check_words(transcript: Any) -> None:
    found = all_words(transcript)
    assert found
    assert all(0 <= one.start <= one.end <= transcript.duration and 0 <= one.probability <= 1 for one in found)
    assert all(a.end <= b.start for a, b in pairwise(found))
    for part in transcript.segments:
        assert "".join("".join(word.word for word in part.words).split()) == "".join(part.text.split())


@pytest.mark.parametrize("options", [{}, {"sequential": True}])
def test_words_have_times_in_every_mode(llm: LLM, options: dict[str, Any]) -> None:
    """Overlapping windows of several files; a file's words do not depend on the others, and no audio is encoded again."""
    items = [make_audio(1, 4.3), make_audio(2, 0.7), make_audio(3, 2.9)]
    given = {"vad": False, "sampling_params": SHORT, "timestamps": "word", "use_tqdm": False} | options
    llm.reset_mm_cache()
    calls = llm.stats.encoder_calls
    together = llm.transcribe(items, "de", **given)
    assert llm.stats.encoder_calls - calls <= sum(len(one.windows) for one in together)
    for item, one in zip(items, together, strict=True):
        check_words(one)
        (alone,) = llm.transcribe(item, "de", **given)
        assert all_words(alone) == all_words(one)
    plain = llm.transcribe(items, "de", **given | {"timestamps": "segment"})
    assert [one.text for one in plain] == [one.text for one in together]
    del given["use_tqdm"]
    assert all_words(asyncio.run(AsyncLLM(llm).transcribe(items[0], "de", **given))[0]) == all_words(together[0])


def test_a_text_is_aligned_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for skipped speech takes the times that the words have already."""
    times, asked = AttentionAligner.token_times, list[tuple[bytes, tuple[int, ...]]]()

    def record(self: AttentionAligner, model: LLM, item: Any, tokens: Any, *rest: Any) -> Any:
        asked.append((item[0].numpy().tobytes(), tuple(tokens)))
        return times(self, model, item, tokens, *rest)

    monkeypatch.setattr(skipped, "_MIN_CHECKED", 0.3)
    monkeypatch.setattr(AttentionAligner, "token_times", record)
    stops = SamplingParams(temperature=0.0, max_tokens=40, stop=["ignor ignor ignor"])  # cut-off texts are not searched
    given = {"vad": False, "sampling_params": stops, "use_tqdm": False}
    (timed,) = llm.transcribe(make_audio(1, 4.3), "de", timestamps="word", **given)
    assert len(timed.windows) <= len(asked) == len(set(asked))
    asked.clear()
    (plain,) = llm.transcribe(make_audio(1, 4.3), "de", timestamps="segment", **given)
    assert len(plain.windows) <= len(asked), "else nothing was searched"
    assert timed.text == plain.text


def test_words_of_a_core_in_another_process(whisper: Path, llm: LLM) -> None:
    item = make_audio(1, 1.6)
    given = {"vad": False, "sampling_params": SHORT, "timestamps": "word", "use_tqdm": False}
    with LLM(whisper, max_num_seqs=4, max_num_batched_tokens=16, engine_process=True) as apart:
        assert all_words(apart.transcribe(item, "de", **given)[0]) == all_words(llm.transcribe(item, "de", **given)[0])


def test_heads_of_the_generation_config(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    speech = llm.speech
    assert speech.alignment().heads == tuple(product((1, 2), range(4)))  # the last half
    assert speech.alignment().step == 0.02
    monkeypatch.setitem(speech.files.generation, "alignment_heads", [[0, 1], [2, 3]])
    assert speech.alignment().heads == ((0, 1), (2, 3))
    for wrong in ([[3, 0]], [[0, 4]], [[0]], "all", [[0, "a"]], 7):
        monkeypatch.setitem(speech.files.generation, "alignment_heads", wrong)
        with pytest.raises(ConfigError, match="alignment_heads in generation_config"):
            speech.alignment()


def test_starts_count_from_the_first_token_after_the_prefix() -> None:
    weights = torch.full((1, 7, 40), 0.001)
    for row, (first, stop) in enumerate(pairwise((0, 10, 20, 30, 35, 40)), 1):  # row i predicts token i + 1
        weights[0, row, first:stop] = 1
    assert token_starts(weights, 2, 40).tolist() == [0, 10, 20, 30, 35]


def timed(*words: str, step: float = 0.5) -> list[Word]:
    return [Word(i * step, (i + 1) * step, word, 1.0) for i, word in enumerate(words)]


def test_tokens_become_words() -> None:
    pieces = [" Don", "'t", " say", " (", "no", ")", "!", ' "', "well", "-", "known", '"']
    decode = lambda ids: "".join(pieces[i] for i in ids)  # noqa: E731
    split = split_tokens(range(len(pieces)), decode, "en")
    assert [count for _, count in split] == [2, 1, 2, 1, 1, 2, 2, 1]
    merged = merge_punctuation(timed(*(text for text, _ in split)))
    assert [one.word for one in merged] == [" Don't", " say", " (no)!", ' "well', '-known"']
    letters = "中文".encode()
    bytes_of = lambda ids: bytes(letters[i] for i in ids).decode(errors="replace")  # noqa: E731
    assert split_tokens(range(6), bytes_of, "zh") == [("中", 3), ("文", 3)]


def test_pauses_are_not_part_of_words() -> None:
    words = [*timed(" a", " b", " c."), Word(1.5, 6.0, " d", 1.0), Word(6.0, 6.5, " e", 1.0), Word(6.5, 12, " f.", 1.0)]
    found = shorten_long_words(words)
    assert [(one.start, one.end) for one in found[3:]] == [(5.0, 6.0), (6.0, 6.5), (6.5, 7.5)]


def test_words_begin_and_end_at_pauses() -> None:
    def moved(*times: tuple[float, float], pauses: Sequence[tuple[float, float]] = ()) -> list[tuple[float, float]]:
        return [(word.start, word.end) for word in end_at_pauses([Word(*own, " a", 1.0) for own in times], pauses)]

    silence = (0.0, 0.4)
    assert moved((0.0, 0.7), pauses=[silence]) == [(0.4, 0.7)], "a first word begins after the silence before it"
    assert moved((1.0, 1.2), (1.2, 2.5), pauses=[(1.5, 2.0)]) == [(1.0, 1.2), (1.2, 2.5)], "a pause inside a word"
    assert moved((1.0, 1.4), (1.4, 2.5), pauses=[(1.5, 2.0)]) == [(1.0, 1.5), (2.0, 2.5)], "the next word begins too early"
    assert moved((1.0, 1.7), (1.7, 2.5), pauses=[(1.5, 2.0)]) == [(1.0, 1.5), (2.0, 2.5)], "both meet in the pause"
    assert moved((1.0, 1.3), pauses=[(1.6, 2.0)]) == [(1.0, 1.6)], "a last word ends too early"
    assert moved((1.0, 1.3), pauses=[(1.9, 2.0)]) == [(1.0, 1.3)], "speech that no word has is not the word's"
    assert moved((1.0, 1.3), (1.4, 1.8), pauses=[(1.5, 1.6)])[0] == (1.0, 1.5)
    assert moved((1.5, 1.6), pauses=[(1.4, 1.7)]) == [(1.5, 1.6)], "a word in silence stays"
    assert moved() == moved(pauses=[silence]) == []


def test_words_are_dropped_with_their_text() -> None:
    part = Segment(0.0, 2.0, 'one, "two" three four', words=tuple(timed(" one,", ' "two"', " three", " four")))
    (left,), (right,) = drop_segment_words([part], 1, last=True), drop_segment_words([part], 2, last=False)
    assert ([word.word for word in left.words], left.text) == ([" one,", ' "two"', " three"], 'one, "two" three')
    assert ([word.word for word in right.words], right.text) == ([" three", " four"], "three four")
    assert drop_words(timed("中", "文"), "文", last=False) == (Word(0.5, 1.0, "文", 1.0),)


def test_segments_that_share_words_do_not_overlap() -> None:
    """A segment that loses a third of its words loses a third of its time, and what still overlaps meets in the middle."""
    (left,) = drop_segment_words([Segment(0.0, 3.0, "a b c")], 1, last=True)
    (right,) = drop_segment_words([Segment(1.0, 4.0, "b c d")], 1, last=False)
    assert (left.start, left.end, right.start, right.end) == (0.0, 2.0, 2.0, 4.0)
    before, after = separate_segments([Segment(0.0, 3.0, "a")], [Segment(2.0, 4.0, "b"), Segment(4.0, None, "c")])
    assert [(part.start, part.end) for part in (*before, *after)] == [(0.0, 2.5), (2.5, 4.0), (4.0, None)]


def test_the_benchmark_compares_words_that_both_texts_have() -> None:
    own = [(0.0, 0.5, " Ask"), (0.5, 1.0, " not,"), (1.0, 1.5, " you")]
    other = [(0.1, 0.5, " ask"), (0.4, 0.9, " now"), (1.0, 1.7, " you.")]
    found = [(round(a, 6), round(b, 6)) for a, b in word_times.pairs(own, other)]
    assert found == [(0.1, 0.0), (0.0, 0.2)]


def test_words_without_a_length_get_one_where_there_is_room() -> None:
    words = [(0.5, 0.5), (0.55, 0.55), (0.55, 0.9), (2.0, 2.0), (3.0, 3.0)]
    parts = [Segment(0.0, 3.0, "a", words=tuple(Word(start, end, " a", 1.0) for start, end in words))]
    (part,) = put_in_order(parts, 3.0)
    found = [(word.start, word.end) for word in part.words or ()]
    assert found == [(0.5, 0.55), (0.55, 0.55), (0.55, 0.9), (2.0, 2.1), (3.0, 3.0)]


def test_words_are_put_in_order_window_by_window() -> None:
    """The next window's first word limits the last one of a window; without it, the window's end does."""
    words = (Word(0.5, 1.0, " a", 1.0), Word(2.0, 2.0, " b", 1.0))
    for following, end in ((2.04, 2.04), (1.0, 2.0), (None, 2.1), (9.0, 2.1)):
        (part,) = put_in_order([Segment(0.0, 3.0, "a b", words=words)], 3.0, 0.7, following)
        assert [(word.start, word.end) for word in part.words or ()] == [(0.7, 1.0), (2.0, end)]
    (part,) = put_in_order([Segment(0.0, 2.0, "a b", words=words)], 2.05)
    assert (part.words or ())[-1].end == 2.05


def test_times_are_monotone_and_inside_the_file() -> None:
    parts = [Segment(0.0, 1.0, "a b", words=tuple(timed(" a", " b"))), Segment(0.9, 5, "c", words=(Word(0.8, 9, " c", 1.0),))]
    found = put_in_order(parts, 3.0)
    assert [(word.start, word.end) for part in found for word in part.words] == [(0, 0.5), (0.5, 1.0), (1.0, 3.0)]
    assert [(part.start, part.end) for part in found] == [(0, 1.0), (1.0, 3.0)]


@pytest.mark.parametrize("ids", [[], [1], [1, 1], [1, 2, 1], [2, 2, 3]])
def test_forced_alignment_is_the_best_of_all_paths(ids: list[int]) -> None:
    scores = torch.randn(6, 4, generator=torch.manual_seed(1)).log_softmax(-1).numpy()

    def collapsed(path: tuple[int, ...]) -> list[int]:
        return [b for a, b in pairwise((0, *path)) if b and a != b]

    paths = [path for path in product(range(4), repeat=6) if collapsed(path) == ids]
    best = max(paths, key=lambda path: sum(scores[range(6), list(path)]))
    found = forced_align(scores, ids, 0)
    assert [0 if one < 0 else ids[one] for one in found] == list(best)
    assert forced_align(scores[:2], [1, 2, 3], 0) is None


def test_forced_alignment_of_a_long_text() -> None:
    """The path names all 150 characters, and its score is that of the best walk through a matrix of transitions."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 4, 150).tolist()
    scores = torch.from_numpy(rng.standard_normal((600, 4))).log_softmax(-1).numpy()
    labels = [0, *(label for one in ids for label in (one, 0))]
    allowed = np.full((len(labels), len(labels)), -np.inf)
    for i, label in enumerate(labels):
        allowed[i, max(0, i - (2 if label and label != labels[i - 2] else 1)) : i + 1] = 0
    best = np.where(np.arange(len(labels)) < 2, scores[0, labels], -np.inf)
    for row in scores[1:]:
        best = (allowed + best).max(1) + row[labels]
    path = forced_align(scores, ids, 0)
    found = [0 if one < 0 else ids[one] for one in path]
    assert np.isclose(scores[range(600), found].sum(), max(best[-2:]), rtol=1e-12)
    assert [b for a, b in pairwise([-1, *path]) if b not in (a, -1)] == list(range(150))


@pytest.fixture(scope="module")
def ctc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small random Wav2Vec2ForCTC."""
    import json

    import transformers as tf

    folder = tmp_path_factory.mktemp("models") / "ctc"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    convolutions = {"conv_dim": [8, 8], "conv_stride": [20, 16], "conv_kernel": [20, 16], "num_feat_extract_layers": 2}
    letters = {token: i for i, token in enumerate(["<pad>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"])}
    more = {"vocab_size": len(letters), "pad_token_id": 0, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    torch.manual_seed(0)
    tf.Wav2Vec2ForCTC(tf.Wav2Vec2Config(**sizes, **convolutions, **more)).eval().save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(letters))
    return folder


def test_aligner_times_the_words_of_any_model(llm: LLM, ctc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"vad": False, "sampling_params": SHORT, "timestamps": "word", "use_tqdm": False}
    check_words(llm.transcribe(make_audio(1, 2.9), "de", aligner=ctc, **given)[0])
    speech = SimpleNamespace(**{name: getattr(llm.speech, name) for name in dir(llm.speech) if name[0] != "_"})
    speech.has_timestamps, speech.alignment = False, lambda: None
    monkeypatch.setattr(llm.engine, "speech", speech)
    found = llm.transcribe([make_audio(1, 2.9), make_audio(2, 0.5)], "de", aligner=ctc, **given)
    for one in found:
        check_words(one)
    with pytest.raises(InputError, match="give aligner= the folder of a CTC model"):
        llm.transcribe(make_audio(1, 1), "de", **given)
    with pytest.raises(ConfigError, match="no-folder cannot be loaded as a CTC model"):
        llm.transcribe(make_audio(1, 1), "de", **given | {"aligner": "no-folder"})
    aligner = CtcAligner(ctc, RATE)
    words = aligner.align(torch.from_numpy(make_audio(3, 1.0)[0]), ["one", " 22", " three"])
    assert words[0].end <= words[1].start <= words[1].end <= words[2].start
    assert words[1].probability == 0
    assert [one.end for one in aligner.align(torch.zeros(2000), ["one", " two" * 9])] == [0.0625, 0.125]
    with pytest.raises(ConfigError, match="takes audio of 16000 Hz"):
        CtcAligner(ctc, 8000)


@pytest.mark.parametrize("content", ["[1, 2]", '{"a": 999}', '{"a": "b"}'])
def test_a_vocabulary_that_does_not_fit(ctc: Path, content: str, tmp_path: Path) -> None:
    shutil.copytree(ctc, tmp_path / "ctc")
    (tmp_path / "ctc" / "vocab.json").write_text(content)
    with pytest.raises(ConfigError, match=r"vocab\.json must give each character a number below"):
        CtcAligner(tmp_path / "ctc", RATE)


def test_characters_are_those_of_the_case_that_the_model_knows(ctc: Path) -> None:
    model = CtcAligner(ctc, RATE)._ctc
    assert model.encode(" Hello,") == [model.ids[char] for char in "HELLO"]
    lower = replace(model, ids={char: i for i, char in enumerate("abcdeß")})
    assert lower.encode(" Aß") == [0, 5]
    assert replace(model, ids={"A": 1, "ß": 2, "S": 3}).encode("Aß") == [1, 2]


def times_of(aligner: CtcAligner, loud: list[tuple[float, float]], seconds: float, named: dict[float, str], text: str) -> Any:
    """Return starts and ends of the words of noise that is `loud`, if the model names characters at these seconds only."""
    samples = torch.zeros(round(seconds * RATE))
    for start, end in loud:
        samples[round(start * RATE) : round(end * RATE)] = 0.1 * torch.randn(round(end * RATE) - round(start * RATE))
    logits = torch.zeros(1, len(samples) // 320, len(aligner._ctc.ids))
    logits[..., aligner._ctc.blank] = 9.0
    for at, char in named.items():
        logits[0, round(at * 50), aligner._ctc.ids[char]] = 18.0
    aligner._ctc = replace(aligner._ctc, model=lambda _: SimpleNamespace(logits=logits))
    return [(word.start, word.end) for word in aligner.align(samples, split_words(text))]


def test_words_last_until_their_delimiter_or_a_pause(ctc: Path) -> None:
    """The delimiter ends a word, not its last character. It may lie anywhere in a pause, and follows no last word."""
    aligner, named = CtcAligner(ctc, RATE), {0.6: "A", 0.8: "|", 0.9: "B", 1.9: "|", 2.1: "C"}
    torch.manual_seed(0)
    found = times_of(aligner, [(0.5, 1.1), (2.0, 2.4)], 3.0, named, "a b c")
    assert np.allclose(found, [(0.5, 0.8), (0.8, 1.1), (2.0, 2.4)], atol=0.05)
    assert found[0][1] == found[1][0] == 0.8
    assert found[1][1] < 1.9


def test_words_are_not_extended_over_others_or_far(ctc: Path) -> None:
    """A word does not reach over a word without known characters next to it, and is extended by a limited time only."""
    aligner = CtcAligner(ctc, RATE)
    named = {0.4: "A", 0.5: "|", 0.8: "B"}
    assert np.allclose(times_of(aligner, [(0, 1.4)], 1.4, named, "a 22 b"), [(0.3, 0.42), (0.42, 0.8), (0.8, 1.12)])
    assert np.allclose(times_of(aligner, [(0, 1.4)], 1.4, named, "a b"), [(0.3, 0.5), (0.7, 1.12)])
    assert np.allclose(times_of(aligner, [(0, 1.4)], 1.4, named, "中 a b 中"), [(0, 0.4), (0.4, 0.5), (0.7, 0.82), (0.82, 1.4)])


def test_unknown_words_share_the_time_between_their_neighbours(ctc: Path) -> None:
    words = CtcAligner(ctc, RATE).align(torch.from_numpy(make_audio(1, 2.0)[0]), ["a", "19", "85", "86", "b"])
    spans = [(word.start, word.end) for word in words]
    assert all(a[0] <= a[1] <= b[0] for a, b in pairwise(spans))
    lengths = [end - start for start, end in spans[1:4]]
    assert lengths == pytest.approx([lengths[0]] * 3)


def test_frames_are_a_stride_apart(ctc: Path) -> None:
    """A model has no frame for samples at the end that do not fill one. Models that do not name their stride share the time."""
    model = CtcAligner(ctc, RATE)._ctc
    assert model.step(RATE + 300, 49) == 0.02
    assert replace(model, stride=None).step(RATE, 40) == model.step(RATE, 40) == 0.025


FASTER_WHISPER = "0.00 0.76 1.06 1.46 1.76 2.26 3.88 4.52 5.70 6.02 6.36 6.76 7.02 7.26 8.06 8.66 8.94 9.28 9.5 9.72 9.92 10.22"
"""Starts of the words of jfk.flac in faster-whisper 1.2.1, float32, beam 1."""


@pytest.mark.shared
def test_words_start_where_faster_whisper_says(shared_data: Path) -> None:
    llm = LLM(shared_data / "whisper-tiny.en", dtype="float32", max_num_seqs=4)
    (found,) = llm.transcribe(shared_data / "speech" / "jfk.flac", timestamps="word", use_tqdm=False)
    check_words(found)
    words = all_words(found)
    pairs = zip(words, map(float, FASTER_WHISPER.split()), strict=True)
    differences = {i: abs(word.start - start) for i, (word, start) in enumerate(pairs)}
    for index, word, silence in ((5, " ask", (2.14, 3.26)), (7, " what", (4.48, 5.41))):
        assert words[index].word == word
        assert abs(words[index].start - silence[1]) <= 0.05, "faster-whisper lets it begin where the silence before it does"
        assert differences.pop(index) > 0.8
    assert sorted(differences.values())[len(differences) // 2] <= 0.08
    assert max(differences.values()) <= 0.3


def test_alignment_heads_are_those_that_follow_the_audio() -> None:
    """The shipped checkpoint names the heads that the procedure finds in the shipped clips."""
    root = Path(__file__).parents[2] / "assets"
    with LLM(root / "tiny-asr", dtype="float32") as tiny:
        assert tiny.speech is not None
        rate = tiny.speech.decode_spec.rate
        clips = [soundfile.read(file, dtype="float32")[0] for file in sorted((root / "speech").glob("*.flac"))]
        found = find_alignment_heads(tiny, clips)
        assert [list(pair) for pair in found] == tiny.speech.files.generation["alignment_heads"]
        for few in ([], clips[:1], [np.zeros(rate, np.float32), clips[0]]):
            with pytest.raises(InputError, match="two or more clips of speech"):
                find_alignment_heads(tiny, few)


def test_heads_that_follow_the_last_token_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens in two clips of 20 rows. Head 0 attends to the token that comes next, 1 to the last one, 2 to all rows."""
    weights = torch.full((3, 6, 40), 1e-3)
    for row, place in enumerate([2, 12, 25, 35]):
        weights[0, row + 1, place - 2 : place + 3] = 1.0
        weights[1, row + 2, place - 2 : place + 3] = 1.0
    weights[2] = 1.0
    joined = alignment_heads._Joined(weights, 2, ((2, 20),))
    monkeypatch.setattr(alignment_heads, "_read_heads", lambda *given: [joined])
    rule = SimpleNamespace(sizes=(1, 3), step=0.1)
    engine = SimpleNamespace(speech=SimpleNamespace(alignment=lambda: rule))
    model = SimpleNamespace(engine=engine, config=SimpleNamespace(model="m"))
    assert find_alignment_heads(model, []) == [(0, 0)]
    engine.speech = None
    with pytest.raises(ConfigError, match="no cross-attention heads"):
        find_alignment_heads(model, [])


def test_groups_of_clips_have_their_own_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clips of 12 s fit into a window of 30 s; the prompts of the second pair, whose language is detected, are longer."""
    prefixes = [[1, 2], [1, 2], [1, 2, 3], [1, 2, 3]]
    answer = [CompletionOutput(0, "a", [7, 8], finish_reason="length")]
    heard = [Transcript("a", None, None, None, RequestOutput("", None, prefix, answer)) for prefix in prefixes]
    prompts = list[dict[str, Any]]()
    outputs = [SimpleNamespace(error=None, data=torch.zeros(1, 8, 300)) for _ in range(2)]
    model = SimpleNamespace(
        engine=SimpleNamespace(
            speech=SimpleNamespace(decode_spec=SimpleNamespace(rate=100, max_audio_samples=3000)), eos_token_ids=[9]
        ),
        transcribe=lambda *given, **options: heard,
        encode=lambda given, *rest, **options: prompts.extend(given) or outputs,
    )
    clips = [np.zeros(1200, np.float32)] * 4
    joined = alignment_heads._read_heads(model, clips, None, ((0, 0),), 0.1)
    assert [prompt["prompt_token_ids"] for prompt in prompts] == [[1, 2, 7, 8, 7, 8, 9], [1, 2, 3, 7, 8, 7, 8, 9]]
    assert [one.num_prefix for one in joined] == [2, 3]
    outputs[0] = SimpleNamespace(error=ErrorInfo("out_of_memory", "no room"), data=None)
    assert [one.num_prefix for one in alignment_heads._read_heads(model, clips, None, ((0, 0),), 0.1)] == [3]
    outputs[1] = SimpleNamespace(error=ErrorInfo("engine_dead", "it ended"), data=None)
    with pytest.raises(InputError, match="no room") as raised:
        alignment_heads._read_heads(model, clips, None, ((0, 0),), 0.1)
    assert raised.value.info.code == "out_of_memory"
    heard[:] = [Transcript("", None, None, ErrorInfo("engine_dead", "it ended"), RequestOutput("", None, [], answer))] * 4
    with pytest.raises(EngineDeadError, match="it ended"):
        alignment_heads._read_heads(model, clips, None, ((0, 0),), 0.1)


@pytest.mark.shared
def test_alignment_heads_of_a_published_checkpoint(shared_data: Path) -> None:
    """Most of the heads found in three clips are among those that OpenAI measured."""
    with LLM(shared_data / "whisper-tiny.en", dtype="float32") as tiny:
        files = [shared_data / "speech" / name for name in ("jfk.flac", "lj001_0003.flac", "lj001_0005.flac")]
        found = find_alignment_heads(tiny, [soundfile.read(file, dtype="float32")[0] for file in files])
        assert tiny.speech is not None
        named = set(map(tuple, tiny.speech.files.generation["alignment_heads"]))
        assert len(named & set(found)) >= 0.75 * len(found) >= 3
