"""Download one http(s) URL within limits, from public addresses only unless the policy allows others."""

from __future__ import annotations

import http.client
import io
import ipaddress
import logging
import re
import socket
import ssl
import string
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from ...callers.errors import InputError
from .addresses import is_public
from .ledger import Ledger, MediaBudget
from .policy import MediaPolicy

_log = logging.getLogger(__name__)
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 1 << 16
_SLOW = "try again, send fewer URLs at once, or give the file itself"
_LONGEST_URL = 8192
_IN_PATH = "/%:@!$&'()*+,;=~-._"
_LONGEST_HEAD = 1 << 20
_LONGEST_HOST = 253
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")


@dataclass(frozen=True)
class _Target:
    """A checked URL."""

    url: str
    scheme: str
    host: str  # ASCII, lower case, without a trailing dot
    port: int
    path: str


def fetch(url: str, policy: MediaPolicy, ledger: Ledger | None = None, most: int | None = None) -> bytes:
    """Return the body of a GET request. Its bytes are counted by the request's ledger before they are read.

    The host is resolved once and all its addresses are checked. The connection goes to a checked address, so that DNS cannot
    change the host in between. Every redirect is checked again. Proxies of the environment are not used.

    `most`: no more than these first bytes of the body are read.

    Raises:
        InputError: a URL, host, address, port, size or answer is refused, or the server fails or takes too long. Unless private
            hosts are allowed, the error does not tell whether a name is unknown, an address is private or a port is closed.
    """
    ledger = ledger or MediaBudget(policy).open()
    last = ledger.start()
    deadline = min(time.monotonic() + policy.max_seconds, last)
    target = _read_url(url, policy)
    for _ in range(policy.max_redirects + 1):
        try:
            answer = _get(target, policy, deadline, ledger, most)
        except InputError:
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:  # what sockets, TLS and HTTP parsing raise
            ledger.check_open()
            if time.monotonic() >= last:
                limit = f"{policy.max_request_seconds:g} s (media: max_request_seconds)"
                raise InputError(f"fetching the media of its request took longer than {limit}; {_SLOW}") from None
            if time.monotonic() >= deadline:
                limit = f"{policy.max_seconds:g} s (media: max_seconds)"
                raise InputError(f"fetching it took longer than {limit}; {_SLOW}") from None
            raise _failure(target, policy, error) from None
        if isinstance(answer, bytes):
            return answer
        following = _read_url(answer, policy, target.url)
        if target.scheme == "https" and following.scheme != "https":
            raise InputError(f"{target.host} redirects from https to {following.scheme}; give the final URL")
        target = following
    raise InputError(
        f"{target.host} redirects more than {policy.max_redirects} times (media: max_redirects); give the final URL",
        code="over_limit",
        limit=policy.max_redirects,
    )


