"""A Hugging Face Hub on localhost that serves one folder as one model: its list of files, and the files with ranges."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 1 << 16
"""Files of at least this size are stored in Git LFS."""


class FakeHub:
    """The state of the server; a test changes it between requests.

    Attributes:
        files: content by name of the only model.
        branches: commit by name of a branch. Every commit has the same files.
        listed: further names in the list of files, which do not exist.
        gated, private: files are refused (gated), or the whole model is as if it did not exist (private), without `token`.
        damaged: names of files that are sent with one wrong byte.
        cut: name of a file -> bytes after which the connection is closed, one number per request. None sends everything.
        hold: name of a file -> bytes after which nothing is sent until `released` is set.
        ranges: False ignores the header Range.
        requests: (method, path, range or "") of each request.
        sent: bytes of the content of each file that were sent.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        self.branches = {"main": "a" * 40}
        self.listed: list[str] = []
        self.token = ""
        self.gated = self.private = False
        self.status = 200
        self.damaged: set[str] = set()
        self.cut: dict[str, list[int | None]] = {}
        self.hold: dict[str, int] = {}
        self.released = threading.Event()
        self.ranges = True
        self.requests: list[tuple[str, str, str]] = []
        self.sent: dict[str, int] = {}
        self.lock = threading.Lock()
        self.url = ""

    @property
    def commit(self) -> str:
        return self.branches["main"]

    def fetched(self) -> set[str]:
        """Return the names of all files that were asked for."""
        return {unquote(path.split("/resolve/")[1].partition("/")[2]) for _, path, _ in self.requests if "/resolve/" in path}

    def info(self) -> dict[str, Any]:
        siblings = [{"rfilename": name, **entry(content)} for name, content in self.files.items()]
        siblings += [{"rfilename": name, **entry(b"?")} for name in self.listed]
        return {"id": self.name, "sha": self.commit, "gated": "manual" if self.gated else False, "siblings": siblings}


def is_large(content: bytes) -> bool:
    return len(content) >= LARGE


def blob_hash(content: bytes) -> str:
    """Return the name of the blob: SHA-256 in Git LFS, else git's SHA-1."""
    return hashlib.sha256(content).hexdigest() if is_large(content) else git_hash(content)


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"size": len(content), "blobId": git_hash(content)}
    if is_large(content):
        found["lfs"] = {"sha256": blob_hash(content), "size": len(content), "pointerSize": 134}
    return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        with hub.lock:
            hub.requests.append((self.command, path, self.headers.get("Range", "")))
        allowed = not hub.token or self.headers.get("Authorization") == f"Bearer {hub.token}"
        api = re.fullmatch(rf"/api/models/{hub.name}/revision/(.+)", path)
        file = re.fullmatch(rf"/{hub.name}/resolve/([^/]+)/(.+)", path)
        if hub.status != 200:
            self.answer(hub.status, b"busy")
        elif not (api or file) or (hub.private and not allowed):
            self.refuse(401, "RepoNotFound", "Repository not found")
        elif (found := api or file) and unquote(found[1]) not in {*hub.branches, *hub.branches.values()}:
            self.refuse(404, "RevisionNotFound", "Revision not found")
        elif api:
            commit = hub.branches.get(unquote(api[1]), api[1])
            self.answer(200, json.dumps(hub.info() | {"sha": commit}).encode(), {"Content-Type": "application/json"})
        elif hub.gated and not allowed:
            self.refuse(403, "GatedRepo", "Access to this model is restricted")
        elif file and unquote(file[2]) not in hub.files:
            self.refuse(404, "EntryNotFound", "Entry not found")
        elif file:
            self.send_file(unquote(file[2]), hub.branches.get(file[1], file[1]))

    def refuse(self, status: int, code: str, text: str) -> None:
        self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": text})

    def send_file(self, name: str, commit: str) -> None:
        hub, content = self.hub, self.hub.files[name]
        headers = {"ETag": f'"{blob_hash(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if name in hub.damaged:
            content = bytes([content[0] ^ 1]) + content[1:]
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted and hub.ranges else 0
        if wanted and hub.ranges:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        with hub.lock:
            limit = hub.cut[name].pop(0) if hub.cut.get(name) else None
        self.answer(206 if "Content-Range" in headers else 200, content[start:], headers, limit, name)

    def answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, limit: int | None = None, name: str = ""
    ) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        part = body if limit is None else body[:limit]
        with self.hub.lock:
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(part)
        held = self.hub.hold.get(name, len(part))
        self.wfile.write(part[:held])
        if held < len(part):
            self.hub.released.wait()
        with suppress(ConnectionError):  # the client may be gone
            self.wfile.write(part[held:])
        if limit is not None:
            self.close_connection = True


@contextmanager
def serving(name: str, folder: Path) -> Iterator[FakeHub]:
    """Serve a folder as the model `name` until the block ends."""
    hub = FakeHub(name, folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
