"""`LLM.speak`: codes and samples of Qwen2.5-Omni's talker against transformers' whole model, options and errors."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import family
import pytest
import talkers
import torch
from measured import kept_bytes, peak_bytes
from sensorium import LLM, AsyncLLM, ConfigError, InputError, SamplingParams
from sensorium.callers.errors import CheckpointError
from sensorium.checkpoints.torch_file import read_saved
from sensorium.engine.model_files import load_model_files
from sensorium.engine.setup import talker as talker_setup
from sensorium.models.memory_formulas import SMALL
from sensorium.models.talker import noise

TEXT = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
ROUNDING = 1e-5  # of float32 through 36 evaluations of the flow; a step of 16-bit samples is three times that
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.05, max_tokens=40, seed=5)
CASES = {"text": "", "image": "i", "audio": "a", "both": "ia"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talker")
    return folder, *talkers.save_qwen2_5(folder)


@pytest.fixture(scope="module")
def llm(saved):
    with LLM(
        saved[0], load_talker=True, chat_template=talkers.TEMPLATE, max_model_len=1024, max_num_seqs=2, device="cpu"
    ) as made:
        yield made


def conversation(letters):
    """Return messages with one item per letter, and the items by modality."""
    question, data = talkers.question(letters)
    return [question], data


def with_mask(talker, arguments, named):
    """Give the oracle's talker its mask again.

    `generate` of transformers 5.23 drops masks of ones. Without a mask, the talker leaves out the embeddings of the two codes
    that begin speech, and the positions of media.
    """
    new = named["input_ids"] if named["input_ids"] is not None else named["inputs_embeds"]
    length = new.shape[1] + named["past_key_values"].get_seq_length()
    return arguments, named | {"attention_mask": torch.ones(1, length, dtype=torch.long)}


def spoken_by_oracle(model, inputs, voice, seed, **options):
    """Return text tokens, codes and samples of transformers' greedy answer."""
    for name in {"pixel_values", "pixel_values_videos"} & set(inputs):  # transformers would also pass them to the talker
        inputs[f"thinker_{name}"] = inputs.pop(name)
    codes, forward = [], model.token2wav.forward

    def kept(code, **rest):
        codes.extend(code[0].tolist())
        return forward(code, **rest)

    model.token2wav.forward = kept
    hook = model.talker.register_forward_pre_hook(with_mask, with_kwargs=True)
    try:
        torch.manual_seed(seed)
        tokens, samples = model.generate(
            **inputs,
            speaker=voice,
            thinker_max_new_tokens=TEXT.max_tokens,
            thinker_do_sample=False,
            thinker_eos_token_id=[-1],
            talker_do_sample=False,
            talker_max_new_tokens=GREEDY.max_tokens,
            talker_eos_token_id=[64, 66],
            **options,
        )
    finally:
        model.token2wav.forward = forward
        hook.remove()
    return tokens[0, inputs["input_ids"].shape[1] :].tolist(), tuple(codes), samples


@pytest.mark.parametrize("case", CASES)
def test_speech_is_transformers(saved, llm, case):
    _, model, processor = saved
    messages, data = conversation(CASES[case])
    (speech,) = llm.speak(messages, TEXT, speech_params=GREEDY, voice="Ben")
    assert speech.error is None
    marks = "".join(family.load_rows()["qwen2_5_omni"].placeholders[name] for name in data)
    prompt = f"<|im_start|>user How many{marks} are there?<|im_end|><|im_start|>"
    inputs = family.call_processor(processor, prompt, data)
    tokens, codes, samples = spoken_by_oracle(model, inputs, "Ben", 5)
    assert speech.output.outputs[0].token_ids == tokens
    assert len(codes) > 5
    assert speech.codes == tuple((code,) for code in codes)
    assert speech.sampling_rate == 24_000
    assert speech.samples.shape == samples.shape == (len(codes) * 2 * 10,)
    assert samples.std() > 0.01
    torch.testing.assert_close(speech.samples, samples, rtol=0, atol=1e-4)


