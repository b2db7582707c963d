"""Prompts to answers around the toy model: order, errors that stay alone, seeds, interruption, several callers at once."""

import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from sensorium.engine.driver import Driver, bad_word_ids
from sensorium.engine.input import InputProcessor
from sensorium.engine.media import MediaSettings
from sensorium.engine.sampling_params import SamplingParams
from sensorium.engine.ticket import Job
from sensorium.mm.errors import InputError
from sensorium.mm.fields import BatchedField, FieldElem
from sensorium.mm.media.policy import DecodeSpec
from sensorium.mm.parse import MultiModalDataParser
from sensorium.mm.types import ItemGeometry
from sensorium.processors.interface import Span


class Letters:
    """Printable characters are the tokens 5 to 99; `@` is the picture's slot."""

    def encode(self, text, add_special_tokens=True):
        return [3 if letter == "@" else ord(letter) - 27 for letter in text]

    def least_tokens(self, text):
        return 0

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i + 27) for i in ids if i > 4)


class Info:
    """A picture becomes as many rows as it is wide; a black one cannot be processed."""

    modalities, slot_ids, prefill, decode_spec = ("image",), {"image": 3}, "causal", DecodeSpec()

    def __init__(self):
        self.processed = []

    def parser(self):
        return MultiModalDataParser(self.modalities)

    def geometry(self, header):
        return ItemGeometry(1, 1, header.width)

    def process(self, item, dtype):
        value = int(item.pixels[0, 0, 0])
        self.processed.append(value)
        if value == 0:
            raise InputError("it is black; give one with light in it")
        rows = item.header.width
        tensors = {
            "seed": FieldElem(torch.tensor(value), BatchedField()),
            "rows": FieldElem(torch.tensor(rows), BatchedField()),
        }
        return tensors, self.geometry(item.header)

    def span(self, modality, geometry):
        return Span((3,) * geometry.num_embeds)

    def options_key(self, modality):
        return ""


def picture(value, width=4):
    return Image.new("RGB", (width, 2), (value, 0, 0))


@pytest.fixture
def world(toy):
    return World(toy)


class World:
    def __init__(self, toy, **options):
        self.toy, self.info = toy, Info()
        self.core = toy.make_core(**options)
        self.inputs = InputProcessor(self.info, Letters(), MediaSettings(limits={"image": 3}), 200)
        self.driver = Driver(self.core, Letters(), (toy.EOS,), seed=5)

    def jobs(self, prompts, params=None):
        params = params or SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        return [Job(partial(self.inputs.begin, prompt), params) for prompt in prompts]

    def slow_down(self, seconds=0.005):
        """Steps that take time, so that whoever waits for them sees each."""
        forward = self.core.runner.model.forward

        def slow(batch):
            time.sleep(seconds)
            return forward(batch)

        self.core.runner.model.forward = slow

    def answers(self, prompts, params=None):
        found = dict(self.driver.serve(self.jobs(prompts, params)))
        self.toy.assert_empty(self.core)
        return [found[i] for i in range(len(prompts))]

    def texts(self, prompts, params=None):
        return [[answer.text for answer in output.outputs] for output in self.answers(prompts, params)]


PROMPTS = [
    "hello",
    {"prompt": "see @ there", "multi_modal_data": {"image": picture(1)}},
    {"prompt": "@ and @", "multi_modal_data": {"image": [picture(2), picture(3, 6)]}},
    {"prompt_token_ids": [50, 51, 52]},
]


def test_order_is_that_of_the_prompts(world, toy):
    outputs = world.answers(PROMPTS)
    assert [output.prompt for output in outputs] == ["hello", "see @ there", "@ and @", None]
    assert len(outputs[1].prompt_token_ids) == len("see  there") + 4
    alone = [World(toy).answers([prompt])[0].outputs for prompt in PROMPTS]
    assert [output.outputs for output in outputs] == alone
    stages = {"plan", "decode", "process", "queue", "encode", "prefill", "decode_steps"}
    assert all(stages <= output.timings.keys() for output in outputs)
    assert all(seconds >= 0 for output in outputs for seconds in output.timings.values())


