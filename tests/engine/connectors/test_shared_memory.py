"""Shared memory of several processes: bounded by bytes, verified, and gone when nobody uses it, however its users ended."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.engine.config import make_config
from sensorium.engine.connectors import shared_memory
from sensorium.engine.connectors.packing import PackedSpec
from sensorium.engine.connectors.shared_memory import SharedMemoryConnector, _locked
from sensorium.engine.connectors.tensor_store import TensorStore
from sensorium.engine.setup.connectors import open_shared_memory
from sensorium.mm.hashing import digest

if not sys.platform.startswith("linux"):
    pytest.skip("needs /dev/shm", allow_module_level=True)

SPACE, SIZE = digest("space"), 10_000
OTHER = """
import os, random, sys, time
from sensorium.engine.connectors.shared_memory import SharedMemoryConnector, _locked
connector = SharedMemoryConnector(sys.argv[1], int(sys.argv[2]))
print("open", flush=True)
for line in sys.stdin:
    verb, _, key = line.strip().partition(" ")
    if verb == "put":
        print(connector.put(key, key.encode() * 50), flush=True)
    elif verb == "flood":
        while os.getppid() == int(sys.argv[3]):
            time.sleep(0.001)
            connector.put(f"{key}/{random.getrandbits(256):064x}", os.urandom(random.randrange(1, 10_000)))
    elif verb == "lock":
        with _locked(connector._writer):
            print("locked", flush=True)
            sys.stdin.readline()
