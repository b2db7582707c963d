"""The `encrypted_content` of reasoning items: clients keep it and send it back, and the server knows that it wrote it."""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import secrets
import time
from pathlib import Path

from ..callers.errors import ConfigError, InputError

_HEAD = "signed-1."
_KEY_BYTES = _MAC_BYTES = 32
_FILE = "reasoning.key"
_LONGEST_WRITE = 2.0  # seconds in which another process writes the key
_ADVICE = "send the item as the server gave it, or leave its encrypted_content out"


class ReasoningSigner:
    """Writes reasoning with a message authentication code (HMAC-SHA256), so that it cannot be changed.

    The text is not secret: the same item has it in `content`.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(_KEY_BYTES) if key is None else key

    def sign(self, text: str) -> str:
        data = text.encode("utf-8", "surrogatepass")
        return _HEAD + base64.urlsafe_b64encode(hmac.digest(self._key, data, "sha256") + data).decode()

    def verify(self, signed: str, where: str) -> str:
        """Return the reasoning.

        Args:
            where: the item, for errors.

        Raises:
            InputError: the text is of another server, or was changed.
        """
        head, signed_data = signed[: len(_HEAD)], signed[len(_HEAD) :]
        if head != _HEAD:
            raise InputError(f"{where}.encrypted_content is not of this server; {_ADVICE}", param=where)
        try:
            data = base64.b64decode(signed_data.encode("ascii"), b"-_", validate=True)
        except (ValueError, binascii.Error):
            raise InputError(f"{where}.encrypted_content was changed or cut off; {_ADVICE}", param=where) from None
        mac, text = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, hmac.digest(self._key, text, "sha256")):
            reason = "was changed, or is of a server with another key (without data_dir, each start makes a new one)"
            raise InputError(f"{where}.encrypted_content {reason}; {_ADVICE}", param=where)
        return text.decode("utf-8", "surrogatepass")


def stored_signer(folder: str | os.PathLike[str]) -> ReasoningSigner:
    """Return the signer whose key is in this folder, so that it verifies old texts after a restart. A missing key is made.

    Raises:
        ConfigError: the key cannot be read or written.
    """
    path = Path(folder) / _FILE
    try:
        if not path.exists():
            _write_key(path)
        key = _read_key(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}", param="data_dir") from None
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"{path} must have {_KEY_BYTES} bytes, not {len(key)}; remove it", param="data_dir")
    return ReasoningSigner(key)


def _write_key(path: Path) -> None:
    """Write a new key, unless another process is first. With hard links, the file appears whole."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        _create(part, secrets.token_bytes(_KEY_BYTES))
        try:
            os.link(part, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            _create(path, part.read_bytes())
    finally:
        part.unlink(missing_ok=True)


def _create(path: Path, content: bytes) -> None:
    """Write a file, unless it exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with open(descriptor, "wb", buffering=0) as file:
        file.write(content)


def _read_key(path: Path) -> bytes:
    """Return the key. Another process may be writing it: wait while it is short."""
    end = time.monotonic() + _LONGEST_WRITE
    while len(key := path.read_bytes()) < _KEY_BYTES and time.monotonic() < end:
        time.sleep(0.01)
    return key
