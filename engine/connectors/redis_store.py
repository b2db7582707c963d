"""A connector that keeps bytes in a Redis-compatible store (Redis, Valkey, KeyDB), with the package `redis`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...callers.errors import ConfigError
from .backoff import Backoff

_PREFIX = "sensorium:"  # of all keys


class RedisConnector:
    """Keeps bytes under `sensorium:<key>`. See `Connector`.

    The store evicts what exceeds its memory, as its `maxmemory-policy` says.

    Args:
        url: such as "redis://user:password@host:6379/0", or "rediss://..." for TLS.
        seconds: time limit of connecting, and of each read and write.

    Raises:
        ConfigError: the package is not installed, or the URL is malformed.
    """

    name, is_in_process = "redis", False

    def __init__(self, url: str, seconds: float = 2.0) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            reason = "RedisConnector needs the package redis; run pip install 'sensorium[redis]'"
            raise ConfigError(reason, param="kv_transfer_config") from None
        try:
            limits = {
                "socket_timeout": seconds,
                "socket_connect_timeout": seconds,
                "retry": Retry(NoBackoff(), 0),
                "protocol": 2,
            }
            self._client: Any = redis.Redis.from_url(url, **limits)
        except ValueError:  # its message may hold a part of the password
            reason = "<<param>>['url'] must be a URL such as redis://user:password@host:6379/0"
            raise ConfigError(reason, param="kv_transfer_config") from None
        self._errors: type[Exception] = redis.RedisError
        options = self._client.connection_pool.connection_kwargs
        address = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        self._description = f"Redis at {address}"
        self._backoff = Backoff()

    def get(self, key: str, limit: int) -> bytes | None:
        with self._asking() as client:
            data: bytes = client.getrange(_PREFIX + key, 0, limit)
        if len(data) > limit:
            raise ValueError(f"it has more than {limit} bytes")
        return data or None

    def put(self, key: str, data: bytes) -> bool:
        with self._asking() as client:
            return bool(client.set(_PREFIX + key, data))

    def contains(self, keys: Sequence[str]) -> set[str]:
        if not keys:
            return set()
        with self._asking() as client:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.exists(_PREFIX + key)
            return {key for key, count in zip(keys, pipeline.execute(), strict=True) if count}

    def delete(self, key: str) -> None:
        with self._asking() as client:
            client.delete(_PREFIX + key)

    def describe(self) -> str:
        return self._description

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        """Raise ConnectionError for errors of the client, and for a while after one."""
        self._backoff.check(self._description)
        try:
            yield self._client
        except (self._errors, OSError) as error:
            self._backoff.record_failure()
            raise ConnectionError(f"{self._description}: {error}") from None
