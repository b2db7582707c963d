"""Exports spans to a collector of OpenTelemetry, and takes the context of a client's trace from its requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..callers.errors import ConfigError
from ..engine.frontend.trace import trace_context

_CONTEXT = frozenset({b"traceparent", b"tracestate"})  # W3C Trace Context


def make_provider(endpoint: str, name: str) -> Any:
    """Return a TracerProvider that sends spans to a collector over HTTP (OTLP, protobuf).

    Args:
        endpoint: URL such as http://localhost:4318/v1/traces.
        name: of the served model, an attribute of the service.

    Raises:
        ConfigError: the packages are missing.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        reason = f"<<param>> needs more packages ({error}); pip install 'sensorium[otlp]'"
        raise ConfigError(reason, param="otlp_traces_endpoint") from None
    resource = Resource.create({"service.name": "sensorium", "gen_ai.request.model": name})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


@contextmanager
def loading_span(provider: Any) -> Iterator[None]:
    """Export the time of the block as the span "sensorium.load"."""
    started = time.time_ns()
    yield
    if provider is not None:
        provider.get_tracer("sensorium").start_span("sensorium.load", start_time=started).end()


def set_trace_context(headers: Iterable[tuple[bytes, bytes]]) -> Any:
    """Let requests of the current task be children of the span that the headers name. Return the token that undoes it."""
    context = {name.decode(): value.decode("latin-1") for name, value in headers if name in _CONTEXT}
    return trace_context.set(context or None)
