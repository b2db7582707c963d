"""A peer server and its clients: what arrives is what was kept, and hostile or dead peers cost a time limit at most."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
import torch
from sensorium.engine.connectors import backoff, handshakes, peer, peer_server, wire
from sensorium.engine.connectors.backoff import Backoff
from sensorium.engine.connectors.memory import MemoryConnector
from sensorium.engine.connectors.packing import PackedSpec, pack
from sensorium.engine.connectors.peer import PeerConnector
from sensorium.engine.connectors.peer_server import PeerServer
from sensorium.engine.connectors.tensor_store import TensorStore
from sensorium.engine.connectors.wire import (
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    ItemFailedError,
    PeerError,
    Status,
    response_parts,
)
from sensorium.mm.hashing import digest
from waiting import LONG

NAMESPACE = digest("test")
TENSOR = torch.arange(6.0).view(2, 3)
SPECS = {"block": PackedSpec((2, 3), torch.float32)}


def name_of(i: int) -> str:
    return f"{digest('name', i)}.0"


def key_of(i: int) -> str:
    return f"{NAMESPACE}/{name_of(i)}"


@contextmanager
def serving(token: str = "", **options) -> Iterator[tuple[MemoryConnector, str]]:
    memory = MemoryConnector(1 << 20)
    server = PeerServer([memory], "127.0.0.1:0", token, **options)
    try:
        yield memory, f"127.0.0.1:{server.port}"
    finally:
        server.close()
        names = ("sensorium-peer", "sensorium-peer-server", "sensorium-peer-heartbeat")
        assert not [thread for thread in threading.enumerate() if thread.name in names]


def test_what_was_put_is_found():
    with serving("secret") as (memory, address):
        client = PeerConnector(address, "secret")
        data = pack(key_of(0), {"block": TENSOR})
        assert client.get(key_of(0), 1 << 20) is None
        assert client.put(key_of(0), data)
        assert memory.get(key_of(0), 1 << 20) == data == client.get(key_of(0), 1 << 20)
        assert client.contains([key_of(0), key_of(1)]) == {key_of(0)}
        assert client.contains([]) == set()
        assert not client.put(key_of(1), bytes(1 << 20))  # more than the server keeps
        memory.put(key_of(2), bytes(5000))
        with pytest.raises(ValueError, match="more than"):
            client.get(key_of(2), 2000)
        client.close()


def test_tensors_come_from_a_peer_and_stay_in_memory():
    with serving() as (memory, address):
        memory.put(key_of(0), pack(key_of(0), {"block": TENSOR}))
        near = MemoryConnector(1 << 20)
        store = TensorStore("KV blocks", NAMESPACE, [near, PeerConnector(address)])
        found = store.get(name_of(0), SPECS)
        assert found.source == "peer"
        assert torch.equal(found.tensors["block"], TENSOR)
        assert store.get(name_of(0), SPECS).source == "memory"
        store.put(name_of(1), {"block": TENSOR + 1})
        store.flush()
        assert memory.contains([key_of(1)])
        store.close()


@pytest.mark.parametrize("token", ["", "wrong", "secret "])
def test_a_client_without_the_token_gets_nothing(token):
    with serving("secret") as (memory, address):
        memory.put(key_of(0), b"data")
        with pytest.raises(PeerError):
            PeerConnector(address, token).get(key_of(0), 100)


@pytest.mark.parametrize("key", ["x", "../../etc/passwd", f"{NAMESPACE}/../{NAMESPACE}", f"{NAMESPACE}/{digest('a')}.0/x"])
def test_malformed_keys_are_refused(key):
    with serving() as (_, address), closing(PeerConnector(address)) as client:
        for ask in (lambda: client.get(key, 100), lambda: client.put(key, b""), lambda: client.contains([key])):
            with pytest.raises(PeerError, match="malformed"):
                ask()
        assert client.get(key_of(0), 100) is None  # the connection goes on


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(100),
        b"\xff" * 13,
        wire._REQUEST.pack(1, 1 << 31, 0),
        wire._REQUEST.pack(2, 2, 1 << 62) + b"ab",
        wire._REQUEST.pack(9, 2, 0) + b"ab",
        wire._REQUEST.pack(1, 2, 0) + b"\xff\xfe",
        os.urandom(5000),
    ],
)
@pytest.mark.parametrize("knows_token", [False, True])
def test_a_hostile_client_is_disconnected_and_others_are_served(message, knows_token):
    with serving("secret") as (memory, address):
        memory.put(key_of(0), b"data")
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 10) as connection:
            greeting = wire.receive(connection, len(GREETING) + NONCE_BYTES, time.monotonic() + 10)
            if knows_token:
                connection.sendall(wire.proof_of("secret", bytes(greeting[len(GREETING) :])))
            with suppress(OSError):  # the server may disconnect at any time
                connection.sendall(message)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
        with closing(PeerConnector(address, "secret", 20.0)) as client:
            assert client.get(key_of(0), 100) == b"data"


def connect(address: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 10)


def greet(connection: socket.socket) -> None:
    """Do a handshake as a client without a token."""
    greeting = wire.receive(connection, len(GREETING) + NONCE_BYTES, time.monotonic() + 10)
    connection.sendall(wire.proof_of("", bytes(greeting[len(GREETING) :])))


def test_a_slow_request_ends_and_connections_are_limited(monkeypatch):
    monkeypatch.setattr(peer_server, "MAX_CONNECTIONS", 2)
    with serving(seconds=0.2) as (_, address):
        with connect(address) as slow:
            greet(slow)
            slow.sendall(wire._REQUEST.pack(2, 200, 200))
            assert slow.recv(1) == b""  # closed after 0.2 s, though it is open on this side
        with closing(PeerConnector(address)) as first, closing(PeerConnector(address)) as second:
            for client in (first, second):
                assert client.get(key_of(0), 100) is None
            with pytest.raises(PeerError):
                PeerConnector(address).get(key_of(0), 100)


def test_an_idle_client_gives_way_to_a_new_one(monkeypatch):
    """The one that is idle for the longest time; its next request has a new connection."""
    monkeypatch.setattr(peer_server, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(peer_server, "_GIVE_WAY_SECONDS", 0.0)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(MemoryConnector):
        def get(self, key: str, limit: int) -> bytes | None:
            begun.set()
            go_on.wait(LONG)
            return super().get(key, limit)

    server = PeerServer([Slow(1 << 20)], "127.0.0.1:0")
    address = f"127.0.0.1:{server.port}"
    with ExitStack() as stack:
        stack.callback(server.close)
        stack.callback(go_on.set)
        busy, idle, new = (stack.enter_context(closing(PeerConnector(address, seconds=LONG))) for _ in range(3))
        asked = threading.Thread(target=busy.get, args=(key_of(0), 100))
        asked.start()
        begun.wait(LONG)
        for client in (idle, new, idle):
            assert client.contains([key_of(0)]) == set()
        assert not asked.join(0.01)
        assert asked.is_alive()
        go_on.set()
        asked.join()


def test_large_requests_get_more_time(monkeypatch):
    """A second for each MiB, as long as bytes come."""
    limits, size = list[float](), 100 << 20
    replies = [wire._REQUEST.pack(4, 4, size), b"keys", b"data"]

    def receive(connection: object, count: int, deadline: float, silence: float = 0.0) -> bytes:
        limits.append(deadline - time.monotonic())
        return replies.pop(0)

    monkeypatch.setattr(wire, "receive", receive)
    wire.receive_request(None, time.monotonic() + 5, 30, 1 << 30)
    assert limits[0] <= 5
    assert limits[2] > 100


def test_a_failure_is_logged_for_each_peer_until_it_works_again(caplog):
    class Broken(MemoryConnector):
        name, is_broken = "peer", True

        def __init__(self, number: int) -> None:
            super().__init__(1 << 20)
            self.number = number

        def contains(self, keys: list[str]) -> set[str]:
            if self.is_broken:
                raise OSError("broken")
            return super().contains(keys)

        def describe(self) -> str:
            return f"peer {self.number}"

    peers = [Broken(0), Broken(1)]
    store = TensorStore("KV blocks", NAMESPACE, peers)
    for _ in range(3):
        store.contains([name_of(0)])
    assert [caplog.text.count(f"from peer {number} (broken)") for number in (0, 1)] == [1, 1]
    peers[0].is_broken = False
    store.contains([name_of(0)])
    assert caplog.text.count("from peer 0 again") == 1
    peers[0].is_broken = True
    store.contains([name_of(0)])
    assert caplog.text.count("from peer 0 (broken)") == 2
    store.close()


def test_silent_clients_take_no_place(monkeypatch):
    monkeypatch.setattr(peer_server, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(handshakes, "HANDSHAKE_SECONDS", LONG)
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES", 4)
    with serving() as (_, address), ExitStack() as stack:
        silent = [stack.enter_context(connect(address)) for _ in range(8)]
        with closing(PeerConnector(address, seconds=LONG)) as client:
            assert client.get(key_of(0), 100) is None
        for connection in silent[:4]:  # the oldest ones
            wire.receive(connection, len(GREETING) + NONCE_BYTES, time.monotonic() + 10)
            assert connection.recv(1) == b""
        silent[-1].sendall(bytes(PROOF_BYTES - 1))
        with closing(PeerConnector(address, seconds=LONG)) as client:
            assert client.get(key_of(0), 100) is None


def test_an_item_that_is_too_large_fails_alone(monkeypatch):
    """It does not count as a failure of the server, which is asked for the next item at once."""
    monkeypatch.setattr(peer, "MAX_BYTES", 100)
    with serving(encode=lambda key, data: data) as (_, address), closing(PeerConnector(address)) as client:
        with pytest.raises(ItemFailedError):
            client.encode(key_of(0), bytes(101), 1000, LONG)
        assert client.encode(key_of(1), bytes(100), 1000, LONG) == bytes(100)


def test_close_ends_a_request_in_progress():
    begun, done, errors = threading.Event(), threading.Event(), []

    def encode(key, data):
        begun.set()
        done.wait(LONG)
        return data

    def ask():
        try:
            client.encode(key_of(0), b"", 100, LONG)
        except PeerError as error:
            errors.append(error)

    with serving(encode=encode) as (_, address):
        client = PeerConnector(address)
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        assert begun.wait(LONG)
        client.close()
        thread.join(LONG)
        assert errors
        assert not client._busy
        done.set()
        closed = PeerConnector(address)
        closed.close()
        with pytest.raises(PeerError):
            closed.get(key_of(0), 100)


def test_a_late_proof_ends_the_connection(monkeypatch):
    monkeypatch.setattr(handshakes, "HANDSHAKE_SECONDS", 0.05)
    with serving() as (_, address), connect(address) as connection:
        wire.receive(connection, len(GREETING) + NONCE_BYTES, time.monotonic() + 10)
        assert connection.recv(1) == b""


def test_a_thread_that_cannot_start_ends_one_connection_only(monkeypatch):
    failures, start = [1], threading.Thread.start

    def fail_once(thread: threading.Thread) -> None:
        if thread.name == "sensorium-peer" and failures:
            failures.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    monkeypatch.setattr(backoff, "RETRY_SECONDS", 0.0)
    with serving() as (_, address), closing(PeerConnector(address)) as client:
        with pytest.raises(PeerError):
            client.get(key_of(0), 100)
        assert client.get(key_of(0), 100) is None


def test_a_client_that_waits_gets_signs_of_life(monkeypatch):
    monkeypatch.setattr(peer_server, "HEARTBEAT_SECONDS", 0.01)
    release = threading.Event()

    def encode(key: str, data: bytes) -> bytes:
        assert release.wait(LONG)
        return b"rows"

    with serving(encode=encode) as (_, address), connect(address) as connection:
        greet(connection)
        wire.send(connection, wire.request_parts(wire.Operation.ENCODE, key_of(0).encode()), time.monotonic() + 10)
        alive = b"".join(response_parts(Status.WORKING))
        for _ in range(3):
            assert wire.receive(connection, len(alive), time.monotonic() + LONG) == alive
        release.set()
        assert wire.receive_response(connection, 100, time.monotonic() + LONG) == (Status.OK, b"rows")


def test_a_peer_that_is_silent_is_given_up_before_its_time_limit(monkeypatch):
    for module in (peer, wire):
        monkeypatch.setattr(module, "SILENCE_SECONDS", 0.1)
    asks = (lambda client: client.get(key_of(0), 100), lambda client: client.put(key_of(0), bytes(64 << 20)))  # nobody reads it
    for ask in asks:
        with hostile_server(lambda connection: None) as address, pytest.raises(PeerError):
            ask(PeerConnector(address, seconds=10 * LONG))


def test_addresses_of_ip_version_6():
    if not socket.has_ipv6:
        pytest.skip("there is no IPv6")
    server = PeerServer([MemoryConnector(1 << 20)], "[::1]:0")
    with closing(PeerConnector(f"[::1]:{server.port}")) as client:
        assert client.get(key_of(0), 100) is None
    server.close()


@contextmanager
def hostile_server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Accept clients, greet them, read their first request, and answer as the argument does."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()
    connections = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            try:
                connection.sendall(GREETING + bytes(NONCE_BYTES))
                wire.receive(connection, PROOF_BYTES, time.monotonic() + 10)
                wire.receive_request(connection, time.monotonic() + 10, 10, 1 << 20)
                answer(connection)
            except OSError:
                continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in connections:
            connection.close()
        thread.join()


GOOD = b"".join(response_parts(Status.OK, pack(key_of(0), {"block": TENSOR})))


def stay_alive(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"".join(response_parts(Status.WORKING)))
        time.sleep(0.01)


def drip(connection: socket.socket) -> None:
    for byte in GOOD:
        connection.sendall(bytes([byte]))
        time.sleep(0.02)


ANSWERS = {
    "nothing": (lambda connection: None, "failed"),
    "drip": (drip, "failed"),
    "signs of life only": (stay_alive, "failed"),
    "a sign of life with data": (
        lambda connection: connection.sendall(b"".join(response_parts(Status.WORKING, b"x")) + GOOD),
        "failed",
    ),
    "dies": (lambda connection: (connection.sendall(GOOD[:-20]), connection.close()), "failed"),
    "half open": (lambda connection: connection.sendall(GOOD[:-20]), "failed"),
    "status": (lambda connection: connection.sendall(b"\x09" + GOOD[1:]), "failed"),
    "flipped": (lambda connection: connection.sendall(GOOD[:-1] + b"\x00"), "damaged"),
    "another": (
        lambda connection: connection.sendall(b"".join(response_parts(Status.OK, pack(key_of(1), {"block": TENSOR})))),
        "damaged",
    ),
    "other tensors": (
        lambda connection: connection.sendall(b"".join(response_parts(Status.OK, pack(key_of(0), {"block": TENSOR[:1]})))),
        "damaged",
    ),
    "too long": (lambda connection: connection.sendall(wire._RESPONSE.pack(0, 1 << 60)), "damaged"),
    "text": (lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n"), "failed"),
    "pickle": (lambda connection: connection.sendall(b"".join(response_parts(Status.OK, b"\x80\x04K\x01."))), "damaged"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_wrong_short_or_late_answer_is_never_served(kind):
    answer, counted = ANSWERS[kind]
    with hostile_server(answer) as address:
        store = TensorStore("KV blocks", NAMESPACE, [PeerConnector(address, seconds=0.3)])
        assert store.get(name_of(0), SPECS) is None
        (stats,) = store.stats
        if kind == "text":  # "H" is no status
            assert stats.failed == 1
        assert getattr(stats, counted) == 1
        assert stats.hits == 0
        store.close()


def test_signs_of_life_come_before_the_answer():
    with hostile_server(lambda connection: connection.sendall(3 * b"".join(response_parts(Status.WORKING)) + GOOD)) as address:
        store = TensorStore("KV blocks", NAMESPACE, [PeerConnector(address)])
        assert store.get(name_of(0), SPECS) is not None
        store.close()


@pytest.mark.parametrize("answer", [wire._RESPONSE.pack(0, 1 << 60), b"".join(response_parts(Status.OK, b"\1\1"))])
def test_a_wrong_answer_about_what_a_peer_has_leaves_the_other_connectors(answer):
    near = MemoryConnector(1 << 20)
    near.put(key_of(1), b"data")
    with hostile_server(lambda connection: connection.sendall(answer)) as address:
        store = TensorStore("KV blocks", NAMESPACE, [PeerConnector(address, seconds=5.0), near])
        assert store.contains([name_of(1)]) == {name_of(1)}
        assert store.stats[0].failed == 1
        store.close()


def test_a_dead_peer_costs_one_time_limit(monkeypatch):
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as listener:  # nobody accepts
        client = PeerConnector(f"127.0.0.1:{listener.getsockname()[1]}", seconds=0.1)
        connect = client._connect
        monkeypatch.setattr(client, "_connect", lambda deadline: asked.append(1) or connect(deadline))
        for _ in range(20):
            with pytest.raises(ConnectionError if asked else PeerError):
                client.get(key_of(0), 100)
        assert len(asked) == 1
        client._backoff = Backoff()
        with pytest.raises(PeerError):
            client.get(key_of(0), 100)
        assert len(asked) == 2
    with pytest.raises(PeerError):
        PeerConnector("127.0.0.1:1", seconds=0.5).contains([key_of(0)])


def test_a_server_that_was_restarted_is_found_again(monkeypatch):
    monkeypatch.setattr(backoff, "RETRY_SECONDS", 0.0)
    with serving() as (memory, address):
        memory.put(key_of(0), b"data")
        client = PeerConnector(address)
        assert client.get(key_of(0), 100) == b"data"
    with pytest.raises(PeerError):
        client.get(key_of(0), 100)
    server = PeerServer([memory], address)
    assert client.get(key_of(0), 100) == b"data"
    server.close()
    client.close()
