"""One http(s) download, to public addresses only unless told otherwise, within limits. Knows no media and no files."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from ..errors import InputError
from .policy import MediaPolicy

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 1 << 16
_LONGEST_URL = 8192
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class _Target:
    url: str
    scheme: str
    host: str  # ASCII, lower case, without a trailing dot
    port: int
    path: str


def fetch(url: str, policy: MediaPolicy) -> bytes:
    """The body of one GET.

    The host is resolved once and every address it has is checked; the connection goes to a checked address itself, so
    that a name cannot change its mind in between. Redirects start over. Nothing is read from the environment.

    Raises:
        InputError: a URL, host, address, size or answer that is refused, or a server that fails or takes too long.
    """
    deadline = time.monotonic() + policy.max_seconds
    for _ in range(policy.max_redirects + 1):
        target = _read_url(url, policy)
        try:
            answer = _get(target, policy, deadline)
        except (OSError, http.client.HTTPException) as error:  # everything sockets, TLS and HTTP parsing are known to raise
            if time.monotonic() >= deadline:
                raise InputError(f"fetching it took longer than {policy.max_seconds:g} s (media: max_seconds)") from None
            reason = str(error) or type(error).__name__
            raise InputError(f"{target.host} cannot be fetched from ({' '.join(reason.split())[:200]})") from None
        if isinstance(answer, bytes):
            return answer
        url = urljoin(target.url, answer)
        if target.scheme == "https" and not url.lower().startswith("https:"):
            raise InputError(f"{target.host} redirects from https to {url.partition(':')[0]}; give the final URL")
    raise InputError(f"{target.host} redirects more than {policy.max_redirects} times (media: max_redirects)")


def _read_url(url: str, policy: MediaPolicy) -> _Target:
    if len(url) > _LONGEST_URL:
        raise InputError(f"the URL has {len(url)} characters, the limit is {_LONGEST_URL}")
    try:
        parts = urlsplit(url)
        scheme, port = parts.scheme.lower(), parts.port
        host = (parts.hostname or "").rstrip(".").encode("idna").decode("ascii").lower()
    except (ValueError, UnicodeError):
        raise InputError(f"{url[:200]!r} is not a URL") from None
    if scheme not in _PORTS or not host or _UNSAFE.search(url):
        raise InputError(f"{url[:200]!r} is not an http or https URL with a host")
    if parts.username is not None or parts.password is not None:
        raise InputError("a URL with a user name or password is refused; fetch it yourself and give bytes")
    allowed = policy.allowed_media_domains
    if allowed is not None and host not in {name.rstrip(".").lower() for name in allowed}:
        raise InputError(f"{host} is not one of the domains that may be fetched from (media: allowed_media_domains)")
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (
        "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?") if parts.query else ""
    )
    return _Target(url, scheme, host, port or _PORTS[scheme], path)


def _get(target: _Target, policy: MediaPolicy, deadline: float) -> bytes | str:
    """The body, or where a redirect leads."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    raw = _connect(target, policy)
    # A server that drips a byte now and then passes every timeout of a single read: the clock closes the connection.
    clock = threading.Timer(seconds, _hang_up, (raw,))
    clock.daemon = True
    clock.start()
    try:
        plain = target.scheme == "http"
        stream = raw if plain else ssl.create_default_context().wrap_socket(raw, server_hostname=target.host)
        with stream:
            return _exchange(stream, target, policy, deadline)
    finally:
        clock.cancel()
        raw.close()


def _hang_up(raw: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed already
        raw.shutdown(socket.SHUT_RDWR)


def _connect(target: _Target, policy: MediaPolicy) -> socket.socket:
    found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        if not policy.allow_private_hosts and not _is_public(ipaddress.ip_address(address)):
            raise InputError(f"{target.host} has the address {address}, which is not public (media: allow_private_hosts)")
    for number, address in enumerate(addresses):
        try:
            return socket.create_connection((address, target.port), policy.timeout)
        except OSError:
            if number == len(addresses) - 1:
                raise
    raise OSError("the name has no address")


def _is_public(address: Address) -> bool:
    """Whether an address, and the IPv4 address inside it where there is one, is of the public internet."""
    inner: list[Address] = []
    if isinstance(address, ipaddress.IPv6Address):
        embedded = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            embedded.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        inner = [one for one in embedded if one is not None]
        if address.ipv4_mapped is not None:
            return _is_public(address.ipv4_mapped)
    return address.is_global and not address.is_multicast and all(_is_public(one) for one in inner)


def _exchange(stream: socket.socket, target: _Target, policy: MediaPolicy, deadline: float) -> bytes | str:
    connection = http.client.HTTPConnection(target.host, target.port)
    connection.sock = stream
    name = f"[{target.host}]" if ":" in target.host else target.host
    host = name if target.port == _PORTS[target.scheme] else f"{name}:{target.port}"
    headers = {"Host": host, "User-Agent": "sensorium", "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
    connection.request("GET", target.path, headers=headers)
    response = connection.getresponse()
    if response.status in _REDIRECTS:
        location = response.getheader("Location")
        if not location:
            raise InputError(f"{target.host} redirects to nowhere")
        return location
    if response.status != 200:
        raise InputError(f"{target.host} answers with status {response.status}")
    if (response.getheader("Content-Encoding") or "identity").lower() != "identity":
        raise InputError(f"{target.host} sends it compressed although it was asked not to; fetch it yourself and give bytes")
    return _body(response, target, policy, deadline)


def _body(response: http.client.HTTPResponse, target: _Target, policy: MediaPolicy, deadline: float) -> bytes:
    expected = response.length  # None when the server does not say
    too_large = InputError(f"{target.host} sends more than {policy.max_bytes:,} bytes, the limit (media: max_bytes)")
    if expected is not None and expected > policy.max_bytes:
        raise too_large
    body = bytearray()
    while chunk := response.read(_CHUNK):
        body += chunk
        if len(body) > policy.max_bytes:
            raise too_large
    if time.monotonic() >= deadline:
        raise TimeoutError
    if expected is not None and len(body) < expected:
        raise http.client.IncompleteRead(b"", expected - len(body))
    return bytes(body)
