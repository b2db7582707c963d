"""Downloads from a local server, and URLs that are refused before a request is sent."""

from __future__ import annotations

import contextlib
import ipaddress
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.media import fetch as module
from sensorium.mm.media.addresses import is_public
from sensorium.mm.media.fetch import fetch
from sensorium.mm.media.ledger import MediaBudget
from sensorium.mm.media.policy import MediaPolicy
from waiting import wait_until

LOCAL = MediaPolicy(
    allow_private_hosts=True, allowed_media_ports=None, max_bytes=1000, timeout=60, max_seconds=60, max_redirects=2
)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bodies = {  # noqa: RUF012
        "/good": b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndata",
        "/chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\ndata\r\n0\r\n\r\n",
        "/endless": b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 4000,
        "/liar": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n" + b"x" * (4 << 20),
        "/large": b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n",
        "/short": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ndata",
        "/packed": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
        "/gone": b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n",
        "/minus": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\ndata",
        "/away": b"HTTP/1.1 302 x\r\nLocation: http://localhost:1/x\r\nContent-Length: 0\r\n\r\n",
        "/noise": b"\x00\x01\x02\r\n\r\n",
        "/once": b"HTTP/1.1 302 x\r\nLocation: good\r\nContent-Length: 0\r\n\r\n",
        "/accents": "HTTP/1.1 302 x\r\nLocation: /b\u00e9 c?d=%20\r\nContent-Length: 0\r\n\r\n".encode(),
        "/b%C3%A9%20c?d=%20": b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndata",
        "/loop": b"HTTP/1.1 302 x\r\nLocation: /loop\r\nContent-Length: 0\r\n\r\n",
        "/file": b"HTTP/1.1 302 x\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
        "/bad": b"HTTP/1.1 302 x\r\nLocation: http://[bad\r\nContent-Length: 0\r\n\r\n",
    }

    pieces = {  # noqa: RUF012
        "/late": [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n", b"da", b"ta"],
        "/late-chunked": [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"2\r\nda\r\n",
            b"2\r\nta\r\n",
            b"0\r\n\r\n",
        ],
        "/late-end": [b"HTTP/1.1 200 OK\r\n\r\n", b"da", b"ta"],
    }

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers)))
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client hung up, as it should
            if self.path == "/drip":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n")
                for _ in range(900):
                    self.wfile.write(b"x")
                    time.sleep(0.1)
            for piece in self.pieces.get(self.path, ()):  # the body comes after the headers, and not at once
                self.wfile.write(piece)
                time.sleep(0.05)
            for _ in range(900 if self.path == "/drip-head" else 0):
                self.wfile.write(b"H")
                time.sleep(0.1)
            self.wfile.write(self.bodies.get(self.path, self.bodies["/endless"] if "/endless?" in self.path else b""))

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close, server.seen = True, False, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("path", ["good", "chunked", "once", "accents", "late", "late-chunked", "late-end"])
def test_a_body_arrives(server, path):
    assert fetch(f"http://127.0.0.1:{server.server_port}/{path}", LOCAL) == b"data"
    assert server.seen[-1][1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("path", ["good", "chunked", "endless", "late"])
def test_the_head_of_a_body(server, path):
    """Also of one that never ends, or is larger than a file may be without saying so."""
    head = fetch(f"http://127.0.0.1:{server.server_port}/{path}", LOCAL, most=2)
    assert head == (b"xx" if path == "endless" else b"da")
    with pytest.raises(InputError, match="sends more than"):
        fetch(f"http://127.0.0.1:{server.server_port}/large", LOCAL, most=2)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("endless", "more than 1,000 bytes.*max_bytes"),
        ("liar", "more than 1,000 bytes.*max_bytes"),
        ("large", "more than 1,000 bytes.*max_bytes"),
        ("short", "cannot be fetched"),
        ("packed", "compressed"),
        ("gone", "status 404"),
        ("minus", "cannot be fetched"),
        ("noise", "cannot be fetched"),
        ("loop", "more than 2 times.*max_redirects"),
        ("file", "not an http or https URL"),
        ("bad", "is not a URL"),
    ],
)
def test_refused_responses(server, path, text):
    with pytest.raises(InputError, match=text) as error:
        fetch(f"http://127.0.0.1:{server.server_port}/{path}", LOCAL)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["drip", "drip-head"])
