"""Read a caller's input as bytes: paths, data: URLs, file: URLs, http(s)."""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard
from urllib.parse import unquote_to_bytes, urlsplit
from weakref import WeakValueDictionary

from ...callers.errors import InputError, typed
from .data_url import base64_pieces, body_pieces, decoded, is_data_url, split_data_url
from .ledger import Ledger, MediaBudget
from .policy import FrameFiles, MediaPolicy, MediaUrl, PdfPage, page_of

_LONGEST_PATH = 4096
_HEAD_OF_URL = 1 << 16  # bytes that are fetched to look at a file
_locks: WeakValueDictionary[int, Any] = WeakValueDictionary()  # id of an open file that is being read -> its lock
_locks_guard = threading.Lock()
_BASE64 = re.compile(r"[A-Za-z0-9+/]{120}")
_FILE_URL = re.compile("(?i)file://")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{1,40}):")
_AROUND = "".join(map(chr, range(33)))  # what a URL loses at its ends (URL Standard, 4.4)
_HTTP = re.compile("(?i)https?:")
_PADDED_URL = re.compile(rf"(?i)[{_AROUND}]*(https?|file)://")


def read(value: object, modality: str, policy: MediaPolicy, ledger: Ledger | None = None) -> object:
    """Return the encoded bytes of a bytes-like, an open file, a path or a URL. Other values, such as pixels, are kept.

    A str or PathLike comes from the caller's own code and may name any regular file. FrameFiles become `(frames, metadata)`,
    each frame in bytes; the file of a PdfPage becomes bytes. A MediaUrl comes from a message: it may
    be a data: URL, an http(s) URL, or a file under `policy.allowed_local_media_path` after following links.

    `ledger` counts the bytes of the request.

    Raises:
        InputError: a file or URL is refused, too large or cannot be read, or the request holds too many bytes.
    """
    if ledger is None:
        with MediaBudget(policy).open() as call_budget:  # closed, it no longer holds the bytes
            return read(value, modality, policy, call_budget)
    if isinstance(value, bytes | bytearray | memoryview):
        _check_size(size := memoryview(value).nbytes, policy)
        return ledger.once(id(value), size, lambda: bytes(value))
    if isinstance(value, FrameFiles):
        metadata = {"fps": value.fps, "do_sample_frames": False}
        return [read(file, modality, policy, ledger) for file in value.files], metadata
    if isinstance(value, PdfPage):
        return _read_page(value, modality, policy, ledger)
    if hasattr(value, "read"):
        return _read_open_file(value, policy, ledger)
    text = value.url if isinstance(value, MediaUrl) else value
    if isinstance(value, MediaUrl) and not isinstance(text, str):
        raise InputError(f"a URL in a message must be a string, not {typed(text)}")
    if isinstance(text, str) and not text:
        raise InputError("the path is empty; give a file or URL")
    if isinstance(text, str) and is_data_url(text):
        return _from_data_url(text, policy, ledger)
    if isinstance(text, str):
        text = trimmed(text)
        match = _SCHEME.match(text)
        scheme = match[1].lower() if match else ""
        if scheme in ("http", "https"):
            from .fetch import fetch

            return fetch(text, policy, ledger)
        written = text.startswith("://", len(scheme))
        if scheme not in ("", "file") and (written or isinstance(value, MediaUrl)):
            raise InputError(f"{scheme}: URLs are not known; <<give_url_or_path>>")
        if isinstance(value, MediaUrl):
            return _under_root(path_of(text), modality, policy, ledger)
        if scheme == "file" and written:
            return _read_file(path_of(text), policy, ledger)
    if isinstance(text, str | os.PathLike):
        return _read_file(os.path.expanduser(text), policy, ledger)
    return value


def trimmed(text: str) -> str:
    """Return a URL without spaces and control characters at its ends, which may be parts of a path; a path as it is."""
    return text.strip(_AROUND) if _PADDED_URL.match(text) else text


def is_http(text: str) -> bool:
    """Return whether a text is an http or https URL."""
    return _HTTP.match(trimmed(text)) is not None


