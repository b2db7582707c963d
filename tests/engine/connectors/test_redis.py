"""The Redis connector with a small server that speaks RESP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.engine.config import make_config
from sensorium.engine.connectors import backoff
from sensorium.engine.connectors.packing import PackedSpec, pack
from sensorium.engine.connectors.redis_store import RedisConnector
from sensorium.engine.connectors.tensor_store import TensorStore
from sensorium.mm.hashing import digest

NAMESPACE = digest("test")
NAME = f"{digest('name')}.0"
KEY = f"{NAMESPACE}/{NAME}"
TENSOR = torch.arange(6.0)
SPECS = {"block": PackedSpec((6,), torch.float32)}


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


class Server:
    """Answers the commands that the connector uses. `broken`: it answers with nonsense."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.broken = False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self.listener.getsockname()[1]}/0"
        self.connections: list[socket.socket] = []
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            self.threads.append(threading.Thread(target=self.serve, args=(connection,)))
            self.threads[-1].start()

    def serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            while line := file.readline():
                parts = []
                for _ in range(int(line[1:])):
                    size = int(file.readline()[1:])
                    parts.append(file.read(size))
                    file.read(2)
                connection.sendall(b"nonsense\r\n" if self.broken else self.answer(parts[0].upper(), parts[1:]))

    def answer(self, command: bytes, parts: list[bytes]) -> bytes:
        if command == b"GETRANGE":
            return bulk(self.values.get(parts[0], b"")[: int(parts[2]) + 1])
        if command == b"SET":
            self.values[parts[0]] = parts[1]
            return b"+OK\r\n"
        if command == b"EXISTS":
            return b":%d\r\n" % (parts[0] in self.values)
        if command == b"DEL":
            return b":%d\r\n" % (self.values.pop(parts[0], None) is not None)
        return b"-ERR unknown command\r\n" if command == b"HELLO" else b"+OK\r\n"

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self.threads:
            thread.join()


@contextmanager
def serving() -> Iterator[Server]:
    pytest.importorskip("redis")
    server = Server()
    try:
        yield server
    finally:
        server.close()


def test_tensors_are_kept_and_damaged_ones_are_deleted():
    with serving() as server:
        store = TensorStore("KV blocks", NAMESPACE, [RedisConnector(server.url)])
        assert store.get(NAME, SPECS) is None
        assert store.contains([NAME]) == set()
        store.put(NAME, {"block": TENSOR})
        assert store.flush()
        assert server.values.keys() == {f"sensorium:{KEY}".encode()}
        assert store.contains([NAME]) == {NAME}
        found = store.get(NAME, SPECS)
        assert found.source == "redis"
        assert torch.equal(found.tensors["block"], TENSOR)
        server.values[f"sensorium:{KEY}".encode()] = pack(KEY, {"block": TENSOR})[:-1] + b"\x07"
        assert store.get(NAME, SPECS) is None
        assert not server.values
        server.values[f"sensorium:{KEY}".encode()] = bytes(1 << 20)  # longer than any packed tensor of this shape
        assert store.get(NAME, SPECS) is None
        (stats,) = store.stats
        assert (stats.damaged, stats.failed, stats.hits) == (2, 0, 1)
        store.close()


def test_a_store_that_fails_is_counted_and_asked_again_later(monkeypatch):
    with serving() as server:
        store = TensorStore("KV blocks", NAMESPACE, [RedisConnector(server.url, seconds=0.5)])
        store.put(NAME, {"block": TENSOR})
        store.flush()
        server.broken = True
        assert store.get(NAME, SPECS) is None
        server.broken = False
        assert store.get(NAME, SPECS) is None  # too early
        assert store.stats[0].failed == 2
        store.connectors[0]._backoff = backoff.Backoff()
        assert store.get(NAME, SPECS) is not None
        store.close()
    store = TensorStore("KV blocks", NAMESPACE, [RedisConnector(server.url, seconds=0.5)])
    assert store.get(NAME, SPECS) is None
    assert store.contains([NAME]) == set()
    assert store.stats[0].failed > 0
    store.close()


@pytest.mark.parametrize("extra", [{}, {"url": "http://x"}, {"url": 5}, {"url": "redis://x", "timeout_seconds": 0}])
def test_options_are_checked(extra):
    config = {"kv_connector": "RedisConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    with pytest.raises(ConfigError) as caught:
        make_config("m", {"kv_transfer_config": config})
    assert caught.value.info.param == "kv_transfer_config"


def test_no_error_shows_a_part_of_the_password():
    pytest.importorskip("redis")
    with pytest.raises(ConfigError) as caught:
        RedisConnector("redis://user:secret/half@host:6379/0")
    assert "secret" not in str(caught.value)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(ConfigError, match=r"sensorium\[redis\]"):
        RedisConnector("redis://localhost")


def test_a_socket_is_described_by_its_path():
    pytest.importorskip("redis")
    assert RedisConnector("unix:///run/redis.sock").describe() == "Redis at /run/redis.sock"
    assert RedisConnector("redis://host").describe() == "Redis at host:6379"