def test_a_slow_sender_hits_the_time_limit(server, path):
    start = time.monotonic()
    with pytest.raises(InputError, match=r"longer than 0.5 s \(media: max_seconds\)"):
        fetch(f"http://127.0.0.1:{server.server_port}/{path}", replace(LOCAL, max_seconds=0.5))
    assert time.monotonic() - start < 60  # of 90


@pytest.mark.parametrize("path", ["drip", "drip-head"])
def test_a_download_ends_with_its_request(server, path):
    ledger = MediaBudget(LOCAL).open()
    seen = len(server.seen)
    closer = threading.Thread(target=lambda: (wait_until(lambda: len(server.seen) > seen), ledger.close()))
    closer.start()
    with pytest.raises(InputError, match="its request has ended"):
        fetch(f"http://127.0.0.1:{server.server_port}/{path}", LOCAL, ledger)
    closer.join()


@contextlib.contextmanager
def silent_server(full):
    """Listen and never answer; with `full`, the queue of connections has no room, so that the next one waits."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0 if full else 9))
        while full:
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(listener.getsockname())
            except TimeoutError:
                break
        yield listener


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere shutting a connecting socket down may not end the connect")
@pytest.mark.parametrize(("scheme", "full"), [("http", True), ("https", True), ("https", False)])
def test_a_connect_ends_with_its_request(monkeypatch, scheme, full):
    """The thread of a request that is closed does not wait for a connection, nor for the answer to a TLS handshake."""
    begun, connect, handshake = threading.Event(), socket.socket.connect, ssl.SSLSocket.do_handshake
    started = MediaBudget(LOCAL).open()
    with silent_server(full) as listener, ThreadPoolExecutor(1) as threads:
        if full:
            monkeypatch.setattr(socket.socket, "connect", lambda *args: begun.set() or connect(*args))
        else:
            monkeypatch.setattr(ssl.SSLSocket, "do_handshake", lambda *args: begun.set() or handshake(*args))
        url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/x"
        download = threads.submit(fetch, url, replace(LOCAL, timeout=50), started)
        assert begun.wait(30)
        time.sleep(0.1)
        assert not download.done()
        start = time.monotonic()
        started.close()
        with pytest.raises(InputError, match="its request has ended"):
            download.result()
    assert time.monotonic() - start < 25  # of 50


def test_requests_that_end_leave_no_threads_that_resolve_names(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: release.wait(60) and [])
    budget = MediaBudget(LOCAL)
    with ThreadPoolExecutor(2) as threads:
        downloads = []
        for _ in range(6):
            ledger = budget.open()
            downloads.append(threads.submit(fetch, "http://slow.example/x", LOCAL, ledger))
            ledger.close()
        assert sum(thread.name == "sensorium-resolve" for thread in threading.enumerate()) <= 2  # one for each that fetches
        release.set()
        for download in downloads:
            with pytest.raises(InputError, match="its request has ended"):
                download.result()


def test_many_urls_of_one_request_share_its_limit(server):
    policy = replace(LOCAL, max_bytes=5000, max_request_bytes=10_000)
    budget = MediaBudget(policy)
    seen = len(server.seen)
    with budget.open() as ledger:
        for number in range(2):
            assert len(fetch(f"http://127.0.0.1:{server.server_port}/endless?{number}", policy, ledger)) == 4000
        for number in range(2, 24):
            with pytest.raises(InputError, match=r"more than 10,000 bytes \(media: max_request_bytes\)"):
                fetch(f"http://127.0.0.1:{server.server_port}/endless?{number}", policy, ledger)
            assert budget.num_bytes <= 10_000
    assert budget.num_bytes == 0
    assert len(server.seen) == seen + 24


def test_redirects_are_checked_again(server, monkeypatch):
    monkeypatch.setattr(module, "is_public", lambda address: str(address) == "127.0.0.1" and not hidden)
    hidden: list[int] = []
    url = f"http://127.0.0.1:{server.server_port}/away"
    with pytest.raises(InputError, match="localhost is not one of the domains"):
        fetch(url, MediaPolicy(allowed_media_domains=("127.0.0.1",), allowed_media_ports=None))
    real = socket.getaddrinfo

    def resolve(host, port, **options):
        if host == "localhost":
            hidden.append(port)
        return real(host, port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(InputError, match="localhost cannot be fetched from"):
        fetch(url, MediaPolicy(allowed_media_ports=None))
    assert hidden == [1]


def test_name_resolution_has_a_time_limit(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: release.wait(10) and [])
    with pytest.raises(InputError, match=r"slow.example cannot be fetched from \(its name was not resolved in time"):
        fetch("http://slow.example/x", MediaPolicy(timeout=0.05, allow_private_hosts=True))
    with pytest.raises(InputError, match=r"longer than 0\.05 s"):
        fetch("http://slow.example/x", MediaPolicy(max_seconds=0.05))
    release.set()


@pytest.mark.parametrize("names", [("*..example.org",), ("",), (".example.org",), (b"x",)])
def test_invalid_domains_are_refused_by_the_policy(names):
    with pytest.raises(ConfigError, match="whole host names"):
        MediaPolicy(allowed_media_domains=names)
    with pytest.raises(ConfigError, match="max_redirects"):
        MediaPolicy(max_redirects=-1)


def test_redirects_from_https_to_http_are_refused(monkeypatch):
    monkeypatch.setattr(module, "_get", lambda *_: "http://a.example/x")
    with pytest.raises(InputError, match=r"a.example redirects from https to http; give the final URL"):
        fetch("https://a.example/x", MediaPolicy())


def test_proxies_of_the_environment_are_not_used(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert fetch(f"http://127.0.0.1:{server.server_port}/good", LOCAL) == b"data"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "127.1",
        "017700000001",
        "100.64.0.1",
        "224.0.0.1",
        "[::ffff:7f00:1]",
        "[2001:0:1::1]",
        "localhost",
        "localhost.",
        "LOCALHOST",
        "0.0.0.0",
        "10.0.0.1",
        "169.254.169.254",
        "192.168.1.1",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[fe80::1]",
        "[fd00::1]",
        "[2002:7f00:1::]",
        "[64:ff9b::7f00:1]",
        "[::127.0.0.1]",
    ],
)
def test_addresses_that_are_not_public(host):
    with pytest.raises(InputError, match=r"cannot be fetched from \(it does not answer, or its address is not public"):
        fetch(f"http://{host}/", MediaPolicy())


def test_errors_are_equal_for_private_unknown_and_closed_addresses(server, monkeypatch):
    """A sender must not be able to map the engine's network with URLs."""
    places = {"private.example": "10.0.0.1", "closed.example": "93.184.215.14"}

    def resolve(host, port, **_):
        if host not in places:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (places[host], port))]

    class Socket(socket.socket):
        def connect(self, address):
            raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "socket", Socket)
    texts = set()
    for host in ("private", "closed", "missing"):
        with pytest.raises(InputError) as error:
            fetch(f"http://{host}.example/x", MediaPolicy())
        texts.add(str(error.value).removeprefix(host))
    assert len(texts) == 1