"""


class Other:
    """Another process that has the memory open."""

    def __init__(self, name: str, capacity: int = 1 << 20) -> None:
        words = [sys.executable, "-c", OTHER, name, str(capacity), str(os.getpid())]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.read() == "open"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self, number: int | None = None) -> None:
        """End it by a signal, or let it close its connector."""
        if number is not None:
            self.process.send_signal(number)
        with self.process:  # closes its pipes and waits
            pass


@pytest.fixture
def name() -> Iterator[str]:
    value = f"test-{os.getpid()}-{random.getrandbits(32):x}"
    yield value
    assert not list(shared_memory.ROOT.glob(f"*{value}*"))


def key(number: int) -> str:
    return f"{SPACE}/{number:064x}"


def num_bytes(connector: SharedMemoryConnector) -> int:
    with _locked(connector._writer):
        return sum(path.stat().st_size for path in connector.root.glob("*/*"))


def test_processes_share_until_the_last_one_ends(name: str) -> None:
    other, mine = Other(name), SharedMemoryConnector(name, 1 << 20)
    other.send(f"put {key(1)}")
    assert other.read() == "True"
    assert mine.get(key(1), SIZE) == key(1).encode() * 50
    assert mine.contains([key(1), key(2)]) == {key(1)}
    other.end(signal.SIGKILL)
    assert mine.get(key(1), SIZE) == key(1).encode() * 50
    third = Other(name)
    mine.close()
    assert not mine.put(key(2), b"x")
    assert mine.root.exists()
    third.end()
    assert not mine.root.exists()


def test_what_a_killed_engine_left_is_deleted_by_the_next_one(name: str) -> None:
    other = Other(f"{name}-a")
    other.send(f"put {key(1)}")
    assert other.read() == "True"
    other.end(signal.SIGKILL)
    left = shared_memory.ROOT / f"sensorium-{os.geteuid()}-{name}-a"
    assert list(left.glob("*/*.safetensors"))
    connector = SharedMemoryConnector(f"{name}-b", 1 << 20)
    assert not left.exists()
    connector.close()


def test_a_deletion_that_was_interrupted_is_resumed(name: str) -> None:
    for entries in ((), ("users",), ("users", SPACE), (SPACE,)):
        folder = shared_memory.ROOT / f"sensorium-{os.geteuid()}-{name}-a"
        folder.mkdir(mode=0o700)
        for entry in entries:
            (folder / entry).touch() if entry == "users" else (folder / entry).mkdir()
        SharedMemoryConnector(f"{name}-b", 1 << 20).close()
        assert not folder.exists()


def test_writers_that_are_killed_at_any_time_leave_it_within_its_capacity(name: str) -> None:
    rng, capacity = random.Random(1), 200_000
    mine = SharedMemoryConnector(name, capacity)
    others = [Other(name, capacity) for _ in range(3)]
    for other in others:
        other.send(f"flood {SPACE}")
    for step in range(60):
        time.sleep(rng.random() * 0.01)
        assert num_bytes(mine) <= capacity
        assert mine.put(key(step), bytes(100))
        if step % 15 == 14:
            others.pop().end(signal.SIGKILL) if others else None
    assert mine.get(key(59), SIZE) == bytes(100)
    assert mine._evict(0) == num_bytes(mine)  # no temporary file is left
    mine.close()


def test_entries_larger_than_all_are_refused_and_old_ones_leave_first(name: str) -> None:
    connector = SharedMemoryConnector(name, 10_000)
    assert not connector.put(key(0), bytes(10_001))
    for number in range(8):
        assert connector.put(key(number), bytes(2_000))
        os.utime(connector.file(key(number)), (number, number))
        assert num_bytes(connector) <= 10_000
    assert connector.get(key(7), SIZE) == bytes(2_000)
    assert connector.get(key(0), SIZE) is None
    with pytest.raises(ValueError, match="more than 100 bytes"):
        connector.get(key(7), 100)
    connector.close()


def test_a_stopped_writer_costs_a_time_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_LOCK_SECONDS", 0.1)
    other = Other(name)
    store = TensorStore("KV blocks", SPACE, [SharedMemoryConnector(name, 1 << 20)])
    store.put(digest("kept"), {"x": torch.ones(3)})
    store.flush()
    other.send("lock")
    assert other.read() == "locked"
    other.process.send_signal(signal.SIGSTOP)
    store.put(digest("new"), {"x": torch.ones(3)})
    store.flush()
    assert store.get(digest("kept"), {"x": PackedSpec((3,), torch.float32)}) is not None  # reading needs no lock
    assert (store.stats[0].connector, store.stats[0].failed, store.stats[0].writes) == ("shared_memory", 1, 1)
    other.end(signal.SIGKILL)
    store.put(digest("new"), {"x": torch.ones(3)})
    store.close()
    assert store.stats[0].writes == 2


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "another"])
def test_damaged_entries_are_never_served(name: str, damage: str) -> None:
    connector = SharedMemoryConnector(name, 1 << 20)
    store, specs = TensorStore("KV blocks", SPACE, [connector]), {"x": PackedSpec((4,), torch.float32)}
    for value in (1.0, 2.0):
        store.put(digest(value), {"x": torch.full((4,), value)})
    store.flush()
    path = connector.file(store.key(digest(1.0)))
    data = path.read_bytes()
    changed = {"flipped": data[:-1] + bytes([data[-1] ^ 1]), "short": data[:-4], "empty": b""}
    path.write_bytes(changed[damage] if damage in changed else connector.file(store.key(digest(2.0))).read_bytes())
    assert store.get(digest(1.0), specs) is None
    assert store.stats[0].damaged == 1
    assert store.get(digest(1.0), specs) is None  # it was deleted
    assert store.stats[0].damaged == 1
    found = store.get(digest(2.0), specs)
    assert found is not None
    assert found.tensors["x"].tolist() == [2.0] * 4
    store.close()


def test_memory_that_others_can_write_to_is_refused(name: str) -> None:
    folder = shared_memory.ROOT / f"sensorium-{os.geteuid()}-{name}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError) as caught:
        open_shared_memory(name, 1 << 20, "kv_transfer_config")
    assert caught.value.info.param == "kv_transfer_config"
    folder.rmdir()


@pytest.mark.parametrize(
    "extra", [{}, {"name": "a"}, {"max_bytes": 5}, {"name": "../a", "max_bytes": 5}, {"name": "a", "max_bytes": 0.5}]
)
def test_options_are_checked(extra: dict[str, object]) -> None:
    config = {"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    with pytest.raises(ConfigError) as caught:
        make_config("m", {"kv_transfer_config": config})
    assert caught.value.info.param == "kv_transfer_config"


def test_more_than_the_machine_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_shared_memory(name, 1 << 60, "kv_transfer_config")
    assert caught.value.info.limit is not None
