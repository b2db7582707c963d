"""A TCP server that gives other engines what this one keeps in its connectors."""

from __future__ import annotations

import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from .interface import KEY, Connector
from .wire import (
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    ItemFailedError,
    Operation,
    PeerError,
    Status,
    proof_of,
    receive,
    receive_request,
    response_parts,
    send,
)

MAX_BYTES = 1 << 30  # of the data of a request or response
MAX_CONNECTIONS = 64
_GREETING_SECONDS = 5.0
_IDLE_SECONDS = 300.0  # after which a connection without requests is closed
_CLOSE_SECONDS = 5.0
_log = logging.getLogger(__name__)


class PeerServer:
    """Serves connectors to clients that know the token, in a thread for each connection, until `close`.

    Requests are limited in length and time, and connections in number. A client that breaks the protocol is disconnected.

    Args:
        connectors: asked in order; the first one gets what clients put.
        address: "host:port"; with port 0, a free port is chosen.
        seconds: time limit of receiving a request, and of sending a response.
        encode: returns the packed encoder rows of a key and its packed inputs. It may raise OSError, ValueError and
            ItemFailedError. With it, clients cannot put anything, so that all rows are computed here.

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
    ) -> None:
        self._connectors, self._token, self._seconds, self._encode = tuple(connectors), token, seconds, encode
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=MAX_CONNECTIONS)
        self.port: int = self._listener.getsockname()[1]
        self._threads: dict[threading.Thread, socket.socket] = {}
        self._lock, self._is_closed = threading.Lock(), False
        self._acceptor = threading.Thread(target=self._accept, name="sensorium-peer-server", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads.items())
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for _, connection in threads:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in (self._acceptor, *(thread for thread, _ in threads)):
            thread.join(_CLOSE_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # too many open files: clients wait
                continue
            with self._lock:
                if self._is_closed or len(self._threads) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), name="sensorium-peer", daemon=True)
                self._threads[thread] = connection
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one client until it disconnects."""
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._greet(connection)
                while not self._is_closed:
                    idle = time.monotonic() + _IDLE_SECONDS
                    operation, keys, data = receive_request(connection, idle, self._seconds, MAX_BYTES)
                    status, answer = self._answer(operation, keys, data)
                    send(connection, response_parts(status, answer), time.monotonic() + self._seconds)
        except OSError as error:
            _log.debug("a peer was disconnected: %s", error)
        except Exception:
            _log.exception("a peer's request failed")
        finally:
            with self._lock:
                self._threads.pop(threading.current_thread(), None)

    def _greet(self, connection: socket.socket) -> None:
        deadline, nonce = time.monotonic() + _GREETING_SECONDS, os.urandom(NONCE_BYTES)
        send(connection, (GREETING + nonce,), deadline)
        if not hmac.compare_digest(receive(connection, PROOF_BYTES, deadline), proof_of(self._token, nonce)):
            raise PeerError("it does not know the token")

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