@pytest.mark.parametrize("heard", [False, True])
def test_speech_about_a_video_is_transformers(saved, llm, heard):
    """A video, and a video whose audio track is an item in the same place."""
    _, model, processor = saved
    video, options, inputs_of = talkers.video_case("qwen2_5_omni", heard)
    content = [{"type": "text", "text": "Look"}, video]
    (speech,) = llm.speak([{"role": "user", "content": content}], TEXT, speech_params=GREEDY, voice="Ben", **options)
    assert speech.error is None
    inputs = inputs_of(processor, "<|im_start|>user Look{}<|im_end|><|im_start|>")
    assert speech.output.prompt_token_ids == inputs["input_ids"][0].tolist()
    tokens, codes, samples = spoken_by_oracle(model, inputs, "Ben", 5, use_audio_in_video=heard)
    assert len(codes) > 5
    assert speech.output.outputs[0].token_ids == tokens
    assert speech.codes == tuple((code,) for code in codes)
    torch.testing.assert_close(speech.samples, samples, rtol=0, atol=1e-4)


def test_published_sampling_has_a_seed(llm):
    messages = [conversation("")[0]] * 2
    params = SamplingParams(**llm.engine.talker.model.sampling)
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.9, 40, 0.8, 1.05)
    params.max_tokens = 12
    params.seed = 3
    first, second = llm.speak(messages, TEXT, speech_params=params)
    assert first.codes == second.codes
    assert first.samples.equal(second.samples)
    params.seed = None  # the engine's seed and the number of the conversation
    third, fourth = llm.speak(messages, TEXT, speech_params=params)
    assert len({first.codes, third.codes, fourth.codes}) == 3
    again = asyncio.run(AsyncLLM(llm).speak(messages, TEXT, speech_params=params))
    assert [one.codes for one in again] == [third.codes, fourth.codes]


def test_parts_are_the_whole(llm):
    messages, _ = conversation("a")
    (whole,) = llm.speak(messages, TEXT, speech_params=GREEDY, voice="ada")
    text, *parts = llm.stream_speak(messages, TEXT, speech_params=GREEDY, voice="ada")
    assert (text.text, text.codes, text.seconds) == (whole.text, (), 0.0)
    assert tuple(frame for part in parts for frame in part.codes) == whole.codes
    torch.testing.assert_close(torch.cat([part.samples for part in parts]), whole.samples, rtol=0, atol=ROUNDING)


def counted(codes, taken):
    """Yield frames of one code, and count in `taken` those that were taken so far."""
    for code in codes:
        taken.append(code)
        yield (code,)


def spoken(llm, codes, division):
    """Return the parts of the samples of codes, and how many codes had been taken when each came."""
    taken, parts, places = [], [], []
    with torch.inference_mode():
        for part in llm.engine.talker.model.samples(counted(codes, taken), "Ben", 5, division):
            parts.append(part)
            places.append(len(taken))
    return parts, places


@pytest.fixture(scope="module")
def long(saved):
    """Codes of a long answer, and transformers' samples of it."""
    model = saved[1]
    voice = model.speaker_map["Ben"]
    codes = torch.randint(0, 60, (1, 252), generator=torch.Generator().manual_seed(9))
    torch.manual_seed(5)
    with torch.inference_mode():
        return codes[0].tolist(), model.token2wav(codes, voice["cond"], voice["ref_mel"]).flatten()


