import errno
import importlib
import io
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import soundfile
import torch
from mutants import FILES, RATE, mutated
from sensorium.callers.errors import BusyError, ConfigError, InputError, MediaError
from sensorium.mm.geometry import FrameSampling
from sensorium.mm.media import gate, isolate
from sensorium.mm.media.isolate import Interrupt, close_workers, codec_runner, keep_workers, run_isolated
from sensorium.mm.media.policy import DecodeSpec, MediaPolicy
from sensorium.mm.media.worker import GRACE
from sensorium.mm.parse import MediaSource
from sensorium.mm.types import AudioItem, FramePlan, ImageItem, MediaHeader, VideoItem
from sensorium.server.errors import error_response

POLICY = MediaPolicy(decode_isolation="process", worker_memory_bytes=256 << 20, worker_seconds=30)
CODECS = Path(__file__).parents[2] / "helpers" / "misbehaving_codecs.py"


LIGHT = """
import sys

WORKER_IMPORTS = ("{module}", "{library}")


def imported(data: bytes) -> list[str]:
    return sorted(sys.modules)
"""


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A module of well and badly behaved codecs that both processes can import."""
    folder = tmp_path_factory.mktemp("codecs")
    shutil.copy(CODECS, folder / "codecs_of_the_test.py")
    for name in ("told", "go"):
        os.mkfifo(folder / name)
    sys.path.insert(0, str(folder))
    close_workers()
    yield importlib.import_module("codecs_of_the_test")
    sys.path.remove(str(folder))
    close_workers()


def workers() -> list[int]:
    """Return the process ids of codec workers of this process, zombies included."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else None
            command = (entry / "cmdline").read_bytes()
        except OSError:  # it ended while we looked
            continue
        if state and int(state[1]) == os.getpid() and (state[0] == "Z" or b"sensorium.mm.media.worker" in command):
            found.append(int(entry.name))
    return found


def gone(pid: int) -> bool:
    """Return whether the process ends within some minutes. A zombie counts as ended."""
    until = time.monotonic() + 240
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def said(codecs: ModuleType) -> str:
    """Wait for the text that a worker writes to its pipe, and return it."""
    assert select.select([codecs.TOLD], [], [], 240)[0]
    return os.read(codecs.TOLD, 100).decode()


def test_results_and_refusals_are_those_of_the_function(codecs: ModuleType) -> None:
    data, sampling = bytes(range(9)), FrameSampling(fps=2.0, max_duration=1.5)
    assert torch.equal(run_isolated(codecs.pixels, data, POLICY), codecs.pixels(data, POLICY))
    samples = run_isolated(codecs.sound, data, 16000, POLICY)
    assert samples.dtype == torch.float32
    assert torch.equal(samples, codecs.sound(data, 16000, POLICY))
    samples[0] = 2.0  # memory of its own
    header = run_isolated(codecs.header, data, sampling, POLICY)
    assert isinstance(header, MediaHeader)
    assert isinstance(header.frames, FramePlan)
    assert header == codecs.header(data, sampling, POLICY)
    clip, same = run_isolated(codecs.clip, data, sampling, POLICY), codecs.clip(data, sampling, POLICY)
    assert isinstance(clip, VideoItem)
    assert clip.plan == same.plan
    assert torch.equal(clip.frames, same.frames)
    assert run_isolated(codecs.nothing, b"", POLICY).shape == (0, 5)
    with pytest.raises(InputError, match=r"^it is no père$"):
        run_isolated(codecs.refused, data, POLICY)


def test_a_bug_is_not_the_callers_fault_and_shows_where_it_is(codecs: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)bug failed in the codec worker.*IndexError"):
        run_isolated(codecs.bug, b"", POLICY)
    with pytest.raises(RuntimeError, match="TypeError: an object cannot leave the worker"):
        run_isolated(codecs.unknown, b"", POLICY)
    with pytest.raises(TypeError, match="sound is called without a MediaPolicy"):
        run_isolated(codecs.sound, b"", 16000)