def _failure(target: _Target, policy: MediaPolicy, error: Exception) -> InputError:
    """Return the error of a failed fetch.

    Most reasons would reveal the engine's network to the sender, so they go to the log. A certificate does not: only hosts with
    allowed addresses have shown one.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = f"its certificate is not valid: {error.verify_message}"
        return InputError(f"{target.host} cannot be fetched from ({reason}); check the URL, or give the file itself")
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    reason = " ".join(text.split())[:200]
    if not policy.allow_private_hosts:
        _log.info("fetching from %s failed: %s", target.host, reason)
        reason = "it does not answer, or its address is not public; <<give_bytes_or_allow>>"
        return InputError(f"{target.host} cannot be fetched from ({reason})")
    return InputError(f"{target.host} cannot be fetched from ({reason}); check the URL, or give the file itself")


def _read_url(url: str, policy: MediaPolicy, base: str = "") -> _Target:
    if len(url) > _LONGEST_URL:
        reason = f"the URL has {len(url)} characters, the limit is {_LONGEST_URL}; <<fetch_yourself>>"
        raise InputError(reason, code="over_limit", limit=_LONGEST_URL, value=len(url))
    try:
        full = urljoin(base, url)
        parts = urlsplit(full)
        scheme, port, host = parts.scheme.lower(), parts.port, _plain_name(parts.hostname or "")
        path = quote(parts.path or "/", safe=_IN_PATH) + ("?" + quote(parts.query, safe=_IN_PATH + "?") if parts.query else "")
    except ValueError:  # includes UnicodeError
        raise InputError(f"{url[:200]!r} is not a URL; give one such as https://host/path") from None
    if _UNSAFE.search(url):
        raise InputError(f"{url[:200]!r} holds a space, a backslash or a control character; write them as %20 and so on")
    if scheme not in _PORTS or not 0 < len(host) <= _LONGEST_HOST:
        raise InputError(f"{url[:200]!r} is not an http or https URL with a host; <<give_url>>")
    if parts.username is not None or parts.password is not None:
        raise InputError("a URL with a user name or password is refused; <<fetch_yourself>>")
    port = port or _PORTS[scheme]
    if policy.allowed_media_ports is not None and port not in policy.allowed_media_ports:
        ports = ", ".join(map(str, policy.allowed_media_ports))
        raise InputError(f"port {port} may not be fetched from; the allowed ones are {ports} (media: allowed_media_ports)")
    allowed = policy.allowed_media_domains
    if allowed is not None and host not in {_plain_name(name) for name in allowed}:
        raise InputError(f"{host} is not one of the domains that may be fetched from (media: allowed_media_domains)")
    return _Target(full, scheme, host, port, path)


def _plain_name(host: str) -> str:
    return host.rstrip(".").encode("idna").decode("ascii").lower()


class _LimitedStream(io.RawIOBase):
    """The byte stream of a server, counted and timed: slow senders and wrong lengths cannot exceed the limits."""

    def __init__(self, stream: socket.socket, policy: MediaPolicy, deadline: float, ledger: Ledger) -> None:
        self.stream, self.policy, self.deadline, self.ledger = stream, policy, deadline, ledger
        self.left = (
            policy.max_bytes + policy.max_bytes // 8 + _LONGEST_HEAD
        )  # with room for headers and for the framing of chunked bodies

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.stream.settimeout(_seconds_left(self.policy, self.deadline))
        count = self.stream.recv_into(buffer)
        self.left -= count
        self.ledger.check_open()
        if self.left < 0:
            reason = f"the server sends more than {self.policy.max_bytes:,} bytes, the limit (media: max_bytes)"
            raise InputError(reason, code="over_limit", limit=self.policy.max_bytes)
        return count


class _HttpSocket:
    """The socket that http.client uses. It ignores `close`, because http.client closes it before it reads the body."""

    def __init__(self, wire: _LimitedStream) -> None:
        self.wire = wire

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self.wire)

    def sendall(self, data: Any) -> None:
        self.wire.stream.settimeout(_seconds_left(self.wire.policy, self.wire.deadline))
        self.wire.stream.sendall(data)

    def close(self) -> None:
        """Do nothing: `_get` closes the stream."""


def _seconds_left(policy: MediaPolicy, deadline: float) -> float:
    """Return the seconds that the next network operation may take."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return min(policy.timeout, seconds)


def _get(target: _Target, policy: MediaPolicy, deadline: float, ledger: Ledger, most: int | None) -> bytes | str:
    """Return the body, or the target of a redirect. The end of the request ends each step but the name's resolution at once."""
    with _connect(target, policy, deadline, ledger) as raw:
        if target.scheme == "http":
            with ledger.watching(partial(_end, raw)):
                return _exchange(target, most, _LimitedStream(raw, policy, deadline, ledger))
        raw.settimeout(_seconds_left(policy, deadline))
        context = ssl.create_default_context()
        with (
            context.wrap_socket(raw, server_hostname=target.host, do_handshake_on_connect=False) as stream,
            ledger.watching(partial(_end, stream)),
        ):
            stream.do_handshake()
            return _exchange(target, most, _LimitedStream(stream, policy, deadline, ledger))


