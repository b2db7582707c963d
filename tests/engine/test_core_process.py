"""The core in a separate process: what crosses the boundary, and what happens when either side dies."""

from __future__ import annotations

import asyncio
import errno
import gc
import http.server
import io
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hostile import raising
from PIL import Image
from sensorium import LLM, AsyncLLM, SamplingParams, register_logits_processor
from sensorium.callers.errors import CheckpointError, ConfigError, EngineDeadError, InputError
from sensorium.engine.config import make_config
from sensorium.engine.core import channel
from sensorium.engine.core import child as child_process
from sensorium.engine.core import server as core_server
from sensorium.engine.core.channel import Channel, pack
from sensorium.engine.core.engine_core import EngineCore
from sensorium.engine.core.process import ProcessCore
from sensorium.kernels import native
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
        info = here.engine.loop.core.info
        assert isinstance(here.engine.loop.core, EngineCore)
        assert isinstance(llm.engine.loop.core, ProcessCore)
        assert llm.engine.loop.core.info == info
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
    loop, core = llm.engine.loop, llm.engine.loop.core
    prompt = {"prompt": PLACEHOLDER + "Read. ", "multi_modal_data": {"image": Image.new("RGB", (640, 480), (9, 99, 9))}}
    seen, found, stopped, step, steps = [], [], threading.Event(), core.step, itertools.count(1)
    callers = [
        threading.Thread(target=lambda: seen.extend(llm.stream(prompt if image else "user 1 moves left", LONG)), daemon=True),
        threading.Thread(target=lambda: found.extend(llm.generate(["a " * 200] * 6, LONG, use_tqdm=False)), daemon=True),
    ]

    def step_until_stopped():
        if next(steps) == 8:
            wait_until(lambda: image or seen)  # the first step computed the stream's first token
            os.kill(core.pid, signal.SIGSTOP)  # the parent waits for this step when the child is killed
            stopped.set()
        return step()

    core.step = step_until_stopped
    hold_first_step(loop, 7)
    for number, caller in enumerate(callers):
        wait_until(lambda number=number: len(loop._names) == number)
        caller.start()
    in_time, in_flight = stopped.wait(LONG_WAIT), len(loop._owners)
    os.kill(core.pid, signal.SIGKILL)
    assert (in_time, in_flight) == (True, 7)
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
        core, loop = llm.engine.loop.core, llm.engine.loop
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
        wait_until(lambda: loop.is_dead)
        with pytest.raises(EngineDeadError, match="make a new engine"):
            llm.generate("a")
        assert not loop._owners
        session.close()
    del session, stream
    wait_for_descriptors(before)


@pytest.mark.skipif(native.products() is None, reason="needs the C++ products")
@pytest.mark.parametrize("standby", [False, True])
def test_a_new_child_computes_with_the_bodies_of_the_first(standby, monkeypatch, tmp_path):
    """Also if rates cannot be kept, so that it would measure them again and might choose others."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    slow = [f"linear_{name}=torch" for name in ("float32", "bfloat16", "int8")]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
    real = child_process.start_child

    def start_first(bodies):
        with monkeypatch.context() as patch:
            patch.setenv("SENSORIUM_CPU", ",".join(slow) if not started else "")
            started.append(real(bodies))
        return started[-1]

    started = []
    monkeypatch.setattr(child_process, "start_child", start_first)
    with make(engine_restarts=2, engine_standby=standby) as llm:
        core, bodies = llm.engine.loop.core, llm.info.bodies
        assert set(slow) < set(bodies)
        expected = llm.generate("user 1", params, use_tqdm=False)[0].outputs
        for number in (1, 2):
            os.kill(core.pid, signal.SIGKILL)
            wait_until(lambda number=number: llm.engine.loop.num_restarts == number)
            assert core._ask("stats") is not None
            assert llm.generate("user 1", params, use_tqdm=False)[0].outputs == expected
            assert llm.info.bodies == bodies


def test_a_setting_of_the_user_is_the_one_of_each_child(monkeypatch):
    bodies = ("linear_int8=torch", "linear_int4=avx2")
    for setting in ("avx2", native.NEWEST):
        monkeypatch.setenv("SENSORIUM_CPU", setting)
        assert child_process._bodies_setting(bodies) == {}
    for setting in ("", "linear_int8=torch"):
        monkeypatch.setenv("SENSORIUM_CPU", setting)
        assert child_process._bodies_setting(bodies) == {"SENSORIUM_CPU": "linear_int8=torch,linear_int4=avx2"}
        assert child_process._bodies_setting(()) == {}


def test_a_child_that_dies_while_it_loads_is_replaced(monkeypatch):
    real, started = child_process.start_child, []

    def start(bodies):
        started.append(real(bodies))
        if len(started) == 1:
            started[0].process.kill()
        return started[-1]

    with make(engine_restarts=2) as llm:
        monkeypatch.setattr(child_process, "start_child", start)
        os.kill(llm.engine.loop.core.pid, signal.SIGKILL)
        wait_until(lambda: llm.engine.loop.num_restarts)
        assert llm.generate("a", LONG, use_tqdm=False)[0].error is None
        assert len(started) == llm.engine.loop.num_deaths == 2


_LOADING = """
import os, signal, sys, threading, time
from sensorium import LLM
from sensorium.callers.exits import end_process
from sensorium.engine.core import child, process
start_child, child._CLOSE_SECONDS = child.start_child, 1e6
def start(bodies):
    started = start_child(bodies)
    os.kill(started.process.pid, signal.SIGSTOP)  # it never loads
    print(started.process.pid, flush=True)
    return started