def test_only_encoded_bytes_and_only_where_the_policy_says_so_go_to_a_worker(codecs: ModuleType) -> None:
    worker = codec_runner(POLICY, b"")(codecs.pid, b"", POLICY)
    assert worker != os.getpid()
    assert os.getpriority(os.PRIO_PROCESS, worker) == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)
    assert codec_runner(POLICY, [1])(codecs.pid, [1], POLICY) == os.getpid()
    assert codec_runner(MediaPolicy(), b"")(codecs.pid, b"", MediaPolicy()) == os.getpid()
    with pytest.raises(ConfigError, match="decode_isolation"):
        MediaPolicy(decode_isolation="vm")


def test_a_worker_is_used_again_with_one_thread_and_no_core_dumps(codecs: ModuleType) -> None:
    first = run_isolated(codecs.pid, b"", POLICY)
    assert run_isolated(codecs.pid, b"", POLICY) == first
    assert run_isolated(codecs.environment, b"", POLICY) == {"threads": 1, "core": 0}


@pytest.mark.parametrize(
    ("module", "library"),
    [("sensorium.engine.worker.grammar_compiler", "llguidance"), ("sensorium.processors.text.rendering", "jinja2")],
)
def test_a_worker_imports_only_what_its_module_needs(
    module: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker must not import torch, which takes seconds: the first request would wait for it."""
    (tmp_path / f"light_{library}.py").write_text(LIGHT.format(module=module, library=library))
    monkeypatch.syspath_prepend(tmp_path)
    close_workers()
    reply = isolate.call_worker(importlib.import_module(f"light_{library}").imported, b"", 240, 1 << 30)
    assert reply.kind == "value", reply.text
    imported = cast(list[str], reply.value)
    assert {module, library} <= {*imported}
    assert not {"torch", "numpy", "PIL"} & {*imported}
    close_workers()


def test_what_a_codec_writes_to_the_terminal_stays_away_from_it(codecs: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    close_workers()
    assert run_isolated(codecs.complains, b"MissingRequired: TIFF directory is missing", POLICY)
    assert capfd.readouterr() == ("", "")


def test_a_worker_knows_no_secrets_and_gains_no_rights(codecs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    close_workers()
    monkeypatch.setenv("A_SECRET_KEY", "1")
    assert run_isolated(codecs.secrets, b"", POLICY) == 0
    status = Path(f"/proc/{run_isolated(codecs.pid, b'', POLICY)}/status").read_text()
    assert "NoNewPrivs:\t1\n" in status


def test_a_worker_has_no_network_no_files_and_no_processes(codecs: ModuleType, tmp_path: Path) -> None:
    close_workers()
    done = run_isolated(codecs.tries, bytes(tmp_path / "x"), POLICY)
    assert {name for name, problem in done.items() if problem != errno.EPERM} == {"thread"}
    assert done["thread"] == 0
    assert list(tmp_path.iterdir()) == []


WITHOUT_A_FILTER = """
import errno, socket, sys
from sensorium.mm.media import sandbox
sandbox._SECCOMP = (9999, 9999)
print(sandbox.cut_off())
for deed in (lambda: open("/etc/passwd"), socket.socket):
    try:
        deed()
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def test_without_a_filter_a_worker_opens_nothing_and_this_is_told_once(
    codecs: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_A_FILTER], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["Function not implemented", "EMFILE", "EMFILE"], done.stderr
    monkeypatch.setattr(isolate.CodecWorker, "problem", property(lambda _: "old kernel", lambda *_: None), raising=False)
    with caplog.at_level(logging.WARNING, "sensorium"):
        for _ in range(2):
            run_isolated(codecs.pid, b"", POLICY)
    assert [record.message.count("are not filtered (old kernel)") for record in caplog.records] == [1]
    with pytest.raises(RuntimeError, match=r"cannot be filtered \(old kernel\).*worker_sandbox"):
        run_isolated(codecs.pid, b"", replace(POLICY, worker_sandbox="require"))
    with pytest.raises(ConfigError, match="worker_sandbox"):
        MediaPolicy(worker_sandbox="never")


def test_tenants_share_no_worker_and_few_idle_ones_are_kept(codecs: ModuleType) -> None:
    close_workers()
    pids = {name: run_isolated(codecs.pid, b"", POLICY, tenant=name) for name in (None, *"abcdef")}
    assert len(set(pids.values())) == 7
    assert set(workers()) == {pids[name] for name in "bcdef"}
    assert run_isolated(codecs.pid, b"", POLICY, tenant="c") == pids["c"]
    assert run_isolated(codecs.pid, b"", POLICY, tenant="a") not in pids.values()


@pytest.mark.parametrize(("name", "how"), [("segfaults", "SIGSEGV"), ("aborts", "SIGABRT"), ("exits", "exit status 7")])
def test_a_crash_fails_its_item_alone(codecs: ModuleType, name: str, how: str) -> None:
    with pytest.raises(InputError, match=rf"^decoding it crashed the codec \({how}\); the file is broken or hostile$"):
        run_isolated(getattr(codecs, name), b"", POLICY)
    assert run_isolated(codecs.pixels, b"abc", POLICY).shape == (2, 3, 3)


@pytest.mark.parametrize(
    "answer", [b"\xff" * 64, bytes(64), b"\x01" + bytes(7) + b"\xc1", b"\x04" + bytes(7) + b"\x92\xc0\x91\xcf"]
)
def test_an_answer_that_is_none_is_a_crash(codecs: ModuleType, answer: bytes) -> None:
    """The worker is not trusted: what comes back is read as data of known types and bounded sizes."""
    policy = MediaPolicy(worker_seconds=0.5)
    with pytest.raises(InputError, match=r"crashed the codec|took longer"):
        run_isolated(codecs.babbles, answer, policy)


def test_what_takes_too_long_is_stopped(codecs: ModuleType) -> None:
    policy = MediaPolicy(worker_seconds=0.5)
    pid = run_isolated(codecs.pid, b"", POLICY)
    began = time.monotonic()
    with pytest.raises(InputError, match=r"longer than 0\.5 s") as caught:
        run_isolated(codecs.sleeps, b"", policy)
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_input", "worker_seconds")
    assert time.monotonic() - began < 300  # of 600
    assert gone(pid)
    assert run_isolated(codecs.pixels, b"abc", POLICY).shape == (2, 3, 3)


def test_a_codec_that_computes_for_too_long_is_the_items_fault(codecs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load of the machine on which the test runs does not count."""
    monkeypatch.setattr(isolate.CodecWorker, "processor_time", lambda _: next(times))
    times = iter([(5.0, 1.0), (5.9, 1.1)])
    with pytest.raises(InputError, match=r"^decoding it took longer than 1 s"):
        run_isolated(codecs.spins, b"", MediaPolicy(worker_seconds=1.0))


@pytest.mark.parametrize("ran_and_waited", [(5.1, 2.0), (5.1, 1.0)])  # the last wait is not counted yet
def test_a_worker_that_gets_no_processor_is_the_machines_fault(
    ran_and_waited: tuple[float, float], codecs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolate.CodecWorker, "processor_time", lambda _: next(times))
    times = iter([(5.0, 1.0), ran_and_waited])
    with pytest.raises(BusyError, match="too little processor time"):
        run_isolated(codecs.spins, b"", MediaPolicy(worker_seconds=1.0))


def test_a_worker_that_is_stopped_is_the_machines_fault(codecs: ModuleType) -> None:
    with ThreadPoolExecutor(1) as pool:
        item = pool.submit(run_isolated, codecs.sleeps, b"tell", MediaPolicy(worker_seconds=3.0))
        os.kill(int(said(codecs)), signal.SIGSTOP)
        with pytest.raises(BusyError, match="got too little processor time"):
            item.result()
    assert run_isolated(codecs.pixels, b"abc", POLICY).shape == (2, 3, 3)


def test_a_worker_that_ends_itself_is_the_machines_fault(codecs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own timer fires only if the process that waits for it is late."""
    receive = isolate.receive

    def late(channel: Any, deadline: Any, *more: Any) -> Any:
        time.sleep(GRACE + 1)
        return receive(channel, deadline, *more)

    run_isolated(codecs.pid, b"", POLICY)  # the worker has started
    monkeypatch.setattr(isolate, "receive", late)
    with pytest.raises(BusyError, match="reply was not read"):
        run_isolated(codecs.sleeps, b"", MediaPolicy(worker_seconds=0.3))


def test_a_worker_that_cannot_start_is_the_machines_fault(codecs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    close_workers()
    with monkeypatch.context() as patch:
        patch.setattr(isolate, "START_SECONDS", 0.001)
        with pytest.raises(BusyError, match=r"did not start within 0\.001 s"):
            run_isolated(codecs.pid, b"", POLICY)
    assert workers() == []
    lacks = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *_, **__: (_ for _ in ()).throw(lacks))
        with pytest.raises(BusyError, match="no codec worker can be started"):
            run_isolated(codecs.pid, b"", POLICY)
    assert workers() == []


def test_a_busy_machine_is_no_fault_of_the_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error passes the gate unchanged, and is 503 over HTTP."""
    monkeypatch.setattr(isolate, "_ask", lambda *_: (_ for _ in ()).throw(isolate._busy_error("no time")))
    for step in (gate.probe, gate.decode):
        with pytest.raises(BusyError) as caught:
            step(MediaSource("image", 0, b"GIF89a"), DecodeSpec(), POLICY)
    info = caught.value.info
    assert (info.code, info.modality, type(info.exception())) == ("busy", None, BusyError)
    response = error_response(info)
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) > 0
    assert "the machine is busy: no time; send the request again later" in bytes(response.body).decode()


def test_time_is_counted_per_item_and_may_be_without_end(codecs: ModuleType) -> None:
    policy = MediaPolicy(worker_seconds=float("inf"), worker_memory_bytes=(1 << 63) - 1)
    assert run_isolated(codecs.takes, b"", 1000, policy) == 1000


@pytest.mark.parametrize("name", ["takes", "takes_numpy", "takes_torch"])
def test_memory_is_the_items_own_and_bounded(codecs: ModuleType, name: str) -> None:
    function = getattr(codecs, name)
    assert run_isolated(function, b"", 200 << 20, POLICY) == 200 << 20
    with pytest.raises(InputError, match=r"^decoding it needed more than 268,435,456 bytes of memory; .* worker_memory_bytes$"):
        run_isolated(function, b"", 300 << 20, POLICY)
    assert run_isolated(function, b"", 200 << 20, POLICY) == 200 << 20


def test_a_worker_that_leaks_is_replaced(codecs: ModuleType) -> None:
    close_workers()  # idle ones may have grown
    pids = [run_isolated(codecs.leaks, b"", 200 << 20, POLICY) for _ in range(4)]
    assert pids[0] == pids[1] == pids[2]
    assert pids[3] != pids[0]


def test_a_worker_killed_while_at_work_or_while_idle(codecs: ModuleType) -> None:
    with ThreadPoolExecutor(1) as pool:
        item = pool.submit(run_isolated, codecs.sleeps, b"tell", POLICY)
        os.kill(int(said(codecs)), signal.SIGKILL)
        with pytest.raises(InputError) as caught:
            item.result()
        assert caught.value.info.code == "out_of_memory"
    idle = run_isolated(codecs.pid, b"", POLICY)
    os.kill(idle, signal.SIGKILL)
    assert gone(idle)
    assert run_isolated(codecs.pid, b"", POLICY) != idle


def test_an_interrupt_ends_the_work_at_any_time(codecs: ModuleType) -> None:
    interrupt = Interrupt()
    with ThreadPoolExecutor(1) as pool:
        item = pool.submit(interrupt.run, lambda: run_isolated(codecs.sleeps, b"tell", POLICY))
        worker = int(said(codecs))
        interrupt.stop()
        with pytest.raises(InputError, match="aborted"):
            item.result(60)
    assert gone(worker)
    with pytest.raises(InputError, match="aborted"):
        interrupt.run(lambda: 1)
    late, done = Interrupt(), Interrupt()
    with pytest.raises(InputError, match="aborted"):
        late.run(lambda: (late.stop(), run_isolated(codecs.pid, b"", POLICY)))
    worker = done.run(lambda: run_isolated(codecs.pid, b"", POLICY))
    done.stop()
    assert run_isolated(codecs.pid, b"", POLICY) == worker, "a worker that has answered is not killed"


def test_a_worker_that_is_killed_after_its_reply_serves_nobody_again(
    codecs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt, ask = Interrupt(), isolate.CodecWorker.ask

    def stop_after_reply(*args: Any) -> Any:
        reply = ask(*args)
        interrupt.stop()
        return reply

    worker = run_isolated(codecs.pid, b"", POLICY)
    with monkeypatch.context() as patch:
        patch.setattr(isolate.CodecWorker, "ask", stop_after_reply)
        patch.setattr(isolate.CodecWorker, "alive", True)  # as `poll` says until the signal has ended the process
        with pytest.raises(InputError, match="aborted"):
            interrupt.run(lambda: run_isolated(codecs.pid, b"", POLICY))
        patch.setattr(isolate.CodecWorker, "ask", ask)
        assert run_isolated(codecs.pid, b"", POLICY) != worker
    assert gone(worker)


def test_threads_decode_beside_each_other(codecs: ModuleType) -> None:
    barrier = threading.Barrier(4, timeout=240)

    def work(number: int) -> set[int]:
        pids = set()
        for turn in range(8):
            barrier.wait()
            data = bytes([number, turn]) * 50_000
            assert torch.equal(run_isolated(codecs.pixels, data, POLICY), codecs.pixels(data, POLICY))
            pids.add(run_isolated(codecs.pid, data, POLICY))
        return pids

    with ThreadPoolExecutor(4) as pool:
        pids = set().union(*pool.map(work, range(4)))
    assert 2 <= len(pids) <= 4
    assert set(workers()) >= pids


def test_nothing_is_left_after_close_and_it_starts_again(codecs: ModuleType) -> None:
    run_isolated(codecs.pid, b"", POLICY)
    assert workers()
    close_workers()
    assert workers() == []
    assert run_isolated(codecs.pixels, b"abc", POLICY).shape == (2, 3, 3)


class Owner:
    pass


def test_workers_end_with_the_last_who_keeps_them(codecs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "_owners", 0)  # engines of other tests may be alive
    close_workers()
    one, two, plain = Owner(), Owner(), Owner()
    release, _, nothing = (keep_workers(owner) for owner in (one, two, plain))
    pid = run_isolated(codecs.pid, b"", POLICY)
    for _ in range(2):  # a second time changes nothing
        release()
    nothing()
    assert workers() == [pid]
    del two
    assert workers() == []


def test_a_worker_at_work_while_all_are_stopped_ends_with_its_item(codecs: ModuleType) -> None:
    with ThreadPoolExecutor(1) as pool:
        item = pool.submit(run_isolated, codecs.waits, b"", POLICY)
        said(codecs)
        close_workers()
        os.write(codecs.GO, b"x")
        assert item.result() == 1
    assert workers() == []


@pytest.mark.parametrize("end", ["pass", "import os; os.kill(os.getpid(), 9)"])
def test_nothing_is_left_of_a_process_that_ends(codecs: ModuleType, end: str) -> None:
    script = f"""
        import codecs_of_the_test as codecs
        from sensorium.mm.media.isolate import run_isolated
        from sensorium.mm.media.policy import MediaPolicy
        print(run_isolated(codecs.pid, b"", MediaPolicy()), flush=True)
        {end}
    """
    env = os.environ | {"PYTHONPATH": str(Path(codecs.__file__ or "").parent)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=env, capture_output=True, text=True)
    assert gone(int(done.stdout)), done.stderr
    assert done.stderr == ""


def test_a_worker_at_work_ends_soon_after_its_parent(codecs: ModuleType) -> None:
    """The worker ends by its own timer, which is set a little later than its parent's."""
    script = """
        import codecs_of_the_test as codecs
        from sensorium.mm.media.isolate import run_isolated
        from sensorium.mm.media.policy import MediaPolicy
        run_isolated(codecs.sleeps_till_its_alarm, b"", MediaPolicy(worker_seconds=30))
    """
    env = os.environ | {"PYTHONPATH": str(Path(codecs.__file__ or "").parent)}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=env, stderr=subprocess.DEVNULL) as parent:
        pid, left = said(codecs).split()
        parent.kill()
    assert 0 < float(left) <= 30 + GRACE
    assert gone(int(pid))


def test_a_forked_child_has_workers_of_its_own(codecs: ModuleType) -> None:
    ours = run_isolated(codecs.pid, b"", POLICY)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(run_isolated(codecs.pid, b"", POLICY)).encode())
            close_workers()
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    theirs = int(os.read(reader, 20))
    os.close(reader)
    assert theirs != ours
    assert gone(theirs)
    assert run_isolated(codecs.pid, b"", POLICY) == ours