BAD = {
    "no item": ({"prompt": "a @"}, "image 0: the prompt has a slot"),
    "no slot": ({"prompt": "a", "multi_modal_data": {"image": picture(1)}}, "image 0: the prompt has only 0 slot"),
    "too many": ({"prompt": "@@@@", "multi_modal_data": {"image": [picture(1)] * 4}}, "At most 3 image"),
    "too long": ("x" * 300, "300 tokens, max_model_len is 200"),
    "black": ({"prompt": "@", "multi_modal_data": {"image": picture(0)}}, "image 0: it is black"),
    "broken": ({"prompt": "@", "multi_modal_data": {"image": b"nonsense"}}, "image 0:"),
    "poisoned": ({"prompt": "@", "multi_modal_data": {"image": picture(154)}}, "encoding failed"),
    "modality": ({"prompt": "a", "multi_modal_data": {"imagee": picture(1)}}, "unknown modality 'imagee'"),
    "key": ({"prompt": "a", "images": []}, "unknown key 'images'"),
    "both": ({"prompt": "a", "prompt_token_ids": [5]}, "either"),
    "type": (7, "a prompt is a string"),
    "ids": ({"prompt_token_ids": ["x"]}, "list of integers"),
    "vocabulary": ({"prompt_token_ids": [5, 101]}, "vocabulary"),
    "empty": ("", "no tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_prompt_fails_alone(world, toy, name):
    if name == "poisoned":
        encode = world.core.runner.model.embed_multimodal

        def poisoned(modality, tensors):
            if any(int(seed) == 154 for seed in tensors["seed"]):
                raise RuntimeError("bad")
            return encode(modality, tensors)

        world.core.runner.model.embed_multimodal = poisoned
    prompt, message = BAD[name]
    outputs = world.answers([PROMPTS[1], prompt, PROMPTS[0]])
    assert message in outputs[1].error
    assert "\n" not in outputs[1].error
    assert outputs[1].outputs[0].finish_reason == "error"
    good = World(toy).answers([PROMPTS[1], PROMPTS[0]])
    assert [outputs[0].outputs, outputs[2].outputs] == [output.outputs for output in good]


def test_the_same_picture_is_processed_once(world):
    prompts = [{"prompt": "@ a" + "b" * i, "multi_modal_data": {"image": picture(9)}} for i in range(6)]
    world.answers(prompts)
    assert world.info.processed == [9]


def test_seeds_decide_whatever_else_runs(world, toy):
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=3, n=3)
    alone = World(toy).texts(["hello"], params)[0]
    assert len(set(alone)) == 3
    assert world.texts([*PROMPTS, "hello"], params)[4] == alone
    assert world.texts(["hello"], params)[0] == alone
    unseeded = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    one, two = World(toy).texts(["hello", "hello"], unseeded)
    assert one != two
    assert World(toy, budget=7).texts(["hello", "hello"], unseeded) == [one, two]


def test_stop_strings_end_the_sequence_in_the_engine(world, toy):
    (full,) = world.texts(["hello"], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))[0]
    stop = full[4:6]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=[stop])
    output = World(toy).answers(["hello"], params)[0].outputs[0]
    assert output.text == full[: full.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) < 20


def test_stop_tokens_and_min_tokens(world, toy):
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    free = list(world.answers(["hello"], SamplingParams(**params))[0].outputs[0].token_ids)
    stop = free[3]
    stopped = World(toy).answers(["hello"], SamplingParams(**params, stop_token_ids=[stop]))[0].outputs[0]
    assert list(stopped.token_ids) == free[: free.index(stop) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    later = World(toy).answers(["hello"], SamplingParams(**params, stop_token_ids=[stop], min_tokens=6))[0].outputs[0]
    assert stop not in later.token_ids[:6]
    assert len(later.token_ids) >= 6


def test_bad_words_and_biases_change_what_is_said(world, toy):
    params = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
    (free,) = world.texts(["hello"], SamplingParams(**params))[0]
    pair = free[3:5]
    (without,) = World(toy).texts(["hello"], SamplingParams(**params, bad_words=[pair]))[0]
    assert without[:4] == free[:4]
    assert pair not in without
    token = Letters().encode("~")[0]
    assert World(toy).texts(["hello"], SamplingParams(**params, logit_bias={token: 100}))[0] == ["~" * 10]
    assert list(bad_word_ids("ab", Letters())) == [(70, 71), (5, 70, 71)]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompt_logprobs_do_not_depend_on_the_cut(toy, chunk):
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=2, prompt_logprobs=2, n=2)
    outputs = World(toy, budget=chunk).answers(PROMPTS, params)
    expected = World(toy, budget=500).answers(PROMPTS, params)
    for output, reference in zip(outputs, expected, strict=True):
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        entries = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], reference.prompt_logprobs[1:], strict=True)
        for token, ours, theirs in entries:
            assert next(iter(ours)) == token
            assert {t: entry.rank for t, entry in ours.items()} == {t: entry.rank for t, entry in theirs.items()}
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-6)