child.start_child = start
threading.excepthook = lambda _: None  # the thread that loads may see the child's end
threading.Thread(target=LLM, args=sys.argv[1:], kwargs={"engine_process": True}, daemon=True).start()
while not process._cores:
    time.sleep(0.01)
end_process(0)
"""


def test_a_process_that_ends_does_not_wait_for_a_child_that_loads():
    run = subprocess.run([sys.executable, "-c", _LOADING, MODEL], capture_output=True, text=True, timeout=LONG_WAIT)
    assert (run.returncode, run.stderr) == (0, "")
    assert not is_alive(int(run.stdout))


def test_a_child_in_reserve_takes_the_place_of_one_that_dies(monkeypatch):
    """It has been started before, and the next one is; one that was killed itself is replaced; none is left behind."""
    before, started = descriptors(), []
    real = child_process.start_child
    monkeypatch.setattr(child_process, "start_child", lambda bodies: started.append(real(bodies)) or started[-1])
    kill_two_children(started)
    assert len(started) == 5
    assert not any(is_alive(child.process.pid) for child in started)
    started.clear()
    wait_for_descriptors(before)


def test_an_engine_starts_without_a_process_in_reserve(monkeypatch, caplog):
    no_process = raising(OSError, errno.EAGAIN, "no more processes")
    monkeypatch.setattr(child_process.Standby, "renew", lambda standby, bodies: no_process(standby))
    with make(engine_restarts=1, engine_standby=True) as llm:
        assert llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None
    assert "no process can stand in reserve" in caplog.text


def kill_two_children(started):
    params = SamplingParams(max_tokens=2)
    with make(engine_restarts=2, engine_standby=True) as llm:
        loop = llm.engine.loop
        first, reserve = (child.process.pid for child in started)
        assert loop.core.pid == first
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: loop.num_restarts == 1)
        assert loop.core.pid == reserve
        assert len(started) == 3
        assert llm.generate("a", params, use_tqdm=False)[0].error is None
        started[2].process.kill()
        started[2].process.wait()
        os.kill(reserve, signal.SIGKILL)
        wait_until(lambda: loop.num_restarts == 2)
        assert loop.core.pid == started[3].process.pid
        assert llm.generate("a", params, use_tqdm=False)[0].error is None


LOCAL = {"allow_private_hosts": True, "allowed_media_ports": None, "timeout": LONG_WAIT, "max_request_seconds": LONG_WAIT}


class SlowImage(http.server.BaseHTTPRequestHandler):
    """Answers with an image as soon as the server's `release` is set."""

    def do_GET(self):
        self.server.asked.set()
        self.server.release.wait(LONG_WAIT)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.image)))
        self.end_headers()
        self.wfile.write(self.server.image)

    def log_message(self, *args):
        pass


