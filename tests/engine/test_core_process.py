"""The core in a separate process: what crosses the boundary, and what happens when either side dies."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from sensorium import LLM, AsyncLLM, SamplingParams, register_logits_processor
from sensorium.engine import channel, core_process, core_server
from sensorium.engine.channel import Channel, pack
from sensorium.engine.config import make_config
from sensorium.engine.core import EngineCore
from sensorium.engine.core_process import ProcessCore
from sensorium.mm.errors import CheckpointError, ConfigError, EngineDeadError, InputError
from waiting import LONG as LONG_WAIT
from waiting import heard, hold_first_step, hold_steps, wait_until

MODEL = Path(__file__).parents[2] / "assets" / "tiny-vl"
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def make(**options) -> LLM:
    return LLM(MODEL, max_model_len=512, max_num_seqs=4, engine_process=True, **{"engine_restarts": 0} | options)


def descriptors() -> set[str]:
    """Return the open file descriptors of this process."""
    gc.collect()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            continue
    return found


def wait_for_descriptors(before: set[str]) -> None:
    """Wait until no other descriptors are open. Threads that import modules open some for a moment."""
    wait_until(lambda: descriptors() <= before)


def is_alive(pid: int) -> bool:
    """Return True unless the process has ended; a zombie counts as alive."""
    return Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def llm():
    with make() as llm:
        yield llm


def test_core_info_is_the_same_in_both_forms(llm):
    with LLM(MODEL, max_model_len=512, max_num_seqs=4) as here:
        info = here._engine_loop.core.info
        assert isinstance(here._engine_loop.core, EngineCore)
        assert isinstance(llm._engine_loop.core, ProcessCore)
        assert llm._engine_loop.core.info == info
        assert (info.max_model_len, info.max_num_seqs, info.device, info.dtype) == (512, 4, "cpu", "float32")
        assert info.hidden_size == llm.hidden_size
        assert info.modalities == ("image", "video")
        assert info.structured_outputs
        assert info.can_sleep
        assert llm.config.engine_process
        assert llm.config.kv_cache_memory_bytes == here.config.kv_cache_memory_bytes


def test_statistics_are_those_of_the_child(llm):
    before = llm.stats
    llm.generate(["user 1", "user 2"], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    after = llm.stats
    assert after.steps > before.steps
    assert (after.running, after.waiting, after.blocks_used) == (0, 0, 0)


@pytest.mark.parametrize("image", [False, True])
def test_a_killed_child_fails_every_request_in_flight(image):
    """The child is killed during an answer or during a prompt; no caller hangs and nothing leaks."""
    before = descriptors()
    kill_in_flight(make(max_num_batched_tokens=16), image)
    wait_for_descriptors(before)


def kill_in_flight(llm: LLM, image: bool) -> None:
    loop, core = llm._engine_loop, llm._engine_loop.core
    prompt = {"prompt": PLACEHOLDER + "Read. ", "multi_modal_data": {"image": Image.new("RGB", (640, 480), (9, 99, 9))}}
    seen, found, stopped, step, steps = [], [], threading.Event(), core.step, itertools.count(1)
    callers = [
        threading.Thread(target=lambda: seen.extend(llm.stream(prompt if image else "user 1 moves left", LONG))),
        threading.Thread(target=lambda: found.extend(llm.generate(["a " * 200] * 6, LONG, use_tqdm=False))),
    ]

    def step_until_stopped():
        if next(steps) >= 8 and (image or seen) and not stopped.is_set():
            os.kill(core.pid, signal.SIGSTOP)  # the parent waits for this step when the child is killed
            stopped.set()
        return step()

    core.step = step_until_stopped
    hold_first_step(loop, 7)
    for number, caller in enumerate(callers):
        wait_until(lambda number=number: len(loop._names) == number)
        caller.start()
    assert stopped.wait(LONG_WAIT)
    assert len(loop._owners) == 7
    os.kill(core.pid, signal.SIGKILL)
    for caller in callers:
        caller.join(LONG_WAIT)
    ends = [*seen[-1:], *found]
    assert len(ends) == 7
    for output in ends:
        assert output.finished
        assert output.error.code == "engine_dead"
        assert "SIGKILL" in output.error.message
    for call in (lambda: llm.generate("a"), lambda: llm.live("a"), llm.sleep, llm.wake_up, lambda: next(llm.stream("a"))):
        with pytest.raises(EngineDeadError, match="make a new engine"):
            call()
    assert not is_alive(core.pid)
    llm.close()


def test_a_killed_child_is_restarted():
    """Requests in flight and live sessions get a typed error; later ones are served, until the child has died too often."""
    before = descriptors()
    with make(engine_restarts=1) as llm:
        core, loop = llm._engine_loop.core, llm._engine_loop
        expected = llm.generate("user 1", LONG, use_tqdm=False)[0].outputs[0].token_ids
        session = llm.live("user 1", SamplingParams(max_tokens=2))
        session.answer()
        stream, first, killed = llm.stream("user 1 moves left", LONG), core.pid, threading.Event()
        hold_steps(core, lambda: killed.is_set() or heard(loop))
        next(stream)
        os.kill(first, signal.SIGSEGV)
        killed.set()
        (*_, last) = stream
        assert last.error.code == "engine_dead"
        assert "SIGSEGV" in last.error.message
        assert "send the request again" in last.error.message
        assert llm.generate("user 1", LONG, use_tqdm=False)[0].outputs[0].token_ids == expected
        assert core.pid != first
        assert not is_alive(first)
        with pytest.raises(InputError, match="session has ended"):
            session.append("more")
        assert llm.stats.running == 0
        os.kill(core.pid, signal.SIGKILL)
        (output,) = llm.generate("a", LONG, use_tqdm=False)
        assert output.error.code == "engine_dead"
        with pytest.raises(EngineDeadError, match="make a new engine"):
            llm.generate("a")
        assert not loop._owners
        session.close()
    del session, stream
    wait_for_descriptors(before)


def test_a_child_that_dies_while_it_loads_is_replaced(monkeypatch):
    real, started = core_process._start, []

    def start(*args):
        started.append(real(*args))
        if len(started) == 1:
            started[0].kill()
        return started[-1]

    with make(engine_restarts=2) as llm:
        monkeypatch.setattr(core_process, "_start", start)
        os.kill(llm._engine_loop.core.pid, signal.SIGKILL)
        (output,) = llm.generate("a", LONG, use_tqdm=False)
        assert output.error.code == "engine_dead"
        assert llm.generate("a", LONG, use_tqdm=False)[0].error is None
        assert len(started) == 2


def test_an_item_that_was_being_encoded_when_the_child_died_is_refused():
    with make(engine_restarts=1, quarantine_seconds=1000.0) as llm:
        core = llm._engine_loop.core
        for shade in range(20):  # until the child is stopped in time
            prompt = {
                "prompt": PLACEHOLDER + "Read.",
                "multi_modal_data": {"image": Image.new("RGB", (640, 480), (9, 99, shade))},
            }
            stream = llm.stream(prompt, SamplingParams(max_tokens=2))
            caller = threading.Thread(target=lambda stream=stream: list(stream))
            caller.start()
            while caller.is_alive() and not core._activity.read():
                time.sleep(0)
            os.kill(core.pid, signal.SIGSTOP)
            caught = core._activity.read()
            os.kill(core.pid, signal.SIGKILL if caught else signal.SIGCONT)
            caller.join(LONG_WAIT)
            if caught:
                break
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)
        assert (output.error.code, output.error.modality, output.error.index) == ("encoder_failed", "image", 0)
        other = prompt | {"multi_modal_data": {"image": Image.new("RGB", (64, 48), (200, 0, 0))}}
        assert llm.generate(other, SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None


def test_coroutines_get_an_error_when_the_child_is_killed():
    async def run():
        async with AsyncLLM(make()) as engine:
            llm, killed = engine.llm, threading.Event()
            hold_steps(llm._engine_loop.core, lambda: killed.is_set() or llm.stats.running < 4)
            hold_first_step(llm._engine_loop, 5)

            async def ask():
                return [output async for output in engine.generate("user 1 moves left", LONG)]

            tasks = [asyncio.create_task(ask()) for _ in range(5)]
            await asyncio.to_thread(wait_until, lambda: llm.stats.running >= 4)
            os.kill(llm._engine_loop.core.pid, signal.SIGKILL)
            killed.set()
            ends = [outputs[-1] for outputs in await asyncio.wait_for(asyncio.gather(*tasks), LONG_WAIT)]
            with pytest.raises(EngineDeadError):
                await ask()
            return ends

    ends = asyncio.run(run())
    assert [output.error.code for output in ends] == ["engine_dead"] * 5


def test_a_child_that_dies_idle_is_noticed_by_the_next_request():
    llm = make()
    os.kill(llm._engine_loop.core.pid, signal.SIGKILL)
    (output,) = llm.generate("a", LONG, use_tqdm=False)
    assert output.error.code == "engine_dead"
    assert not is_alive(llm._engine_loop.core.pid)
    llm.close()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "llm.close()", "del llm", ""])
def test_the_child_ends_with_its_parent(end):
    """The child ends however the parent ends during an answer."""
    program = f"""