def test_samples_come_before_all_codes(llm, long):
    """A part comes as soon as the codes that its samples depend on are known, and is that of the whole answer."""
    codes, theirs = long
    whole, _ = spoken(llm, codes, "whole")
    torch.testing.assert_close(torch.cat(whole), theirs, rtol=0, atol=1e-4)
    parts, places = spoken(llm, codes, "exact")
    model = llm.engine.talker.model
    spec, piece = model.flow.spec, 12  # four blocks of three codes
    assert (spec.block, spec.ahead) == (6, 36)
    needed = spec.ahead * spec.block + model.vocoder.spec.around
    first = -(-(needed + 1) // (2 * piece)) * piece + 1  # that the part is not the last is known from one code more
    assert places[:3] == [first, first + piece, first + 2 * piece]
    assert len(parts) > 8
    assert theirs.std() > 0.01
    torch.testing.assert_close(torch.cat(parts), torch.cat(whole), rtol=0, atol=ROUNDING)
    torch.testing.assert_close(torch.cat(parts), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("count", [252, 228, 8])
def test_samples_of_windows_come_early(saved, llm, long, count, monkeypatch):
    """Each window's spectrogram is that of transformers for its codes, noise, the two blocks before and the block after it."""
    codes, _ = long
    codes = codes[:count]
    parts, places = spoken(llm, codes, "windows")
    windows = llm.engine.talker.model.vocoder.spec.around // 18 + 1  # that the first samples depend on
    assert places[0] == min(9 * windows + 3 + 1, count)  # three blocks of three codes, the block after these, and one code
    (flow, vocoder), voice = saved[1].token2wav.children(), saved[1].speaker_map["Ben"]
    start = noise((2 * count, 12), 5)
    mels, heard = [], 0
    while heard < count:
        end = heard + 9 if heard + 9 + 3 < count else count
        first, stop = max(0, heard - 6), min(end + 3, count)
        monkeypatch.setattr(torch, "randn", lambda *_, rows=start[2 * first : 2 * stop], **__: rows[None].clone())
        window = torch.tensor([codes[first:stop]])
        mel = flow.sample(voice["cond"], voice["ref_mel"], window)
        mels.append(mel[..., 2 * (heard - first) : 2 * (end - first)])
        heard = end
    monkeypatch.undo()
    with torch.inference_mode():
        theirs = vocoder(torch.cat(mels, 2)).flatten()
    torch.testing.assert_close(torch.cat(parts), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("division", ["windows", "exact"])
def test_windows_share_what_they_do_not_change(llm, long, division):
    """The reference is encoded once, with and without sound, and each layer computes its modulations once per evaluation."""
    flow, calls = llm.engine.talker.model.flow, []
    watched = {"encode": flow.encode_reference[0], "modulate": flow.blocks[0].modulation, "last": flow.last_modulation}
    hooks = [one.register_forward_hook(lambda *_, name=name: calls.append(name)) for name, one in watched.items()]
    try:
        spoken(llm, long[0], division)
    finally:
        for hook in hooks:
            hook.remove()
    assert Counter(calls) == {"encode": 2, "modulate": 36, "last": 36}


@pytest.mark.parametrize("division", ["exact", *(pytest.param(one, marks=pytest.mark.full) for one in ("whole", "windows"))])
def test_memory_of_samples_is_planned(llm, long, division):
    codes, _ = long
    model = llm.engine.talker.model
    flow, vocoder = model.flow.spec, model.vocoder.spec
    limit = flow.kept_bytes + max(flow.peak_bytes(2 * len(codes)), vocoder.peak_bytes()) + SMALL
    assert peak_bytes(lambda: spoken(llm, codes, division)) <= limit


@pytest.mark.parametrize("exact", [True, False])
def test_the_plan_counts_what_streams_hold(llm, exact, monkeypatch):
    messages, _ = conversation("i")

    def begun():
        stream = llm.stream_speak(messages, TEXT, speech_params=GREEDY, voice="ada", exact=exact)
        assert len(next(stream).output.prompt_token_ids) == length
        assert len(next(stream).samples)
        return stream

    (speech,) = llm.speak(messages, TEXT, speech_params=GREEDY)
    length = len(speech.output.prompt_token_ids)
    monkeypatch.setattr(talker_setup, "MAX_CODES", GREEDY.max_tokens)
    files, answer = load_model_files(llm.config.model), TEXT.max_tokens
    plans = [talker_setup.talker_bytes(replace(llm.config, max_speech_streams=n), files, length + answer) for n in (1, 2)]
    assert (plans[1] - plans[0]) / 4 < kept_bytes(begun) <= plans[1] - plans[0] + SMALL


def test_parts_from_windows(llm):
    messages, _ = conversation("a")
    (whole,) = llm.speak(messages, TEXT, speech_params=GREEDY, voice="ada")
    _, *parts = llm.stream_speak(messages, TEXT, speech_params=GREEDY, voice="ada", exact=False)
    assert 0 < len(parts[0].codes) <= 22
    assert tuple(frame for part in parts for frame in part.codes) == whole.codes
    assert sum(len(part.samples) for part in parts) == len(whole.samples)
    with pytest.raises(InputError, match="exact='no' must be True or False"):
        llm.stream_speak(messages, exact="no")


def test_end_of_speech(llm):
    messages, _ = conversation("")
    ends = {"temperature": 0.0, "max_tokens": 9, "logit_bias": {66: 100.0}}
    (silent,) = llm.speak(messages, TEXT, speech_params=SamplingParams(**ends))
    assert (silent.error, silent.codes, silent.samples.shape, silent.seconds) == (None, (), (0,), 0.0)
    assert silent.text
    (short,) = llm.speak(messages, TEXT, speech_params=SamplingParams(**ends, min_tokens=4))
    assert len(short.codes) == 4
    (word,) = llm.speak(messages, SamplingParams(temperature=0.0, max_tokens=1))
    assert (word.error, word.codes) == (None, ())


def test_only_codes_with_sound(llm):
    """The engine never chooses a code without a row in the table, nor the start of speech."""
    bias = dict.fromkeys((61, 62, 63, 65, 67, 71), 100.0)
    (speech,) = llm.speak(
        conversation("")[0], TEXT, speech_params=SamplingParams(temperature=0.0, max_tokens=6, logit_bias=bias)
    )
    assert len(speech.codes) == 6
    assert max(speech.codes) <= (60,)


def test_a_failing_conversation(llm):
    good, _ = conversation("")
    failed, spoken = llm.speak([[{"role": "user", "content": "x" * 9000}], good], TEXT, speech_params=GREEDY)
    assert "max_model_len" in str(failed.error)
    assert not len(failed.samples)
    assert spoken.error is None


def test_arguments(llm):
    messages, _ = conversation("")
    with pytest.raises(InputError, match="voice='Eve' is unknown; this model has Ada, Ben"):
        llm.speak(messages, voice="Eve")
    with pytest.raises(InputError, match="n=2 is not supported by speak"):
        llm.speak(messages, SamplingParams(n=2, temperature=1.0))
    with pytest.raises(InputError, match="logprobs has no meaning for codes"):
        llm.speak(messages, speech_params=SamplingParams(logprobs=1))
    with pytest.raises(InputError, match="speech_params"):
        llm.speak(messages, speech_params={"temperature": 0.0})


def _sleep_async(llm, name):
    asyncio.run(getattr(AsyncLLM(llm), name)())


@pytest.mark.parametrize("do", [lambda llm, name: getattr(llm, name)(), _sleep_async], ids=["LLM", "AsyncLLM"])
def test_memory_and_sleep(saved, llm, do):
    assert llm.explain().talker > 0
    assert "talker" in str(llm.explain())
    with LLM(saved[0], chat_template=talkers.TEMPLATE, max_model_len=512, device="cpu") as plain:
        assert plain.explain().talker == 0
        with pytest.raises(ConfigError, match="load the model with load_talker=True"):
            plain.speak(conversation("")[0])
    before = llm.speak(conversation("")[0], TEXT, speech_params=GREEDY)[0].codes
    do(llm, "sleep")
    assert llm.engine.talker is None
    with pytest.raises(ConfigError, match="wake the engine first"):
        llm.speak(conversation("")[0])
    do(llm, "wake_up")
    assert llm.speak(conversation("")[0], TEXT, speech_params=GREEDY)[0].codes == before


def test_checkpoints_without_speech(saved, tmp_path):
    options = {"load_talker": True, "max_model_len": 512, "device": "cpu"}
    for changes, reason in (
        ({"enable_audio_output": False}, "enable_audio_output in config.json is false"),
        ({"talker_config": None}, "it is a thinker alone"),
    ):
        folder = talkers.edited(saved[0], tmp_path / next(iter(changes)), **changes)
        with pytest.raises(ConfigError, match=reason):
            LLM(folder, **options)
    with pytest.raises(ConfigError, match="does not speak here"):
        LLM(family.save(family.load_rows()["qwen2_vl"], tmp_path / "mute"), **options)
    with pytest.raises(ConfigError, match="needs the whole model"):
        LLM(saved[0], parts="encoder", **options)
    voiceless = talkers.edited(saved[0], tmp_path / "voiceless")
    (voiceless / "spk_dict.pt").unlink()
    with pytest.raises(CheckpointError, match=r"spk_dict\.pt is missing"):
        LLM(voiceless, **options)
    torch.save({"Ada": {"bos_token": 1, "cond": torch.zeros(3)}}, voiceless / "spk_dict.pt")
    with pytest.raises(CheckpointError, match="does not hold voices as published"):
        LLM(voiceless, **options)


class _Call:
    def __reduce__(self):
        return print, ("called",)


@pytest.mark.parametrize("old", [False, True])
def test_voices_are_read_without_unpickling(tmp_path, capsys, old):
    table = torch.randn(4, 6).half()
    content = {
        "a": {"number": 70_000, "part": table[1:, ::2], "long": torch.arange(3)},
        "b": {"same": table.T, "x": 0.5, "no": None},
    }
    torch.save(content, tmp_path / "good.pt")
    found = read_saved(tmp_path / "good.pt")
    assert str(found) == str(torch.load(tmp_path / "good.pt", weights_only=True))
    torch.save({"a": _Call()}, tmp_path / "bad.pt", _use_new_zipfile_serialization=not old)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_saved(tmp_path / "bad.pt")
    assert "called" not in capsys.readouterr().out
    (tmp_path / "cut.pt").write_bytes((tmp_path / "good.pt").read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_saved(tmp_path / "cut.pt")