def _end(stream: socket.socket) -> None:
    """End the connection, so that the thread that connects or reads goes on at once."""
    with suppress(OSError):  # it has ended already
        socket.socket.shutdown(stream, socket.SHUT_RDWR)  # not that of ssl, which changes what the other thread uses


def _connect(target: _Target, policy: MediaPolicy, deadline: float, ledger: Ledger) -> socket.socket:
    infos = _resolve(target, _seconds_left(policy, deadline))
    for *_, address in infos:
        if not policy.allow_private_hosts and not is_public(ipaddress.ip_address(str(address[0]))):
            raise PermissionError(f"{address[0]} is not public")
    failure = OSError("the name has no address")
    for family, kind, protocol, _, address in infos:
        stream = socket.socket(family, kind, protocol)
        try:
            stream.settimeout(_seconds_left(policy, deadline))
            with ledger.watching(partial(_end, stream)):
                stream.connect(address)
            return stream
        except OSError as error:
            stream.close()
            failure = error
        except InputError:  # the request has ended
            stream.close()
            raise
    raise failure


def _resolve(target: _Target, seconds: float) -> list[Any]:
    """Call `getaddrinfo` in a thread, because it has no time limit. A slow call is abandoned.

    The end of the request does not end the wait: requests that come and go would leave any number of threads behind.
    """
    future: Future[list[Any]] = Future()

    def look_up() -> None:
        try:
            future.set_result(socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))
        except BaseException as error:  # raised in the waiting thread
            future.set_exception(error)

    threading.Thread(target=look_up, name="sensorium-resolve", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        raise TimeoutError("its name was not resolved in time") from None


def _exchange(target: _Target, most: int | None, wire: _LimitedStream) -> bytes | str:
    connection = http.client.HTTPConnection(target.host, target.port)
    connection.sock = _HttpSocket(wire)
    name = f"[{target.host}]" if ":" in target.host else target.host
    host = name if target.port == _PORTS[target.scheme] else f"{name}:{target.port}"
    headers = {"Host": host, "User-Agent": "sensorium", "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
    connection.request("GET", target.path, headers=headers)
    response = connection.getresponse()
    if response.status in _REDIRECTS:
        location = response.getheader("Location")
        if not location:
            raise InputError(f"{target.host} redirects without a target; give the final URL")
        return quote(location.strip(), safe=string.punctuation, encoding="latin-1")  # http.client decodes headers as latin-1
    if response.status != 200:
        raise InputError(f"{target.host} answers with status {response.status}; <<check_url>>")
    if (response.getheader("Content-Encoding") or "identity").lower() != "identity":
        raise InputError(f"{target.host} sends it compressed although it was asked not to; <<fetch_yourself>>")
    return _body(response, target, most, wire)


def _body(response: http.client.HTTPResponse, target: _Target, most: int | None, wire: _LimitedStream) -> bytes:
    """Read the body. The time that it waits for other requests' memory does not count against `max_seconds`."""
    policy, ledger = wire.policy, wire.ledger
    expected = response.length  # None without a Content-Length
    reason = f"{target.host} sends more than {policy.max_bytes:,} bytes, the limit (media: max_bytes)"
    too_large = InputError(reason, code="over_limit", limit=policy.max_bytes)
    if expected is not None and expected > policy.max_bytes:
        raise too_large
    if most is not None:
        wire.deadline += ledger.take(most, wait=True)
        return response.read(most)
    if expected is not None:
        wire.deadline += ledger.take(expected, wait=True)
    body = bytearray()
    while chunk := response.read(_CHUNK):
        if expected is None:
            wire.deadline += ledger.take(len(chunk), wait=True)
        body += chunk
        if len(body) > policy.max_bytes:
            raise too_large
    if expected is not None and len(body) < expected:
        raise http.client.IncompleteRead(b"", expected - len(body))
    return bytes(body)
