"""Accepts the connections of a peer server, and greets each until its client has proved that it knows the token."""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

from .wire import GREETING, NONCE_BYTES, PROOF_BYTES, proof_of

MAX_HANDSHAKES = 256
HANDSHAKE_SECONDS = 5.0
_RETRY_SECONDS = 0.1


@dataclass(eq=False)
class _Handshake:
    """A connection whose client was greeted. `proof`: what it has answered so far."""

    nonce: bytes
    deadline: float
    proof: bytearray = field(default_factory=bytearray)


def greeted_connections(listener: socket.socket, token: str, is_closed: Callable[[], bool]) -> Iterator[socket.socket]:
    """Yield the connections whose clients know the token, until the listener is shut down and `is_closed` returns True.

    All handshakes run in the caller's thread. Clients have `HANDSHAKE_SECONDS`. If more than `MAX_HANDSHAKES` have not
    answered, the one that has waited for the longest time is disconnected, so that silent clients do not keep others away.
    """
    waiting: dict[socket.socket, _Handshake] = {}  # oldest first
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def end(connection: socket.socket) -> None:
            selector.unregister(connection)
            del waiting[connection]

        try:
            while not is_closed():
                first = next(iter(waiting.values()), None)
                seconds = None if first is None else max(0.0, first.deadline - time.monotonic())
                for key, _ in selector.select(seconds):
                    connection = cast("socket.socket", key.fileobj)
                    if connection is listener:
                        if (new := _accept(listener, is_closed)) is not None and (handshake := _greet(new)) is not None:
                            selector.register(new, selectors.EVENT_READ)
                            waiting[new] = handshake
                    elif (is_known := _read_proof(connection, waiting[connection], token)) is not None:
                        end(connection)
                        if is_known:
                            yield connection
                        else:
                            connection.close()
                while waiting and _is_over(waiting):
                    connection = next(iter(waiting))
                    end(connection)
                    connection.close()
        finally:
            for connection in waiting:
                connection.close()


def _is_over(waiting: dict[socket.socket, _Handshake]) -> bool:
    """Return whether the oldest handshake is late, or one of too many."""
    return len(waiting) > MAX_HANDSHAKES or time.monotonic() >= next(iter(waiting.values())).deadline


def _accept(listener: socket.socket, is_closed: Callable[[], bool]) -> socket.socket | None:
    try:
        return listener.accept()[0]
    except BlockingIOError:  # the client is gone
        pass
    except OSError:
        if not is_closed():
            time.sleep(_RETRY_SECONDS)  # too many open files: clients wait
    return None


def _greet(connection: socket.socket) -> _Handshake | None:
    """Send the greeting. Return None if the connection has ended."""
    nonce = os.urandom(NONCE_BYTES)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.send(GREETING + nonce)  # a new connection's buffer has room for all of it
    except OSError:
        connection.close()
        return None
    return _Handshake(nonce, time.monotonic() + HANDSHAKE_SECONDS)


def _read_proof(connection: socket.socket, handshake: _Handshake, token: str) -> bool | None:
    """Return whether the client knows the token; None if a part of its answer is still to come. Nothing after it is read."""
    try:
        data = connection.recv(PROOF_BYTES - len(handshake.proof))
    except BlockingIOError:
        return None
    except OSError:
        return False
    handshake.proof += data
    if data and len(handshake.proof) < PROOF_BYTES:
        return None
    return hmac.compare_digest(handshake.proof, proof_of(token, handshake.nonce))