def open_local(value: object) -> BinaryIO | None:
    """Open a regular file at a path that the caller's own code gives. Return None for any other value; `read` handles it."""
    if not _is_path(value):
        return None
    try:
        handle = os.open(os.path.expanduser(value), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    return None


def read_head(value: object, size: int, policy: MediaPolicy) -> bytes:
    """Return the first bytes of encoded bytes, an open file that can seek, a local file, or a data: or http(s) URL.

    There are none for other values and if they cannot be read; `read` raises the error then.
    """
    try:
        if isinstance(value, bytes | bytearray | memoryview):
            head = bytes(memoryview(value).cast("B")[:size])
        elif hasattr(value, "read"):
            head = _head_of_open_file(value, size)
        elif isinstance(value, str) and is_data_url(value):
            head = _head_of_data_url(value, size)
        elif isinstance(value, str) and is_http(value):
            from .fetch import fetch

            head = fetch(trimmed(value), policy, most=min(size, _HEAD_OF_URL))
        else:
            with open_local(local_path(value)) or io.BytesIO() as file:
                head = file.read(size)
    except Exception:  # of the caller's object
        return b""
    return head if isinstance(head, bytes) else b""


def local_path(value: object) -> object:
    """Return the path of a file:// URL that the caller's own code gives; other values are returned as they are."""
    return Path(path_of(trimmed(value))) if isinstance(value, str) and _FILE_URL.match(trimmed(value)) else value


def _head_of_open_file(file: Any, size: int) -> Any:
    if not file.seekable():
        return b""
    with _alone(file):
        position = file.tell()
        file.seek(0)
        head = _read_to_end(file, size)
        file.seek(position)
    return head


def _head_of_data_url(url: str, size: int) -> bytes:
    parts = split_data_url(url)
    if parts is None:
        return b""
    body, head = body_pieces(url, parts), b""
    for piece in decoded(base64_pieces(body)) if parts.is_base64 else body:
        head += piece
        if len(head) >= size:
            break
    return head[:size]


def _is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(value, os.PathLike) or (isinstance(value, str) and not _SCHEME.match(trimmed(value)))


def _read_page(page: PdfPage, modality: str, policy: MediaPolicy, ledger: Ledger) -> PdfPage:
    """Return a page with the bytes of its file, which a page with `files` takes from there."""
    files = page.files
    if files is None or not _is_path(page.file):
        data = read(page.file, modality, policy, ledger)
        return page if data is page.file else replace(page, file=data)
    with _opened(os.path.expanduser(page.file), policy) as (file, key, size):
        opened = ledger.once(("pdf", key), size, lambda: files.once(key, lambda: file.read(size)))
    return page_of(opened, page.number)


def _read_open_file(file: Any, policy: MediaPolicy, ledger: Ledger) -> bytes:
    """Return all bytes of a file that the caller has opened, from its start if it can seek. Its position is kept."""
    try:
        with _alone(file):
            position = file.tell() if hasattr(file, "seekable") and file.seekable() else None
            if position is not None:
                file.seek(0)
            data = _read_to_end(file, policy.max_bytes + 1)
            if position is not None:
                file.seek(position)
    except Exception as error:  # of the caller's object
        raise InputError(f"the open file cannot be read ({error})") from None
    if not isinstance(data, bytes):
        raise InputError(f"reading the open file gives {typed(data)}; open it in binary mode, as in open(path, 'rb')")
    _check_size(len(data), policy)
    return ledger.once(id(file), len(data), lambda: data)


@contextmanager
def _alone(file: object) -> Iterator[None]:
    """Keep other threads from reading an open file: several items may be the same file."""
    with _locks_guard:
        lock = _locks.setdefault(id(file), threading.Lock())
    with lock:
        yield


def _read_to_end(file: Any, size: int) -> Any:
    """Return up to `size` bytes. A raw file or a pipe may return fewer than it is asked for before its end."""
    pieces: list[bytes] = []
    while size > 0:
        piece = file.read(size)
        if not isinstance(piece, bytes):
            return piece
        if not piece:
            break
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _check_size(size: int, policy: MediaPolicy) -> None:
    if size > policy.max_bytes:
        reason = f"it is {size:,} bytes, the limit is {policy.max_bytes:,} (media: max_bytes)"
        raise InputError(reason, code="over_limit", limit=policy.max_bytes, value=size)


def _from_data_url(url: str, policy: MediaPolicy, ledger: Ledger) -> bytes:
    parts = split_data_url(url)
    if parts is None:
        raise InputError("the data: URL has another form than data:<type>;base64,<data>; encode the file as base64")

    def pieces() -> Iterator[bytes]:
        return base64_pieces(body_pieces(url, parts)) if parts.is_base64 else body_pieces(url, parts)

    def decode() -> bytes:
        out = io.BytesIO()
        for piece in decoded(pieces()) if parts.is_base64 else pieces():
            out.write(piece)
        return out.getvalue()

    try:
        key, length, size = hashlib.sha256(), 0, 0  # the text itself would be hashed in one call, which holds the lock
        for piece in pieces():
            key.update(piece)
            length += len(piece)
            size = max(0, length * 3 // 4 - 2) if parts.is_base64 else length
            _check_size(size, policy)
        return ledger.once(("data", parts.is_base64, key.digest()), size, decode)
    except InputError:  # a ValueError, too
        raise
    except ValueError:
        raise InputError("the data: URL does not hold valid base64; encode it again") from None


def path_of(text: str) -> str:
    """Return the path of a file: URL, or the text itself."""
    if text[:5].lower() != "file:":
        return text
    try:
        parts = urlsplit(text)
        path = os.fsdecode(unquote_to_bytes(parts.path))
    except ValueError:  # includes UnicodeError
        raise InputError(f"{text[:200]!r} is not a URL; write file:///path") from None
    if parts.netloc not in ("", "localhost"):
        raise InputError(f"a file: URL must not name a host ({parts.netloc[:80]!r}); write file:///path")
    return path


def _under_root(path: str, modality: str, policy: MediaPolicy, ledger: Ledger) -> bytes:
    root = policy.allowed_local_media_path
    if root is None:
        raise InputError(
            f"files named in messages are refused; give the {modality} <<give_data>>, "
            f"or allow a folder (media: allowed_local_media_path){_base64_hint(path)}"
        )
    if len(path) > _LONGEST_PATH:
        reason = f"a path of {len(path):,} characters is over the limit of {_LONGEST_PATH:,}; give a shorter one"
        raise InputError(reason, code="over_limit", limit=_LONGEST_PATH, value=len(path))
    try:
        real, base = os.path.realpath(os.path.join(root, path)), os.path.realpath(root)
    except ValueError as error:  # a null byte
        raise InputError(f"the file {path[:200]!r} cannot be read ({error})") from None
    if os.path.commonpath((real, base)) != base:
        raise InputError(f"the file {path[:200]!r} is outside allowed_local_media_path; move it into that folder")
    return _read_file(path, policy, ledger, lambda flags: _open_beneath(base, os.path.relpath(real, base), flags))


def _open_beneath(base: str, path: str, flags: int) -> int:
    """Open a path without links below a folder. A folder that has become a link since it was checked is not followed."""
    *folders, name = path.split(os.sep)
    at = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=at)
    finally:
        os.close(at)


def _read_file(path: str | bytes, policy: MediaPolicy, ledger: Ledger, opener: Callable[[int], int] | None = None) -> bytes:
    """Read a regular file; see `_opened`."""
    with _opened(path, policy, opener) as (file, key, size):
        return ledger.once(key, size, lambda: file.read(size))


@contextmanager
def _opened(
    path: str | bytes, policy: MediaPolicy, opener: Callable[[int], int] | None = None
) -> Iterator[tuple[BinaryIO, tuple[int, ...], int]]:
    """Yield a regular file, a key of its content, and its size. Errors inside become InputErrors that name the file.

    Pipes and devices could block forever, so the file is opened without waiting. With `opener`, which opens the file with the
    given flags, `path` is only shown in errors: the sender of a message must not learn the root folder.
    """
    name, flags = repr(str(path)[:200]), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags) if opener is None else opener(flags)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                folder = stat.S_ISDIR(status.st_mode)
                raise InputError(f"{name} is {'a folder; give the files in it' if folder else 'not a regular file'}")
            _check_size(status.st_size, policy)
            with os.fdopen(handle, "rb", closefd=False) as file:
                yield file, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns), status.st_size
        finally:
            os.close(handle)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"the file {name} cannot be read ({reason}){_base64_hint(str(path))}") from None


def _base64_hint(path: str) -> str:
    """Return what to add to an error about this path: text if it begins as base64 does."""
    return "; if it is base64, write data:<type>;base64,<data>" if _BASE64.match(path) else ""
