"""Sockets on which the server listens."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

from ..callers.errors import ConfigError
from .config import ServerConfig


def bind(config: ServerConfig) -> socket.socket:
    """Return a socket that does not listen yet, so that a port or path in use is found before the model is loaded."""
    return _bind_tcp(config.host, config.port, "port") if config.uds is None else _bind_unix(config.uds)


def bind_metrics(config: ServerConfig) -> socket.socket | None:
    """Return a socket that has the port of the metrics, if they have one of their own."""
    return None if config.metrics_port is None else _bind_tcp(config.host, config.metrics_port, "metrics_port")


def _bind_tcp(host: str, port: int, param: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets whose protocol is named; without it, an answer waits 40 ms for a delayed ACK
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = f"{host}, port {port} cannot be used ({_reason(error)}); choose another host or port"
        raise ConfigError(reason, param=param) from None
    return listener


class UnixListener(socket.socket):
    """A Unix domain socket that removes its file, unless another one has taken its place, and its lock when it is closed."""

    lock: int | None = None  # descriptor of the locked file beside the socket
    file: tuple[str, int, int] | None = None  # path, device and inode

    def close(self) -> None:
        super().close()
        file, self.file = self.file, None
        if file is not None:
            with suppress(OSError):
                status = os.stat(file[0])
                if (status.st_dev, status.st_ino) == file[1:]:
                    os.unlink(file[0])
        lock, self.lock = self.lock, None
        if lock is not None:
            os.close(lock)


def _bind_unix(path: str) -> socket.socket:
    """Return a Unix domain socket. One that a killed server has left at the path is replaced; one in use, or a file, is not.

    A server holds a lock on the file `path`.lock, because a socket that does not listen yet looks like an abandoned one.
    """
    import fcntl

    listener = UnixListener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(listener.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_abandoned(path):
            os.unlink(path)
        before = os.umask(0o177)  # a socket has the permissions of its creation from the first moment
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        status = os.stat(path)
        listener.file = path, status.st_dev, status.st_ino
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        listener.close()
        reason = f"<<param=>>{path!r} cannot be used ({_reason(error)}); choose another path, or stop the server that uses it"
        raise ConfigError(reason, param="uds") from None
    return listener


def _reason(error: OSError | ValueError) -> str:
    """Return the system's words for an error, such as "Permission denied"."""
    if isinstance(error, BlockingIOError):  # of the lock
        return "another server uses it"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _is_abandoned(path: str) -> bool:
    """Return True if there is a socket at the path that nobody listens on."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(path)
    except ConnectionRefusedError:
        return True
    except FileNotFoundError:
        return False
    return False


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
