"""`LLM.speak` of a model that turns texts into speech: samples, times, parts, voices and errors."""

from __future__ import annotations

import asyncio
import ctypes.util
import json
import sys
from types import ModuleType, SimpleNamespace

import kokoro_files
import pytest
import torch
from kokoro_files import CONFIG, random_voice
from sensorium import LLM, AsyncLLM, CheckpointError, ConfigError, InputError, PoolingParams, SamplingParams
from sensorium.engine.voices import Voices
from sensorium.engine.worker import model_runner
from sensorium.mm.speech import PhonemeRule
from sensorium.pipelines.speech.espeak import espeak
from sensorium.pipelines.speech.misaki import misaki
from sensorium.pipelines.speech.phonemes import divide, split_first_part, words_of_phonemes, words_of_text

PHONEMES = "hɛlˈO wˈɜɹld, ðˈɪs ɪz ɐ tˈɛst."
RULE = PhonemeRule(CONFIG["vocab"], 0, 510, 256, 24_000, 600)
needs_espeak = pytest.mark.skipif(ctypes.util.find_library("espeak-ng") is None, reason="espeak-ng is not installed")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder, tensors = tmp_path_factory.mktemp("kokoro") / "model", kokoro_files.random_tensors()
    kokoro_files.write_checkpoint(folder, tensors)
    return folder, tensors


@pytest.fixture(scope="module")
def llm(saved):
    with LLM(saved[0], device="cpu", max_num_seqs=4) as made:
        yield made


def letters(text):
    """Stand in for the phonemes of a text: its letters that are phonemes."""
    return "".join(letter for letter in text.lower() if letter in CONFIG["vocab"])


def spoken(llm, *args, **options):
    (speech,) = llm.speak(*args, use_tqdm=False, **options)
    assert speech.error is None, speech.error
    return speech


def test_samples_are_those_of_the_model(llm):
    """The encoder's states from `encode`, and the rest of the network called directly."""
    speech = spoken(llm, phonemes=PHONEMES, voice="bm_ben", seed=3, speed=1.5)
    ids = [0, *(CONFIG["vocab"][phoneme] for phoneme in PHONEMES), 0]
    assert speech.output.prompt_token_ids == ids
    (pooled,) = llm.encode([{"prompt_token_ids": ids}], PoolingParams(pooling="tokens", normalize=False), use_tqdm=False)
    model = llm.engine.loop.core.executor.runner.model
    style = random_voice(CONFIG, 1)[len(PHONEMES) - 1, 0]
    with torch.inference_mode():
        frames, samples = model.speak(torch.tensor(ids), pooled.outputs.data, style, 1.5, 3)
    assert speech.samples.equal(samples)
    assert speech.sampling_rate == 24_000
    bounds = (frames.cumsum(0) / 40).tolist()
    assert [phoneme for phoneme, _, _ in speech.phoneme_times] == list(PHONEMES)
    assert [start for _, start, _ in speech.phoneme_times] == pytest.approx(bounds[:-2])
    assert [end for _, _, end in speech.phoneme_times] == pytest.approx(bounds[1:-1])


def test_the_encoder_is_transformers(saved, llm):
    module = kokoro_files.published_classes()
    if module is None:
        pytest.skip("the package kokoro is not installed")
    ids = [0, *(CONFIG["vocab"][phoneme] for phoneme in PHONEMES), 0]
    (pooled,) = llm.encode([{"prompt_token_ids": ids}], PoolingParams(pooling="tokens", normalize=False), use_tqdm=False)
    with torch.no_grad():
        states = kokoro_files.make_oracle(module, CONFIG, saved[1]).bert(torch.tensor([ids]))[0]
    torch.testing.assert_close(pooled.outputs.data, states, rtol=0, atol=2e-4)