@pytest.mark.parametrize("url", ["http://a.example:22/x", "https://a.example:6379/x", "http://8.8.8.8:8080/"])
def test_other_ports_are_refused_before_anything_is_resolved(url, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", None)
    with pytest.raises(InputError, match=r"port \d+ may not be fetched from.*80, 443 \(media: allowed_media_ports\)"):
        fetch(url, MediaPolicy())
    for ports in (("80",), (0,), (70000,), 80, (True,)):
        with pytest.raises(ConfigError, match="allowed_media_ports"):
            MediaPolicy(allowed_media_ports=ports)


def test_is_public():
    private = "fec0::1 64:ff9b:1::7f00:1 ::ffff:0:7f00:1 2001:0:1::1 ff02::1 2001:db8::1 224.0.0.1 100.64.0.1 240.0.0.1 5f00::1"
    private += " 168.63.129.16 192.0.0.192 3fff::1 100.100.100.200 198.18.0.1 fd00:ec2::254 fe80::1%eth0"
    private += " 2a00:1:2:3::10.0.0.1 2a00:1:2:3::a9fe:a9fe 2a00:1:a00:1:: 2a00:1:c0:a801:1:: 2a00:1:2:ac10:0:100:0:0"
    private += " 2a00:1:2:3:7f:0:100:0"
    assert not any(is_public(ipaddress.ip_address(one)) for one in private.split())
    public = "8.8.8.8 2606:4700::1111 64:ff9b::808:808 ::ffff:8.8.8.8 2a00:1:2:3::1 2001:4860:4860::8888 2a00:1:2:3::8.8.8.8"
    assert all(is_public(ipaddress.ip_address(one)) for one in public.split())


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://a.example/x", "not an http or https URL"),
        ("http:///x", "with a host"),
        ("http://u:p@a.example/", "user name or password"),
        ("http://a.example:99999/", "is not a URL"),
        ("http://[bad/", "is not a URL"),
        ("http://a.example/\r\nX: y", "a control character; write them as %20"),
        ("http://a.example/\ud800", "is not a URL"),
        ("http://" + "a" * 9000, "9007 characters"),
        ("http://sub.good.example/", "allowed_media_domains"),
        ("http://good.example.evil.example/", "allowed_media_domains"),
    ],
)
def test_urls_that_are_refused(url, text, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", None)  # nothing is resolved
    with pytest.raises(InputError, match=text):
        fetch(url, MediaPolicy(allowed_media_domains=("good.example",)))


def test_a_name_is_resolved_once_and_the_checked_address_is_used(monkeypatch):
    answers, connected = ["93.184.215.14", "127.0.0.1"], []

    class Socket(socket.socket):
        def connect(self, address):
            connected.append(address)
            raise ConnectionRefusedError("refused")

    def resolve(host, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "socket", Socket)
    policy = MediaPolicy(allowed_media_domains=("Rebind.Example.",))
    with pytest.raises(InputError, match="cannot be fetched from"):
        fetch("http://rebind.EXAMPLE./x", policy)
    assert connected == [("93.184.215.14", 80)]
    assert answers == ["127.0.0.1"]
    with pytest.raises(InputError, match="cannot be fetched from"):
        fetch("http://rebind.example/x", policy)


def test_one_private_address_among_public_ones_is_refused(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 80)) for one in ("93.184.215.14", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: found)
    with pytest.raises(InputError, match="cannot be fetched from"):
        fetch("http://a.example/", MediaPolicy())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_certificates_are_checked(tmp_path, monkeypatch):
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")]
    subprocess.run([*command, *names], check=True, capture_output=True)
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads, running.block_on_close, running.seen = True, False, []
    running.handle_error = lambda *_: None  # a refused handshake is no news
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    running.socket = context.wrap_socket(running.socket, server_side=True)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    place = f":{running.server_port}/late"
    with monkeypatch.context() as patch:
        patch.setattr("sensorium.mm.media.fetch.is_public", lambda address: True)
        for policy in LOCAL, MediaPolicy(allowed_media_ports=None):  # where private hosts are not allowed, too
            with pytest.raises(InputError, match=r"its certificate is not valid: self-signed certificate\)"):
                fetch(f"https://localhost{place}", policy)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert"))
    assert fetch(f"https://localhost{place}", LOCAL) == b"data"
    with pytest.raises(InputError, match="its certificate is not valid"):
        fetch(f"https://127.0.0.1{place}", LOCAL)  # the certificate names the host, not its address
    running.shutdown()
    running.server_close()
    thread.join()