def test_a_worker_that_cannot_start_is_no_input_error(codecs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    close_workers()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"the codec worker did not start \(exit status 1\)"):
        run_isolated(codecs.pid, b"", POLICY)


def outcome(modality: str, data: bytes, policy: MediaPolicy) -> object:
    """Return header, plan, pixels or samples as plain data, or the text of the error."""
    source, spec = MediaSource(modality, 3, data), DecodeSpec(FrameSampling(num_frames=-1), RATE)
    try:
        (header,) = gate.probe(source, spec, policy)
        (item,) = gate.decode(source, spec, policy)
    except InputError as error:
        return str(error)
    tensor = item.pixels if isinstance(item, ImageItem) else item.samples if isinstance(item, AudioItem) else item.frames
    return header, item.header, tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes()


@pytest.mark.filterwarnings("ignore")  # Pillow's own, of damaged files
@pytest.mark.parametrize("modality", sorted(FILES))
def test_the_gate_says_the_same_with_and_without_isolation(modality: str) -> None:
    files = FILES[modality]()
    cases = list(files.values()) + [mutated(modality, 0, case, files)[1] for case in range(60)]
    tight = MediaPolicy(decode_isolation="process", worker_memory_bytes=64 << 20)
    for data in cases:
        assert outcome(modality, data, tight) == outcome(modality, data, MediaPolicy())


def test_samples_before_a_fault_leave_the_worker() -> None:
    file = io.BytesIO()
    samples = (np.random.default_rng(0).standard_normal(48_000) * 3000).astype(np.int16)
    soundfile.write(file, samples, RATE, "PCM_16", format="FLAC")
    source = MediaSource("audio", 0, file.getvalue()[: len(file.getvalue()) * 2 // 3])
    read, infos = [], []
    for isolation in ("thread", "process"):
        blocks: list[torch.Tensor] = []
        with pytest.raises(MediaError) as caught:
            blocks.extend(gate.audio_blocks(source, RATE, replace(POLICY, decode_isolation=isolation)))
        read.append(torch.cat(blocks))
        infos.append(caught.value.info)
    assert 16_000 < len(read[0]) < 48_000
    assert torch.equal(*read)
    assert infos[0] == infos[1]