import os, signal, warnings
warnings.simplefilter("ignore")
from sensorium import LLM, SamplingParams
llm = LLM({str(MODEL)!r}, max_model_len=512, engine_process=True)
stream = llm.stream("user 1 moves left", SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
next(stream)
print(llm._engine_loop.core.pid, flush=True)
del stream
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.stderr == ""
    pid = int(done.stdout)
    wait_until(lambda: not is_alive(pid))


def test_ctrl_c_in_the_terminal_does_not_reach_the_child(llm):
    assert os.getsid(llm._engine_loop.core.pid) != os.getsid(0)
    os.kill(llm._engine_loop.core.pid, signal.SIGINT)
    assert llm.generate("user 1", SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None


def test_a_forked_child_of_the_parent_leaves_the_core_alone(llm):
    pid = os.fork()
    if pid == 0:
        llm._engine_loop.core.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert llm.generate("user 1", SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None


def test_load_errors_are_raised_as_in_this_process(tmp_path):
    for options, kind, said in (
        ({"max_model_len": 10**6}, ConfigError, "max_position_embeddings"),
        ({"kv_cache_memory_bytes": 1000}, ConfigError, "raise kv_cache_memory_bytes"),
    ):
        before = descriptors()
        with pytest.raises(kind, match=said):
            LLM(MODEL, engine_process=True, **options)
        wait_for_descriptors(before)
    folder = tmp_path / "model"
    folder.mkdir()
    for file in MODEL.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError):
        LLM(folder, engine_process=True)


class OnlyToken:
    """Allows one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, token_ids, logits) -> None:
        chosen = logits[self.token].item()
        logits.fill_(-torch.inf)
        logits[self.token] = chosen


def test_logits_processors_are_imported_by_the_child(llm, tmp_path, monkeypatch):
    (tmp_path / "processors_of_a_test.py").write_text(
        "class Only:\n"
        "    def __init__(self, token): self.token = token\n"
        "    def __call__(self, token_ids, logits):\n"
        "        logits[:self.token] = logits[self.token + 1:] = float('-inf')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import processors_of_a_test as module

    register_logits_processor("only in a module", module.Only)
    register_logits_processor("only here", lambda token: OnlyToken(token))
    with make() as fresh:  # the child searches the parent's sys.path
        params = SamplingParams(max_tokens=3, ignore_eos=True, logits_processors={"only in a module": {"token": 70}})
        (output,) = fresh.generate("user 1", params, use_tqdm=False)
        assert output.outputs[0].token_ids == [70, 70, 70]
    params = SamplingParams(max_tokens=3, logits_processors={"only here": {"token": 70}})
    (output,) = llm.generate("user 1", params, use_tqdm=False)
    assert "the engine's process cannot import it" in output.error.message
    params = SamplingParams(max_tokens=3, logits_processors={"only in a module": {"token": object()}})
    (output,) = llm.generate("user 1", params, use_tqdm=False)
    assert output.error.code == "invalid_input"
    assert llm.generate("user 1", SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None


def test_options_cross_the_boundary():
    config = make_config(
        MODEL,
        {
            "media": {"allowed_media_domains": ("a.org",), "background": (1, 2, 3), "timeout": 2.5},
            "limit_mm_per_prompt": {"image": 2},
            "mm_processor_kwargs": {"max_pixels": 64 * 64},
            "seed": 7,
            "quarantine_seconds": 1.5,
            "engine_process": True,
        },
    )
    ours, theirs = pair()
    ours.send(*pack(config))
    assert theirs.receive() == config
    ours.close()
    theirs.close()


def pair() -> tuple[Channel, Channel]:
    one, two = Pipe()
    return Channel(one), Channel(two)


def test_large_tensors_go_through_memory_without_a_name():
    before = descriptors()
    ours, theirs = pair()
    tensors = {
        "large": torch.randn(300, 700).to(torch.bfloat16),
        "turned": torch.arange(20_000).reshape(100, 200).T,
        "small": torch.tensor([1.5, 2.5]),
        "empty": torch.empty(0, 4),
    }
    data, descriptor = pack(tensors)
    assert len(data) < 1000
    assert os.fstat(descriptor).st_size >= tensors["large"].nbytes + tensors["turned"].nbytes
    sender = threading.Thread(target=ours.send, args=(data, descriptor))
    sender.start()
    found = theirs.receive()
    sender.join()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    mapped = Path("/proc/self/maps").read_text()
    assert mapped.count("memfd:sensorium") == 1
    ours.close()
    theirs.close()
    wait_for_descriptors(before), "a mapping keeps no descriptor open"
    del found
    gc.collect()
    assert "memfd:sensorium" not in Path("/proc/self/maps").read_text()


def test_a_message_that_cannot_be_sent_fails_its_request_only(llm, monkeypatch):
    """One request finds no free file descriptor to send its pixels; another has a value that cannot be serialised."""
    pid, params = llm._engine_loop.core.pid, SamplingParams(max_tokens=2)
    stream = llm.stream("user 1", LONG)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(channel.os, "memfd_create", refuse)
        prompt = {"prompt": PLACEHOLDER + "Read.", "multi_modal_data": {"image": Image.new("RGB", (320, 240), (9, 99, 9))}}
        (full,) = llm.generate(prompt, params, use_tqdm=False)
    assert full.error.code == "out_of_memory"
    unwritable = SamplingParams(max_tokens=2, logits_processors={"suppress_tokens": {"tokens": [2**70]}})
    (output,) = llm.generate("user 1", unwritable, use_tqdm=False)
    assert output.error.code == "invalid_input"
    assert [*stream][-1].error is None
    assert llm._engine_loop.core.pid == pid


def refuse(*_: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def test_values_that_cannot_be_read_or_written_do_not_end_the_server(monkeypatch):
    ours, theirs = pair()
    server = core_server._Server(theirs, core_server._Records(), None)
    server._core = SimpleNamespace(fine=lambda: 1, unwritable=object)
    thread = threading.Thread(target=server.run)
    thread.start()
    for verb, failed in (("unwritable", True), ("fine", False)):
        ours.send(*pack((verb, ())))
        assert ours.receive()[0] is failed
    data, _ = pack(("fine", ()))
    ours.send(data[:8] + b"\xc1", None)
    assert ours.receive()[0]
    ours.send(*pack(("fine", ())))
    assert ours.receive() == (False, 1, ())
    ours.send(*pack(("close", ())))
    thread.join(LONG_WAIT)
    assert not thread.is_alive()
    ours.close()
    theirs.close()


@pytest.mark.parametrize(("seconds", "count"), [(0.0, 3), (1000.0, 0)])
def test_free_memory_is_returned_between_verbs(monkeypatch, seconds, count):
    ours, theirs = pair()
    trimmed = []
    monkeypatch.setattr(core_server, "trim_heap", lambda: trimmed.append(1))
    monkeypatch.setattr(core_server, "_TRIM_SECONDS", seconds)
    monkeypatch.setattr(core_server, "_TRIM_SHARE", float("inf"))  # the time that a return takes delays the next one by nothing
    server = core_server._Server(theirs, core_server._Records(), None)
    server._core = SimpleNamespace(fine=lambda: 1)
    thread = threading.Thread(target=server.run)
    thread.start()
    for _ in range(3):
        ours.send(*pack(("fine", ())))
        assert ours.receive() == (False, 1, ())
    ours.send(*pack(("close", ())))
    thread.join(LONG_WAIT)
    assert len(trimmed) == count
    ours.close()
    theirs.close()


def test_the_memory_of_an_item_goes_with_its_request(llm):
    prompt = {"prompt": PLACEHOLDER + "Read.", "multi_modal_data": {"image": Image.new("RGB", (320, 240), (9, 9, 99))}}
    assert llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None
    maps = Path(f"/proc/{llm._engine_loop.core.pid}/maps")

    def freed() -> bool:
        llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
        return "memfd:sensorium" not in maps.read_text()

    wait_until(freed)


def test_warnings_of_the_child_reach_the_log(caplog):
    with LLM(MODEL, kv_cache_memory_bytes=1 << 19, engine_process=True):
        assert "max_model_len is lowered to" in caplog.text


def test_a_closed_engine_says_so(llm):
    other = make()
    session = other.live("user 1", SamplingParams(max_tokens=2))
    session.answer()
    pid = other._engine_loop.core.pid
    other.close()
    other.close()
    session.close()
    assert not is_alive(pid)
    with pytest.raises(InputError, match="was closed"):
        other.generate("a")