@contextmanager
def slow_image():
    """Serve an image that waits: (URL, server)."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowImage) as server:
        server.asked, server.release, data = threading.Event(), threading.Event(), io.BytesIO()
        Image.new("RGB", (64, 48), (200, 0, 0)).save(data, "png")
        server.image = data.getvalue()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/image.png", server
        finally:
            server.release.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("release_first", [False, True])
def test_a_request_that_is_being_prepared_survives_the_death(release_first, caplog):
    """A slow download goes on while the child is killed and restarted; a request that was being computed is lost."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with slow_image() as (url, server), make(engine_restarts=1, media=LOCAL) as llm:
        loop, core, done = llm.engine.loop, llm.engine.loop.core, []
        prompt = {"prompt": PLACEHOLDER + "Read.", "multi_modal_data": {"image": url}}
        caller = threading.Thread(target=lambda: done.extend(llm.generate([prompt], params, use_tqdm=False)), daemon=True)
        caller.start()
        assert server.asked.wait(LONG_WAIT)
        killed = threading.Event()
        hold_steps(core, lambda: killed.is_set() or heard(loop))
        stream = llm.stream("user 1 moves left", LONG)
        next(stream)
        if release_first:  # the prompt is ready while the loop waits for the new process
            restart = core._restart
            core._restart = lambda: (server.release.set(), wait_until(lambda: not loop._messages.empty()), restart())
        os.kill(core.pid, signal.SIGKILL)
        killed.set()
        assert list(stream)[-1].error.code == "engine_dead"
        wait_until(lambda: loop.num_restarts == 1)
        server.release.set()
        caller.join(LONG_WAIT)
        (output,) = done
        assert output.error is None
        (expected,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        wait_until(lambda: not loop._names)
    (death,) = [record.getMessage() for record in caplog.records if "SIGKILL" in record.getMessage()]
    assert death.endswith("(requests lost: 1)")


def test_a_prompt_that_is_ready_before_the_death_is_noticed_is_admitted_after_it():
    with make(engine_restarts=1) as llm:
        loop, core, check = llm.engine.loop, llm.engine.loop.core, llm.engine.loop.core.check_alive

        def kill_first():
            if loop.num_restarts == 0 and not core._dead:
                os.kill(core.pid, signal.SIGKILL)
                os.waitid(os.P_PID, core.pid, os.WEXITED | os.WNOWAIT)
            check()

        core.check_alive = kill_first
        (output,) = llm.generate(["a"], SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.error is None
        assert (loop.num_deaths, loop.num_restarts) == (1, 1)


def test_prepared_requests_end_when_the_child_has_died_for_good():
    with slow_image() as (url, server), make(media=LOCAL) as llm:
        done, prompt = [], {"prompt": PLACEHOLDER + "Read.", "multi_modal_data": {"image": url}}
        caller = threading.Thread(target=lambda: done.extend(llm.generate([prompt], LONG, use_tqdm=False)), daemon=True)
        caller.start()
        assert server.asked.wait(LONG_WAIT)
        os.kill(llm.engine.loop.core.pid, signal.SIGKILL)
        caller.join(LONG_WAIT)
        assert done[0].error.code == "engine_dead"


def test_the_death_of_an_idle_child_is_noticed_at_once(caplog):
    """Nobody asks the engine anything; a sleeping one sleeps on, and no request is lost."""
    with make(engine_restarts=2) as llm:
        loop, dead = llm.engine.loop, threading.Event()
        loop.when_dead(dead.set)
        llm.sleep()
        for number in (1, 2):
            first = loop.core.pid
            os.kill(first, signal.SIGKILL)
            wait_until(lambda number=number: loop.num_restarts == number)
            assert loop.core.pid != first
            assert llm.engine.asleep == (number == 1)
            llm.wake_up()
            assert llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None
        assert not dead.is_set()
        os.kill(loop.core.pid, signal.SIGKILL)
        assert dead.wait(LONG_WAIT)
        assert (loop.num_deaths, loop.num_restarts, loop.is_dead, loop.is_restarting) == (3, 2, True, False)
        loop.when_dead(dead.clear)  # it is called at once
        assert not dead.is_set()
    lines = [record.getMessage() for record in caplog.records if "engine's process" in record.getMessage()]
    assert [line.partition(" in ")[0] for line in lines if "restarted in" in line] == 2 * ["the engine's process was restarted"]
    deaths = [line for line in lines if "SIGKILL" in line]
    assert len(deaths) == 3
    assert all(line.endswith("(requests lost: 0)") for line in deaths)
    assert "make a new engine" in deaths[-1]


def test_an_engine_that_is_closed_has_not_died(caplog):
    before = set(threading.enumerate())
    with make(engine_restarts=1) as llm:
        loop = llm.engine.loop
        assert any(thread.name == "sensorium-death-watch" for thread in set(threading.enumerate()) - before)
    wait_until(lambda: set(threading.enumerate()) <= before)
    assert (loop.num_deaths, loop.is_dead) == (0, False)
    assert not caplog.records


def test_an_item_that_was_being_encoded_when_the_child_died_is_refused():
    with make(engine_restarts=1, quarantine_seconds=1000.0) as llm:
        core = llm.engine.loop.core
        for shade in range(20):  # until the child is stopped in time
            prompt = {
                "prompt": PLACEHOLDER + "Read.",
                "multi_modal_data": {"image": Image.new("RGB", (640, 480), (9, 99, shade))},
            }
            stream = llm.stream(prompt, SamplingParams(max_tokens=2))
            caller = threading.Thread(target=lambda stream=stream: list(stream), daemon=True)
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
            hold_steps(llm.engine.loop.core, lambda: killed.is_set() or llm.stats.running < 4)
            hold_first_step(llm.engine.loop, 5)

            async def ask():
                return [output async for output in engine.generate("user 1 moves left", LONG)]

            tasks = [asyncio.create_task(ask()) for _ in range(5)]
            await asyncio.to_thread(wait_until, lambda: llm.stats.running >= 4)
            os.kill(llm.engine.loop.core.pid, signal.SIGKILL)
            killed.set()
            ends = [outputs[-1] for outputs in await asyncio.wait_for(asyncio.gather(*tasks), LONG_WAIT)]
            with pytest.raises(EngineDeadError):
                await ask()
            return ends

    ends = asyncio.run(run())
    assert [output.error.code for output in ends] == ["engine_dead"] * 5


def test_a_child_that_dies_idle_is_noticed_without_a_request():
    llm = make()
    os.kill(llm.engine.loop.core.pid, signal.SIGKILL)
    wait_until(lambda: llm.engine.loop.is_dead)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        llm.generate("a", LONG, use_tqdm=False)
    assert not is_alive(llm.engine.loop.core.pid)
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
print(llm.engine.loop.core.pid, flush=True)
del stream
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.stderr == ""
    pid = int(done.stdout)
    wait_until(lambda: not is_alive(pid))


def test_ctrl_c_in_the_terminal_does_not_reach_the_child(llm):
    assert os.getsid(llm.engine.loop.core.pid) != os.getsid(0)
    os.kill(llm.engine.loop.core.pid, signal.SIGINT)
    assert llm.generate("user 1", SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None


def test_a_forked_child_of_the_parent_leaves_the_core_alone(llm):
    pid = os.fork()
    if pid == 0:
        llm.engine.loop.core.close()
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
    pid, params = llm.engine.loop.core.pid, SamplingParams(max_tokens=2)
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
    assert llm.engine.loop.core.pid == pid


def refuse(*_: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def test_values_that_cannot_be_read_or_written_do_not_end_the_server(monkeypatch):
    ours, theirs = pair()
    server = core_server._Server(theirs, core_server._Records(), None)
    server._core = SimpleNamespace(close=lambda: None, fine=lambda: 1, unwritable=object)
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
    server._core = SimpleNamespace(close=lambda: None, fine=lambda: 1)
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
    maps = Path(f"/proc/{llm.engine.loop.core.pid}/maps")

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
    pid = other.engine.loop.core.pid
    other.close()
    other.close()
    session.close()
    assert not is_alive(pid)
    with pytest.raises(InputError, match="was closed"):
        other.generate("a")


def test_the_child_leaves_what_is_loaded_out_of_collections(monkeypatch):
    core = SimpleNamespace(bind_thread=lambda count: None, info=None, stats=None, sleep=lambda: None, wake_up=lambda: None)
    monkeypatch.setattr(core_server, "load_ranks", lambda config, *others: (core, config))
    server = core_server._Server(None, None, SimpleNamespace(write=None))
    config = make_config(MODEL, {"device": "cpu"})
    try:
        server._load(config, torch.get_num_threads(), 30, ())
        assert gc.get_freeze_count() > 0
        assert server._answer("sleep", ()) == (False, None)
        assert gc.get_freeze_count() == 0
        assert server._answer("wake_up", ()) == (False, None)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_the_core_is_closed_before_its_process_ends():
    """So that what waits for connectors is written."""
    (ours, theirs), activity = map(Channel, Pipe()), channel.Activity()
    server = core_server._Server(theirs, core_server._Records(), activity)
    server._core = SimpleNamespace(closed=[], close=lambda: server._core.closed.append(True))
    ours.send(*pack(("close", ())))
    server.run()
    assert server._core.closed == [True]
    for opened in (ours, theirs, activity):
        opened.close()
