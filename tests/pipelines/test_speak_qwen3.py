"""`LLM.speak` and `LLM.stream_speak` with Qwen3-Omni: codes and samples against transformers' whole model, and errors."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import family
import pytest
import talkers
import torch
from batch_files import until
from measured import kept_bytes
from safetensors.torch import load_file, save_file
from sensorium import LLM, AsyncLLM, ConfigError, InputError, PoolingParams, SamplingParams
from sensorium.callers.errors import CheckpointError
from sensorium.engine.model_files import load_model_files
from sensorium.engine.setup import talker as talker_setup
from sensorium.engine.setup.doctor import explain
from sensorium.models.memory_formulas import SMALL
from sensorium.models.talker import SpokenAnswer

TEXT = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.05, max_tokens=30)
CASES = ["", "i", "a", "ai"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talker")
    return folder, *talkers.save_qwen3(folder)


@pytest.fixture(scope="module")
def llm(saved):
    options = {"load_talker": True, "chat_template": talkers.QWEN3_TEMPLATE, "max_model_len": 1024, "max_num_seqs": 2}
    with LLM(saved[0], device="cpu", max_num_batched_tokens=64, max_speech_streams=2, **options) as made:
        yield made


def conversation(letters):
    """Return messages of several turns with one item per letter, and the items by modality."""
    question, data = talkers.question(letters)
    turns = [("system", "You count."), ("user", "Hi"), ("assistant", "Yes?")]
    said = [{"role": role, "content": text} for role, text in turns]
    return [*said, question], data


def spoken_by_oracle(model, inputs, voice, **options):
    """Return text tokens, frames of codes and samples of transformers' greedy answer. It drops the last frame's first code."""
    frames, decode = [], model.code2wav.chunked_decode

    def kept(codes, **rest):
        frames.extend(map(tuple, codes[0].T.tolist()))
        return decode(codes, **rest)

    model.code2wav.chunked_decode = kept
    try:
        tokens, samples = model.generate(
            **inputs,
            speaker=voice,
            thinker_max_new_tokens=TEXT.max_tokens,
            thinker_do_sample=False,
            thinker_eos_token_id=[-1],
            talker_do_sample=False,
            talker_max_new_tokens=GREEDY.max_tokens + 1,
            **options,
        )
    finally:
        model.code2wav.chunked_decode = decode
    return tokens[0, inputs["input_ids"].shape[1] :].tolist(), tuple(frames), samples[0, 0]


@pytest.mark.parametrize("letters", CASES)
def test_speech_is_transformers(saved, llm, letters):
    _, model, processor = saved
    messages, data = conversation(letters)
    (speech,) = llm.speak(messages, TEXT, speech_params=GREEDY, voice="Ben")
    assert speech.error is None
    marks = "".join(family.load_rows()["qwen3_omni"].placeholders[name] for name in data)
    turns = "<|im_start|>s\nYou count.<|im_end|><|im_start|>u\nHi<|im_end|><|im_start|>a\nYes?<|im_end|>"
    prompt = f"{turns}<|im_start|>u\nHow many{marks} are there?<|im_end|><|im_start|>a\n"
    inputs = family.call_processor(processor, prompt, data)
    tokens, frames, samples = spoken_by_oracle(model, inputs, "Ben")
    assert speech.output.outputs[0].token_ids == tokens
    assert len(frames) == GREEDY.max_tokens
    assert speech.codes == frames
    assert speech.sampling_rate == 24_000
    assert speech.samples.shape == samples.shape
    assert samples.std() > 0.01
    torch.testing.assert_close(speech.samples, samples, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("heard", "images"), [(False, 0), (True, 0), (True, 1)])
def test_speech_about_a_video_is_transformers(saved, llm, heard, images):
    """A video, one whose audio track is an item in the same place, and one with an image behind it."""
    _, model, processor = saved
    video, options, inputs_of = talkers.video_case("qwen3_omni", heard)
    image = [family.make_media("image", (90, 130), 3)] * images
    content = [{"type": "text", "text": "Look"}, video, *({"type": "image", "image": one} for one in image)]
    (speech,) = llm.speak([{"role": "user", "content": content}], TEXT, speech_params=GREEDY, voice="Ben", **options)
    assert speech.error is None
    marks = "{}" + family.load_rows()["qwen3_omni"].placeholders["image"] * images
    inputs = inputs_of(processor, f"<|im_start|>u\nLook{marks}<|im_end|><|im_start|>a\n", image)
    assert speech.output.prompt_token_ids == inputs["input_ids"][0].tolist()
    tokens, frames, samples = spoken_by_oracle(model, inputs, "Ben", use_audio_in_video=heard)
    assert speech.output.outputs[0].token_ids == tokens
    assert len(frames) == GREEDY.max_tokens
    assert speech.codes == frames
    torch.testing.assert_close(speech.samples, samples, rtol=0, atol=1e-4)


def test_parts_are_the_whole(llm):
    messages, _ = conversation("i")
    (whole,) = llm.speak(messages, TEXT, speech_params=GREEDY, voice="ada")

    async def streamed():
        return [part async for part in AsyncLLM(llm).stream_speak(messages, TEXT, speech_params=GREEDY, voice="ada")]

    for text, *parts in (llm.stream_speak(messages, TEXT, speech_params=GREEDY, voice="ada"), asyncio.run(streamed())):
        assert (text.text, text.codes, text.seconds) == (whole.text, (), 0.0)
        assert [len(part.codes) for part in parts] == [12, 12, 6]  # samples come while further codes are not made yet
        assert tuple(frame for part in parts for frame in part.codes) == whole.codes
        assert torch.cat([part.samples for part in parts]).equal(whole.samples)


def test_streams_do_not_disturb_each_other(llm):
    messages, _ = conversation("")
    whole = {name: llm.speak(messages, TEXT, speech_params=GREEDY, voice=name)[0] for name in ("ada", "ben")}
    streams = [llm.stream_speak(messages, TEXT, speech_params=GREEDY, voice=name) for name in whole]
    found = [torch.cat([part.samples for part in parts]) for parts in zip(*zip(*streams, strict=True), strict=True)]
    assert all(samples.equal(speech.samples) for samples, speech in zip(found, whole.values(), strict=True))


def begun(llm, messages):
    """Return a stream after its text and its first part."""
    stream = llm.stream_speak(messages, TEXT, speech_params=GREEDY, voice="ada")
    assert next(stream).error is None
    assert len(next(stream).codes) == 12
    return stream


def test_the_number_of_answers_that_are_spoken_is_limited(llm):
    """A stream counts from its first part to its end, also if it is left. `speak` counts, too."""
    messages, _ = conversation("")

    def speak():
        return llm.speak(messages, TEXT, speech_params=GREEDY, voice="ada")[0].error

    async def leave():
        async for part in AsyncLLM(llm).stream_speak(messages, TEXT, speech_params=GREEDY, voice="ada"):
            if part.codes:
                return part.error

    first, second = begun(llm, messages), begun(llm, messages)
    _, refused = llm.stream_speak(messages, TEXT, speech_params=GREEDY, voice="ada")
    for error in (refused.error, speak()):
        assert (error.code, error.param) == ("overloaded", "max_speech_streams")
        assert "max_speech_streams=2 answers are being spoken already; end one of the streams" in str(error)
    first.close()
    assert speak() is None
    assert sum(len(part.codes) for part in second) == GREEDY.max_tokens - 12
    for _ in range(3):
        assert asyncio.run(leave()) is None
        begun(llm, messages)
    assert speak() is None
    assert llm.engine.talker._num_streams == 0


def test_a_stream_that_is_cancelled_ends_at_once(llm):
    """Also if the exception, whose traceback holds the generator's frame, lives on."""
    messages, _ = conversation("")

    async def scenario():
        stream = AsyncLLM(llm).stream_speak(messages, TEXT, speech_params=GREEDY, voice="ada")
        assert (await anext(stream)).error is None
        task = asyncio.ensure_future(anext(stream))
        await until(lambda: llm.engine.talker._num_streams == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        await until(lambda: llm.engine.talker._num_streams == 0)
        return caught

    assert asyncio.run(scenario()).value.__traceback__ is not None


@pytest.mark.parametrize("letters", ["", "i"])
def test_the_plan_counts_what_streams_hold(llm, letters, monkeypatch):
    messages, _ = conversation(letters)
    output = next(llm.stream_speak(messages, TEXT, speech_params=GREEDY, voice="ada")).output
    length = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    monkeypatch.setattr(talker_setup, "MAX_CODES", GREEDY.max_tokens)
    config = replace(llm.config, max_speech_streams=3)
    plans = [talker_setup.talker_bytes(one, load_model_files(config.model), length) for one in (llm.config, config)]
    planned = plans[1] - plans[0]
    assert planned / 2 < kept_bytes(lambda: begun(llm, messages)) <= planned + SMALL
    assert explain(config).talker > llm.explain().talker


def test_sampling_has_a_seed(llm):
    messages, _ = conversation("")
    params = SamplingParams(**llm.engine.talker.model.sampling, max_tokens=6, seed=3)
    (first,), (second,) = (llm.speak(messages, TEXT, speech_params=params) for _ in range(2))
    params.seed = 4
    (other,) = llm.speak(messages, TEXT, speech_params=params)
    assert first.codes == second.codes != other.codes
    (short,) = llm.speak(messages, TEXT, speech_params=SamplingParams(temperature=0.0, logit_bias={1080: 100.0}, min_tokens=4))
    assert len(short.codes) == 4


def test_hidden_states_of_a_layer_are_transformers(saved, llm):
    _, model, _ = saved
    text = "import os, sys and glob; then list all the files that are there " * 6
    params = PoolingParams(task="token_embed", layer=3)
    (output,) = llm.encode(text, params)
    ids = torch.tensor([output.prompt_token_ids])
    assert ids.shape[1] > 64  # several chunks
    with torch.inference_mode():
        states = model.thinker(input_ids=ids, output_hidden_states=True).hidden_states[3][0]
    torch.testing.assert_close(output.outputs.data, states, rtol=0, atol=2e-4)
    (failed,) = llm.encode(text, PoolingParams(task="token_embed", layer=5))
    assert "layer=5 asks for hidden states of a layer; this model returns those after 1 to 4 layers" in str(failed.error)
    with pytest.raises(InputError, match="layer is for hidden states of tokens"):
        PoolingParams(layer=3)


def test_bad_input(llm):
    messages, _ = conversation("")
    with pytest.raises(InputError, match="voice='Eve' is unknown; this model has ada, ben"):
        llm.stream_speak(messages, voice="Eve")
    with pytest.raises(InputError, match="messages holds 2 conversations"):
        llm.stream_speak([messages, messages])
    with pytest.raises(InputError, match="does not end with an assistant's turn"):
        llm.engine.talker.model.prompt(SpokenAnswer([1, 2, 3, 4], [5, 6], torch.zeros(0)), "ada")
    long = [{"role": "user", "content": "x" * 9000}]
    text, *parts = llm.stream_speak(long)
    assert "max_model_len" in str(text.error)
    assert not parts


def test_checkpoints_that_do_not_fit(saved, tmp_path):
    folder, model, _ = saved
    options = {"load_talker": True, "max_model_len": 512, "device": "cpu"}
    config = model.config.talker_config.to_dict()
    for key, value, reason in (
        ("num_code_groups", 5, "talker_config.num_code_groups in config.json is 5"),
        ("accept_hidden_layer", 4, "must be below the thinker's num_hidden_layers"),
    ):
        with pytest.raises(ConfigError, match=reason):
            LLM(talkers.edited(folder, tmp_path / key, talker_config=config | {key: value}), **options)
    mute = talkers.edited(folder, tmp_path / "mute")
    weights = load_file(mute / "model.safetensors")
    save_file({name: one for name, one in weights.items() if not name.startswith("talker.")}, mute / "model.safetensors")
    with pytest.raises(CheckpointError, match="the checkpoint lacks"):
        LLM(mute, **options)
