"""A connector that asks a peer server, in another process or on another machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from .backoff import Backoff
from .wire import (
    GREETING,
    MAX_BYTES,
    MAX_KEYS_BYTES,
    NONCE_BYTES,
    SILENCE_SECONDS,
    ItemFailedError,
    Operation,
    PeerError,
    Status,
    proof_of,
    receive,
    receive_response,
    request_parts,
    send,
)

_IDLE_CONNECTIONS = 8
_REASON_BYTES = 1000


class PeerConnector:
    """Asks the server at `host:port`. See `Connector`.

    After a failure, the server is not asked for a while (`Backoff`), so that a dead peer costs one time limit and not one per
    key. `close` ends requests in progress.
    A peer that gives no sign of life for `SILENCE_SECONDS` has failed, whatever its time limit.

    Args:
        token: the secret that the server knows.
        seconds: time limit of a request, connecting included.
    """

    name, is_in_process = "peer", False

    def __init__(self, address: str, token: str = "", seconds: float = 2.0) -> None:
        host, _, port = address.rpartition(":")
        self.address, self._target, self._token, self._seconds = address, (host.strip("[]"), int(port)), token, seconds
        self._idle: list[socket.socket] = []
        self._busy = set[socket.socket]()  # those of requests in progress, which `close` ends
        self._lock = threading.Lock()
        self._backoff, self._is_closed = Backoff(), False

    def get(self, key: str, limit: int) -> bytes | None:
        return self._ask(Operation.GET, [key], limit=limit)

    def put(self, key: str, data: bytes) -> bool:
        return self._ask(Operation.PUT, [key], data) is not None

    def encode(self, key: str, inputs: bytes, limit: int, seconds: float) -> bytes:
        """Return the packed encoder rows of an item. `inputs`: made by `pack_inputs`.

        Raises:
            PeerError: as `_ask`, with the time limit `seconds`.
            ValueError: the response has more than `limit` bytes.
            ItemFailedError: the encoder fails on this item, or its inputs are larger than a request may be.
        """
        if len(inputs) > MAX_BYTES:
            raise ItemFailedError(f"its inputs have {len(inputs):,} bytes, and a request at most {MAX_BYTES:,}")
        rows = self._ask(Operation.ENCODE, [key], inputs, limit, seconds)
        if rows is None:
            raise PeerError(f"{self.address} has no rows")
        return rows

    def contains(self, keys: Sequence[str]) -> set[str]:
        if not keys:
            return set()
        try:
            flags = self._ask(Operation.CONTAINS, keys, limit=len(keys)) or b""
        except ValueError as error:
            raise PeerError(f"{self.address}: {error}") from None
        if len(flags) != len(keys):
            raise PeerError(f"{self.address} answered with {len(flags)} flags for {len(keys)} keys")
        return {key for key, flag in zip(keys, flags, strict=True) if flag}

    def delete(self, key: str) -> None:
        """Do nothing: the bytes may have been damaged on the way."""

    def describe(self) -> str:
        return f"the peer {self.address}"

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for connection in idle:
            connection.close()

    def _ask(
        self, operation: Operation, keys: Sequence[str], data: bytes = b"", limit: int = 0, seconds: float = 0.0
    ) -> bytes | None:
        """Return the data of the response, None if there is none. `seconds`: time limit; 0 for that of the connector.

        Raises:
            PeerError: the server cannot be reached, is late, or refuses.
            ValueError: the response has more than `limit` bytes.
            ItemFailedError: the encoder fails on an item.
        """
        self._backoff.check(self.address)
        deadline = time.monotonic() + (seconds or self._seconds)
        connection = None
        try:
            connection = self._connect(deadline)
            self._begin(connection)
            joined = "\n".join(keys).encode("ascii")
            if len(joined) > MAX_KEYS_BYTES:
                raise PeerError(f"{len(keys)} keys are too many for a request")
            send(connection, request_parts(operation, joined, data), deadline, SILENCE_SECONDS)
            status, answer = receive_response(connection, max(limit, _REASON_BYTES), deadline)
        except (OSError, ValueError) as error:
            if connection is not None:
                self._drop(connection)
            if isinstance(error, ValueError):
                raise
            self._backoff.record_failure()
            raise PeerError(f"{self.address}: {error}") from None
        self._keep(connection)
        if status is Status.FAILED:
            raise ItemFailedError(answer.decode("utf-8", "replace")[:_REASON_BYTES])
        if status is Status.REFUSED:
            raise PeerError(f"{self.address} refuses: {answer.decode('utf-8', 'replace')[:_REASON_BYTES]}")
        return None if status is Status.MISSING else answer

    def _connect(self, deadline: float) -> socket.socket:
        """Return an idle connection or a new one."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if _is_open(connection):
                    return connection
                connection.close()
        seconds = min(deadline - time.monotonic(), SILENCE_SECONDS)
        connection = socket.create_connection(self._target, max(0.001, seconds))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = receive(connection, len(GREETING) + NONCE_BYTES, deadline, SILENCE_SECONDS)
            if not greeting.startswith(GREETING):
                raise PeerError("it is no peer server")
            send(connection, (proof_of(self._token, bytes(greeting[len(GREETING) :])),), deadline, SILENCE_SECONDS)
        except BaseException:
            connection.close()
            raise
        return connection

    def _begin(self, connection: socket.socket) -> None:
        with self._lock:
            if self._is_closed:
                raise PeerError("the connector is closed")
            self._busy.add(connection)

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def _keep(self, connection: socket.socket) -> None:
        with self._lock:
            self._busy.remove(connection)
            if not self._is_closed and len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()


def _is_open(connection: socket.socket) -> bool:
    """Return False if the server has closed an idle connection, or has sent something that nobody asked for."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
