"""Prometheus metrics of HTTP requests and of the engine's process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from ..engine.frontend.engine_loop import EngineLoop
from .request_record import RequestRecord

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_FACTORS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "WEBSOCKET")
_STATES = {
    "engine_restarting": "1 while the engine's process is restarted",
    "engine_sleep_state": "1 while the engine sleeps",
}
_COUNTS = {
    "engine_deaths": "deaths of the engine's process",
    "engine_restarts": "restarts of the engine's process",
}


class HttpMetrics:
    """Counts the requests of a server in a CollectorRegistry.

    Args:
        default_name: the label `model_name` of requests that name no model.
    """

    def __init__(self, registry: Any, default_name: str) -> None:
        from prometheus_client import Counter, Histogram

        self._default_name = default_name
        labels = ["method", "path", "status", "model_name"]
        self._requests = Counter("sensorium_http_requests", "HTTP requests, by endpoint and status", labels, registry=registry)
        self._seconds = Histogram(
            "sensorium_http_request_seconds",
            "from the header of a request to the end of its response",
            ["path", "model_name"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._malformed = Counter(
            "sensorium_http_malformed_requests", "requests that are not HTTP; they have no line in the log", registry=registry
        )
        self._audio = Counter(
            "sensorium_audio_seconds", "seconds of sound that was transcribed", ["model_name"], registry=registry
        )
        self._real_time_factor = Histogram(
            "sensorium_real_time_factor",
            "time of a transcription request per second of its sound",
            ["model_name"],
            buckets=_FACTORS,
            registry=registry,
        )

    def observe(self, record: RequestRecord, path: str) -> None:
        """Count a request. `path`: that of the endpoint, so that clients cannot make new time series."""
        status = "disconnected" if record.disconnected else str(record.status or "failed")
        name = record.model or self._default_name
        self._requests.labels(record.method if record.method in _METHODS else "other", path, status, name).inc()
        self._seconds.labels(path, name).observe(record.seconds)
        if record.audio_seconds:
            self._audio.labels(name).inc(record.audio_seconds)
            self._real_time_factor.labels(name).observe(record.seconds / record.audio_seconds)

    def count_malformed(self) -> None:
        self._malformed.inc()


def register_engine(registry: Any, engine_loop: EngineLoop) -> None:
    """Add the metrics of an engine's process to a CollectorRegistry, which does not keep the engine alive."""
    registry.register(_EngineCollector(weakref.ref(engine_loop)))


class _EngineCollector:
    """Reads the state of the engine's process when metrics are collected."""

    def __init__(self, engine_loop: weakref.ref[EngineLoop]) -> None:
        self._engine_loop = engine_loop

    def describe(self) -> list[Any]:
        return list(self._families(0, 0, False, False))

    def collect(self) -> Iterator[Any]:
        loop = self._engine_loop()
        if loop is not None:
            yield from self._families(loop.num_deaths, loop.num_restarts, loop.is_restarting, loop.asleep)

    def _families(self, deaths: int, restarts: int, restarting: bool, asleep: bool) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for (name, text), count in zip(_COUNTS.items(), (deaths, restarts), strict=True):
            yield CounterMetricFamily(f"sensorium_{name}", text, value=count)
        for (name, text), state in zip(_STATES.items(), (restarting, asleep), strict=True):
            yield GaugeMetricFamily(f"sensorium_{name}", text, value=float(state))
