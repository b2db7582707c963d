"""A TCP server that gives other engines what this one keeps in its connectors."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from .handshakes import MAX_HANDSHAKES, greeted_connections
from .interface import KEY, Connector
from .wire import (
    HEARTBEAT_SECONDS,
    MAX_BYTES,
    ItemFailedError,
    Operation,
    PeerError,
    Status,
    receive_request,
    response_parts,
    seconds_for,
    send,
)

MAX_CONNECTIONS = 64  # of clients that know the token
_IDLE_SECONDS = 300.0  # after which a connection without requests is closed
_GIVE_WAY_SECONDS = 5.0  # after which it is closed if there is no other place for a new client
_CLOSE_SECONDS = 5.0
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Client:
    """A client that knows the token.

    Attributes:
        is_working: a response to it is being made; guarded by `lock`.
        idle_since: when its last request was answered (`time.monotonic`); infinity while it has one.
    """

    connection: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_working: bool = False
    idle_since: float = field(default_factory=time.monotonic)

    def set_working(self, is_working: bool) -> None:
        with self.lock:
            self.is_working = is_working

    def send_sign_of_life(self) -> None:
        """Tell a client that waits for a response that the server is alive. It never waits for the client."""
        message = b"".join(response_parts(Status.WORKING))
        with self.lock, suppress(OSError):  # its thread sees that the connection has ended
            if self.is_working and os.write(self.connection.fileno(), message) < len(message):
                self.connection.shutdown(socket.SHUT_RDWR)  # the next message would be read as the rest of this one


class PeerServer:
    """Serves connectors to clients that know the token, in a thread for each connection, until `close`.

    Requests are limited in length and time, and connections in number. A client that breaks the protocol is disconnected.
    Clients that wait for a response get signs of life from a thread of its own.

    Args:
        connectors: asked in order; the first one gets what clients put.
        address: "host:port"; with port 0, a free port is chosen.
        seconds: time limit of receiving a request, and of sending a response; large ones get more (`wire.seconds_for`).
        encode: returns the packed encoder rows of a key and its packed inputs. It may raise OSError, ValueError and
            ItemFailedError. With it, clients cannot put anything, so that all rows are computed here.
        is_alive: signs of life are sent while it returns True.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(
        self,
        connectors: Sequence[Connector],
        address: str,
        token: str = "",
        seconds: float = 30.0,
        encode: Callable[[str, bytes], bytes] | None = None,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._connectors, self._token, self._seconds, self._encode = tuple(connectors), token, seconds, encode
        self._is_alive = is_alive
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=MAX_HANDSHAKES)
        self.port: int = self._listener.getsockname()[1]
        self._clients: dict[threading.Thread, _Client] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._own_threads = [
            threading.Thread(target=self._accept, name="sensorium-peer-server", daemon=True),
            threading.Thread(target=self._send_signs_of_life, name="sensorium-peer-heartbeat", daemon=True),
        ]
        for thread in self._own_threads:
            thread.start()

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            self._closed.set()
            clients = dict(self._clients)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # it ends `_accept`, which waits for the listener
        for client in clients.values():
            with suppress(OSError):
                client.connection.shutdown(socket.SHUT_RDWR)
        for thread in (*self._own_threads, *clients):
            thread.join(_CLOSE_SECONDS)
        self._listener.close()

    def _accept(self) -> None:
        for connection in greeted_connections(self._listener, self._token, self._closed.is_set):
            thread = threading.Thread(target=self._serve, args=(connection,), name="sensorium-peer", daemon=True)
            with self._lock:
                if self._closed.is_set() or not self._has_place():
                    connection.close()
                    continue
                self._clients[thread] = _Client(connection)
                try:
                    thread.start()
                except RuntimeError as error:  # the system has no more threads
                    _log.warning("a peer was disconnected: %s", error)
                    del self._clients[thread]
                    connection.close()

    def _has_place(self) -> bool:
        """Return whether there is a place for a new client. If need be, the one that is idle for the longest time leaves."""
        if len(self._clients) < MAX_CONNECTIONS:
            return True
        thread, client = min(self._clients.items(), key=lambda entry: entry[1].idle_since)
        if time.monotonic() - client.idle_since < _GIVE_WAY_SECONDS:
            return False
        del self._clients[thread]
        with suppress(OSError):
            client.connection.shutdown(socket.SHUT_RDWR)  # its thread ends
        return True

    def _send_signs_of_life(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            with self._lock:
                clients = list(self._clients.values()) if self._is_alive() else []
            for client in clients:
                client.send_sign_of_life()

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one client until it disconnects."""
        try:
            with self._lock:
                client = self._clients[threading.current_thread()]
            with connection:
                while not self._closed.is_set():
                    _wait_for_request(connection)
                    client.idle_since = math.inf
                    deadline = time.monotonic() + self._seconds
                    operation, keys, data = receive_request(connection, deadline, self._seconds, MAX_BYTES)
                    client.set_working(True)
                    try:
                        status, answer = self._answer(operation, keys, data)
                    finally:
                        client.set_working(False)
                    deadline = time.monotonic() + self._seconds + seconds_for(len(answer))
                    send(connection, response_parts(status, answer), deadline, self._seconds)
                    client.idle_since = time.monotonic()
        except OSError as error:
            _log.debug("a peer was disconnected: %s", error)
        except Exception:
            _log.exception("a peer's request failed")
        finally:
            with self._lock:
                self._clients.pop(threading.current_thread(), None)

    def _answer(self, operation: Operation, keys: list[str], data: bytes) -> tuple[Status, bytes]:
        if not all(map(KEY.fullmatch, keys)) or (operation is not Operation.CONTAINS and len(keys) != 1):
            return Status.REFUSED, b"the keys are malformed"
        try:
            if operation is Operation.GET:
                value = self._get(keys[0])
                return (Status.MISSING, b"") if value is None else (Status.OK, value)
            if operation is Operation.ENCODE and self._encode is not None:
                return Status.OK, self._encode(keys[0], data)
            if operation is Operation.ENCODE or (operation is Operation.PUT and self._encode is not None):
                return Status.REFUSED, b"this server takes no such requests"
            if operation is Operation.PUT:
                is_kept = bool(self._connectors) and self._connectors[0].put(keys[0], data)
                return (Status.OK if is_kept else Status.MISSING), b""
            return Status.OK, self._contains(keys)
        except ItemFailedError as error:
            return Status.FAILED, str(error).encode()[:1000]
        except (OSError, ValueError) as error:
            return Status.REFUSED, str(error).encode()[:1000]

    def _get(self, key: str) -> bytes | None:
        return next((data for connector in self._connectors if (data := connector.get(key, MAX_BYTES)) is not None), None)

    def _contains(self, keys: list[str]) -> bytes:
        missing = list(dict.fromkeys(keys))
        present = set[str]()
        for connector in self._connectors:
            present |= connector.contains([key for key in missing if key not in present])
        return bytes(key in present for key in keys)


def _wait_for_request(connection: socket.socket) -> None:
    """Wait for the first byte of a request. Raise OSError if none comes in `_IDLE_SECONDS`, or the client has left."""
    connection.settimeout(_IDLE_SECONDS)
    if not connection.recv(1, socket.MSG_PEEK):
        raise PeerError("it closed the connection")
