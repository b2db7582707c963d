"""Messages between a peer server and its clients: frames of limited length, each read before a deadline. None is unpickled.

A connection begins with a greeting of the server, `GREETING` and a nonce, which the client answers with the HMAC of the nonce
under the token that both know. Then the client sends requests, and the server answers each with one response. While it works
on a response, it sends a sign of life every `HEARTBEAT_SECONDS`: a response with the status WORKING and no data. A client takes
a server that sends and takes nothing for `SILENCE_SECONDS` for dead, whatever the time limit of the request.
"""

from __future__ import annotations

import hmac
import math
import socket
import struct
import time
from enum import IntEnum

GREETING = b"sensorium-peer-2"
NONCE_BYTES, PROOF_BYTES = 32, 32
MAX_KEYS_BYTES = 4 << 20  # of the keys of a request
MAX_BYTES = 1 << 30  # of the data of a request or response
SLOWEST_BYTES = 1 << 20  # of data per second, with which a server puts up
HEARTBEAT_SECONDS, SILENCE_SECONDS = 0.5, 2.0
_REQUEST = struct.Struct("<BIQ")  # operation, bytes of keys, bytes of data
_RESPONSE = struct.Struct("<BQ")  # status, bytes of data


class Operation(IntEnum):
    GET = 1  # one key; the response has its bytes
    PUT = 2  # one key and its bytes
    CONTAINS = 3  # keys, one on each line; the response has a byte for each: 1 or 0
    ENCODE = 4  # one key and the packed inputs of its item; the response has its encoder rows


class Status(IntEnum):
    OK = 0
    MISSING = 1  # there are no bytes of this key, or they are not kept
    REFUSED = 2  # the request cannot be served; the data says why
    FAILED = 3  # the encoder fails on this item; the data says why
    WORKING = 4  # a sign of life; the response follows


class PeerError(OSError):
    """The other side does not answer in time, has closed the connection, or does not follow the protocol."""


class ItemFailedError(Exception):
    """The encoder fails on an item, as any encoder of its checkpoint would."""


def proof_of(token: str, nonce: bytes) -> bytes:
    """Return what a client that knows the token answers to a nonce."""
    return hmac.digest(token.encode(), GREETING + nonce, "sha256")


def send(connection: socket.socket, parts: tuple[bytes, ...], deadline: float, silence: float = math.inf) -> None:
    """Send bytes. Raise PeerError if some are not taken before the deadline (`time.monotonic`) or none in `silence` seconds."""
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                connection.settimeout(min(_left(deadline), silence))
                view = view[connection.send(view) :]
    except TimeoutError:
        raise PeerError("it took nothing for too long") from None


def receive(connection: socket.socket, size: int, deadline: float, silence: float = math.inf) -> bytearray:
    """Return exactly `size` bytes. Raise PeerError if they do not arrive before the deadline, or none in `silence` seconds."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    try:
        while done < size:
            connection.settimeout(min(_left(deadline), silence))
            count = connection.recv_into(view[done:], min(size - done, 1 << 20))
            if not count:
                raise PeerError("it closed the connection")
            done += count
    except TimeoutError:
        raise PeerError("it did not answer in time") from None
    return data


def request_parts(operation: Operation, keys: bytes, data: bytes = b"") -> tuple[bytes, ...]:
    """Return the parts of a request."""
    return _REQUEST.pack(operation, len(keys), len(data)), keys, data


def response_parts(status: Status, data: bytes = b"") -> tuple[bytes, ...]:
    """Return the parts of a response."""
    return _RESPONSE.pack(status, len(data)), data


def receive_request(connection: socket.socket, idle: float, seconds: float, limit: int) -> tuple[Operation, list[str], bytes]:
    """Wait for the next request.

    Args:
        idle: time (`time.monotonic`) at which a connection without a request ends.
        seconds: time from the first bytes to the last, besides that of the data (`seconds_for`).
        limit: most bytes of data.

    Raises:
        PeerError: the request is too long, malformed or late, or the client has closed the connection.
    """
    head = receive(connection, _REQUEST.size, idle)
    operation, keys_size, size = _REQUEST.unpack(head)
    if operation not in list(Operation) or keys_size > MAX_KEYS_BYTES or size > limit:
        raise PeerError(f"its request has the operation {operation}, {keys_size} bytes of keys and {size} of data")
    deadline = time.monotonic() + seconds + seconds_for(size)
    keys = receive(connection, keys_size, deadline)
    try:
        names = keys.decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise PeerError("its keys are no text") from None
    return Operation(operation), names, bytes(receive(connection, size, deadline, seconds))


def receive_response(connection: socket.socket, limit: int, deadline: float) -> tuple[Status, bytes]:
    """Return the response to a request. Signs of life before it are passed over.

    Raises:
        PeerError: the response is late, the server is silent, or the status is unknown.
        ValueError: its data has more than `limit` bytes.
    """
    status, size = Status.WORKING.value, 0
    while status == Status.WORKING and not size:
        status, size = _RESPONSE.unpack(receive(connection, _RESPONSE.size, deadline, SILENCE_SECONDS))
    if status not in list(Status) or status == Status.WORKING:
        raise PeerError(f"its response has the status {status}")
    if size > limit:
        raise ValueError(f"it has {size} bytes, more than {limit}")
    return Status(status), bytes(receive(connection, size, deadline, SILENCE_SECONDS))


def seconds_for(num_bytes: int) -> float:
    """Return how long a server lets data take besides its time limit: large data may come over a slow link."""
    return num_bytes / SLOWEST_BYTES


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