def test_words_have_times(llm):
    speech = spoken(llm, "Hello there, friend.", phonemizer=letters)
    assert speech.text == "Hello there, friend."
    assert [word.word for word in speech.words] == ["Hello", "there", "friend"]
    times = [time for word in speech.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < speech.seconds
    first = next(start for phoneme, start, _ in speech.phoneme_times if phoneme == "h")
    assert speech.words[0].start == first


def test_parts_are_the_whole_and_texts_one_batch(llm):
    texts = ["this is a sentence that is really rather long. and this is another one, which also is long!", "one more."]
    whole, other = llm.speak(texts, phonemizer=letters, seed=3, use_tqdm=False)
    parts = list(llm.stream_speak(texts[0], phonemizer=letters, seed=3))
    assert len(parts) == 2
    assert torch.cat([part.samples for part in parts]).equal(whole.samples)
    assert [word for part in parts for word in part.words] == list(whole.words)
    assert " ".join(part.text for part in parts) == whole.text == texts[0]
    assert other.text == texts[1]
    assert spoken(llm, texts[1], phonemizer=letters, seed=3).samples.equal(other.samples)

    async def collect():
        alone = await AsyncLLM(llm).speak(texts, phonemizer=letters, seed=3)
        streamed = [part async for part in AsyncLLM(llm).stream_speak(texts[0], phonemizer=letters, seed=3)]
        return alone, streamed

    alone, streamed = asyncio.run(collect())
    assert alone[0].samples.equal(whole.samples)
    assert [part.words for part in streamed] == [part.words for part in parts]


def test_a_long_first_sentence_is_streamed_from_its_first_clause(llm):
    """The parts of a stream equal `speak` of the same words. Only a long first sentence is cut."""
    clause, rest, last = (
        "though it was late in the year,",
        "they all went out to the sea again.",
        "and one more, which is long too, yes it is, so it was.",
    )
    parts = list(llm.stream_speak(f"{clause} {rest} {last}", phonemizer=letters, seed=3))
    assert [part.text for part in parts] == [clause, rest, last]
    for part in parts:
        assert spoken(llm, part.text, phonemizer=letters, seed=3).samples.equal(part.samples)
    short = "though it was late, they all went out to the sea again and again."
    assert [part.text for part in llm.stream_speak(short, phonemizer=letters)] == [short]
    assert len(list(llm.stream_speak("one, two. ", phonemizer=letters))) == 1
    halves = split_first_part(list(divide(words_of_phonemes("a" * 30 + ", " + "b" * 30 + ".", RULE), 510)))
    assert ["".join(word.phonemes for word in half) for half in halves] == ["a" * 30 + ", ", "b" * 30 + "."]


def test_voices(llm, saved, tmp_path):
    both = (random_voice(CONFIG, 0) + random_voice(CONFIG, 1)) / 2
    torch.save(both, tmp_path / "both.pt")
    expected = spoken(llm, phonemes=PHONEMES, voice="af_ada,bm_ben", seed=1).samples
    assert spoken(llm, phonemes=PHONEMES, voice=both, seed=1).samples.equal(expected)
    assert spoken(llm, phonemes=PHONEMES, voice=tmp_path / "both.pt", seed=1).samples.equal(expected)
    assert not spoken(llm, phonemes=PHONEMES, voice="af_ada", seed=1).samples.equal(expected)
    first = spoken(llm, phonemes=PHONEMES, seed=1).samples
    assert first.equal(spoken(llm, phonemes=PHONEMES, voice="af_ada", seed=1).samples)
    assert Voices({}, RULE).style(torch.ones(3, 256), 9) == (1.0,) * 256  # more phonemes than the voice has styles for
    for wrong in (
        "af_eva",
        7,
        torch.zeros(3, 5),
        torch.full((2, 1, 256), torch.nan),
        torch.full((2, 1, 256), 1e300, dtype=torch.float64),
        ",".join(["af_ada"] * 9),
    ):
        with pytest.raises(InputError) as caught:
            llm.speak(phonemes=PHONEMES, voice=wrong)
        assert caught.value.info.param == "voice"
    uneven = Voices({name: tmp_path / f"{name}.pt" for name in ("one", "two")}, RULE)
    for length, file in enumerate(uneven.files.values(), 1):
        torch.save(torch.ones(length, 1, 256), file)
    with pytest.raises(InputError) as caught:
        uneven.find("one,two")
    assert caught.value.info.param == "voice"
    with pytest.raises(InputError, match="af_ada, bm_ben"):
        llm.speak(phonemes=PHONEMES, voice="af_eva")


@pytest.mark.parametrize(
    ("arguments", "options", "param"),
    [
        ((), {}, "phonemes"),
        (("a",), {"phonemes": "a"}, "phonemes"),
        (("",), {}, "messages"),
        ((["a", " "],), {}, "messages"),
        ((5,), {}, "messages"),
        (("a" * 70_000,), {}, "messages"),
        ((), {"phonemes": "aü"}, "phonemes"),
        (("a",), {"speed": 0.1}, "speed"),
        (("a",), {"speed": "fast"}, "speed"),
        (("a",), {"seed": 0.5}, "seed"),
        (("a",), {"language": 7}, "language"),
        (("a",), {"phonemizer": 7}, "phonemizer"),
        (("a", SamplingParams()), {}, "sampling_params"),
    ],
)
def test_wrong_arguments(llm, arguments, options, param):
    with pytest.raises(InputError) as caught:
        llm.speak(*arguments, **options)
    assert caught.value.info.param == param


def test_texts_that_cannot_be_spoken(llm):
    nothing, failed, good = llm.speak(["...", "1", "a b."], phonemizer=lambda text: text if text != "1" else 5, use_tqdm=False)
    assert nothing.error.param == "messages"
    assert failed.error.param == "phonemizer"
    assert good.error is None
    with pytest.raises(InputError) as caught:
        list(llm.stream_speak(["a.", "b."], phonemizer=letters))
    assert caught.value.info.param == "messages"


def test_prompts_that_cannot_be_spoken_do_not_repeat_others(llm, monkeypatch):
    """Each of a step is spoken once, and fails alone."""
    calls, errors = [], {"b": InputError("it is long", code="over_limit"), "d": RuntimeError("it broke")}

    def speak(sequence, model, device):
        calls.append(sequence.request_id)
        if sequence.request_id in errors:
            raise errors[sequence.request_id]
        return torch.ones(3)

    monkeypatch.setattr(model_runner, "spoken_prompt", speak)
    results = llm.engine.loop.core.executor.runner._speak([SimpleNamespace(request_id=name) for name in "abcd"])
    assert calls == list("abcd")
    codes = {name: None if result.error is None else result.error.code for name, result in results.items()}
    assert codes == {"a": None, "b": "over_limit", "c": None, "d": "internal"}


def test_long_texts_are_cut(llm):
    """Every part has at most 510 phonemes, and is cut at a sentence, a clause, a word, or anywhere."""
    sentence = "this is a sentence, and it goes on; "
    words = words_of_text(sentence * 40 + "done. yes.", letters, RULE)
    parts = ["".join(word.phonemes for word in part) for part in divide(words, 510)]
    assert "".join(parts) == "".join(word.phonemes for word in words)
    assert max(map(len, parts)) <= 511  # with the space after the last word
    assert all(part.rstrip()[-1] in ",;." for part in parts)
    unbroken = list(divide(words_of_phonemes("a" * 1200, RULE), 510))
    assert [sum(len(word.phonemes) for word in part) for part in unbroken] == [510, 510, 180]
    many = list(divide(words_of_text("one two three. " * 8, letters, RULE), 510))
    assert all(sum(len(word.phonemes) for word in part) >= 40 for part in many[:-1])
    quoted = words_of_text('"a sentence that is lon enouh. another one that is lon." he said then', letters, RULE)
    assert ["".join(word.phonemes for word in part)[-2:] for part in divide(quoted, 510)] == ['" ', "n "]
    speech = spoken(llm, "a " * 260, phonemizer=letters)
    assert len(speech.words) == 260


def test_runs_of_marks_are_read_in_one_pass():
    """A run of marks within a word ends nothing. It is looked at once: from each of its marks on, it would take minutes."""
    (only,) = words_of_text(";" * 65_000 + "a", lambda piece: "a", RULE)
    assert only.phonemes == "a "
    ended = words_of_text("a?!;b ?! c", letters, RULE)
    assert [word.text for word in ended] == ["a?!;b", "?!", "c"]


def test_spaces_alone_are_not_spoken(llm):
    parts = list(llm.stream_speak(phonemes=" " * 600 + "a", seed=3))
    assert [part.phonemes for part in parts] == ["a"]


@needs_espeak
def test_languages_are_no_paths():
    """espeak-ng reads a file of a voice if a language is the path of one."""
    for name in ("../voices/en", "/etc/hostname", "en-us/", "en\0", "e" * 33, ""):
        with pytest.raises(InputError) as caught:
            espeak().phonemes("hello", name)
        assert caught.value.info.param == "language"
    assert espeak().phonemes("hello", "en-us") == "həlˈO"


@needs_espeak
def test_espeak_reads_texts(llm):
    speech = spoken(llm, "Hello world! It costs 3.5 dollars.", voice="af_ada")
    assert speech.phonemes == "həlˈO wˈɜɹld! ɪt kˈɔsts θɹˈi pYnt fˈIv dˈɑləɹz."
    assert [word.word for word in speech.words] == ["Hello", "world", "It", "costs", "3.5", "dollars"]
    assert spoken(llm, "hello", voice="bm_ben").phonemes == "həlˈQ"
    assert "(" not in spoken(llm, "Bonjour world", language="fr-fr").phonemes  # the mark of a word in another language
    (unknown,) = llm.speak("hello", language="xx", use_tqdm=False)
    assert unknown.error.param == "language"
    with pytest.raises(InputError) as caught:
        llm.speak("hello", voice=random_voice(CONFIG, 0))
    assert caught.value.info.param == "language"


@needs_espeak
def test_misaki_reads_english(llm, monkeypatch):
    """A stand-in for the package: it gets words without marks; those that it does not know are read by espeak-ng."""
    made = []

    class Reader:
        def __init__(self, british, fallback, unk):
            made.append(british)
            self.fallback = fallback

        def __call__(self, text, preprocess):
            words = (self.fallback(SimpleNamespace(text=word))[0] if word == "world" else "a" for word in text.split())
            return " ".join(words), []

    misaki.cache_clear()
    with pytest.raises(ConfigError) as caught:
        misaki("en-us")
    assert caught.value.info.param == "phonemizer"
    monkeypatch.setattr("sensorium.pipelines.speech.misaki.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "misaki", ModuleType("misaki"))
    monkeypatch.setitem(sys.modules, "misaki.en", SimpleNamespace(G2P=Reader))
    speech = spoken(llm, "Hello world, hello.", voice="bm_ben", phonemizer="misaki")
    assert speech.phonemes == "a wˈɜːld, a."
    assert [word.word for word in speech.words] == ["Hello", "world", "hello"]
    assert made == [True]
    misaki.cache_clear()
    with pytest.raises(InputError) as caught:
        llm.speak("hola", language="es", phonemizer="misaki")
    assert caught.value.info.param == "phonemizer"
    with pytest.raises(InputError) as caught:
        llm.speak("hello", phonemizer="epitran")
    assert caught.value.info.param == "phonemizer"


def test_checkpoints_without_voices_or_with_a_wrong_vocabulary(saved, tmp_path):
    kokoro_files.write_checkpoint(tmp_path / "model", saved[1])
    for file in (tmp_path / "model" / "voices").iterdir():
        file.unlink()
    with LLM(tmp_path / "model", device="cpu") as llm:
        with pytest.raises(InputError) as caught:
            llm.speak(phonemes=PHONEMES)
        assert caught.value.info.param == "voice"
        assert spoken(llm, phonemes=PHONEMES, voice=random_voice(CONFIG, 0)).seconds > 0.2
    for vocab, kind in (({"ab": 1}, CheckpointError), ({"a": 178}, ConfigError)):
        (tmp_path / "model" / "config.json").write_text(json.dumps({**CONFIG, "vocab": vocab}), "utf-8")
        with pytest.raises(kind):
            LLM(tmp_path / "model", device="cpu")