def test_streams_grow_and_live_beside_a_batch(world):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (expected,) = world.texts(["stream me"], params)[0]
    world.slow_down()
    stream = world.driver.serve(world.jobs(["stream me"], params), partial=True)
    first = next(stream)[1]
    assert not first.finished
    batch = dict(world.driver.serve(world.jobs(PROMPTS, params)))  # steps for the stream, too
    assert all(output.finished for output in batch.values())
    rest = [output for _, output in stream]
    assert rest[-1].finished
    assert rest[-1].outputs[0].text == expected
    assert world.driver.call(lambda driver: torch.get_num_threads()).result() == torch.get_num_threads()
    texts = [first.outputs[0].text, *(output.outputs[0].text for output in rest)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    world.toy.assert_empty(world.core)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_closing_frees_everything(world, toy, steps):
    stream = world.driver.serve(world.jobs(PROMPTS), partial=True)
    for _ in range(steps):
        next(stream, None)  # whoever is slow gets fewer
    stream.close()
    toy.assert_empty(world.core)
    assert world.texts(["hello"]) == World(toy).texts(["hello"])


@pytest.mark.parametrize("at", [1, 2, 4])
def test_ctrl_c_frees_everything(world, toy, at):
    forward, calls = world.core.runner.model.forward, itertools.count(1)

    def interrupting(batch):
        if next(calls) == at:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.02)
        return forward(batch)

    world.core.runner.model.forward = interrupting
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            dict(world.driver.serve(world.jobs(PROMPTS)))
    finally:
        signal.signal(signal.SIGINT, before)
    toy.assert_empty(world.core)
    assert world.texts(PROMPTS) == World(toy).texts(PROMPTS)


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_step_that_breaks_off_ends_what_was_in_it(world, toy, at, error):
    forward, calls = world.core.runner.model.forward, itertools.count(1)

    def broken(batch):
        if next(calls) == at:
            raise error
        return forward(batch)

    world.core.runner.model.forward = broken
    failed = [output.error for output in world.answers(PROMPTS) if output.error]
    assert failed
    assert all(error.__name__ in reason for reason in failed)
    assert world.texts(PROMPTS) == World(toy).texts(PROMPTS)


def test_more_prompts_than_sequences_at_once(toy):
    prompts = [f"prompt {i}" for i in range(30)]
    world = World(toy, seqs=3)
    assert world.texts(prompts) == [World(toy).texts([prompt])[0] for prompt in prompts]


def test_a_slow_clip_does_not_stop_the_others(world):
    """Preprocessing runs beside the steps; the order of the results stays that of the prompts."""
    gate, process = threading.Event(), world.info.process

    def slow(item, dtype):
        if int(item.pixels[0, 0, 0]) == 7:
            assert gate.wait(20)
        return process(item, dtype)

    world.info.process = slow
    prompts = [{"prompt": "@", "multi_modal_data": {"image": picture(7)}}, *PROMPTS]
    order = []
    for index, _ in world.driver.serve(world.jobs(prompts)):
        order.append(index)
        if len(order) == len(PROMPTS):
            gate.set()
    assert sorted(order[:-1]) == [1, 2, 3, 4]
    assert order[-1] == 0


def test_callers_of_many_threads_take_turns(world):
    """One asks for much, and another one later for little: it does not wait for all of the first."""
    world.slow_down(0.002)
    ended = []

    def much():
        for _ in world.driver.serve(world.jobs(["a" * 9] * 120)):
            ended.append("much")

    thread = threading.Thread(target=much)
    thread.start()
    while len(ended) < 5:
        time.sleep(0.001)
    for _ in world.driver.serve(world.jobs(["b"])):
        ended.append("little")
    thread.join()
    assert ended.index("little") < 80
    world.toy.assert_empty(world.core)


def test_the_thread_ends_with_the_driver(world, toy):
    world.answers(PROMPTS)
    thread = world.driver._thread
    assert thread.is_alive()
    world.driver = None
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_closed_driver_takes_nothing_and_strands_nobody(world, toy):
    world.slow_down()
    ended = []
    jobs = world.jobs(["hello"] * 20, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    thread = threading.Thread(target=lambda: ended.extend(world.driver.serve(jobs)))
    thread.start()
    while not world.core.scheduler.requests:
        time.sleep(0.001)
    world.driver.close()
    thread.join(10)
    assert len(ended) == 20
    assert all("closed" in output.error for _, output in ended)
    with pytest.raises(InputError, match="closed"):
        dict(world.driver.serve(world.jobs(["hello"])))
    world.driver.close()
    toy.assert_empty(world.core)


@pytest.mark.parametrize("end", ["", "del llm, stream", "os._exit(0) if os.fork() == 0 else os.wait()", "raise SystemExit(0)"])
def test_a_process_ends_while_the_engine_computes(end):
    model = Path(__file__).parents[2] / "assets" / "tiny-vl"
    program = f"""
import os, warnings
warnings.simplefilter("ignore")
from sensorium import LLM, SamplingParams
llm = LLM({str(model)!r}, max_model_len=512)
stream = llm.stream("user 1 moves left", SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
next(stream)
print("running", flush=True)
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "running\n", "")


def test_a_fork_is_told_to_make_an_engine_of_its_own(world):
    world.answers(["hello"])
    world.driver._process += 1
    with pytest.raises(InputError, match="another process"):
        dict(world.driver.serve(world.jobs(["hello"])))
    world.driver._process -= 1
