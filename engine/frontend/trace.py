"""Timings and counts of a finished request, for observers, and as OpenTelemetry spans."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...mm.errors import ConfigError, ErrorInfo, short_repr
from ..types import ItemTrace

STAGES = ("fetch", "plan", "decode", "process", "queue", "encode", "prefill", "decode_steps")


@dataclass(frozen=True)
class RequestTrace:
    """A finished request.

    Args:
        started: time of the call in nanoseconds since 1970.
        seconds: time from the call to the end.
        time_to_first_token: seconds from the call to the first token, or None if there is no token.
        inter_token_latencies: seconds between successive tokens, of all answers.
        finish_reasons: one per answer.
        timings, items, cached_tokens, preemptions, error: see RequestOutput.
    """

    request_id: str
    started: int
    seconds: float
    time_to_first_token: float | None
    inter_token_latencies: tuple[float, ...]
    finish_reasons: tuple[str, ...]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    timings: dict[str, float]
    items: tuple[ItemTrace, ...]
    error: ErrorInfo | None


Observer = Callable[[RequestTrace], None]


@dataclass(eq=False)
class RequestTimes:
    """Timestamps of a request, in seconds of `time.perf_counter`.

    Args:
        started: time of the call in nanoseconds since 1970.
        arrival: time of the call.
        admitted: when the core got the request.
        ended: when the last answer was finished.
        first_token: when the first token was sampled.
        last_token: when each sequence got its last token.
        inter_token_latencies: seconds between successive tokens.
    """

    started: int = field(default_factory=time.time_ns)
    arrival: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    ended: float | None = None
    first_token: float | None = None
    last_token: dict[str, float] = field(default_factory=dict)
    inter_token_latencies: list[float] = field(default_factory=list)

    def record_token(self, sequence: str, now: float, latencies: bool) -> None:
        """Record that a sequence got a token. `latencies`: also record the time since its last token."""
        if self.first_token is None:
            self.first_token = now
        if latencies:
            if sequence in self.last_token:
                self.inter_token_latencies.append(now - self.last_token[sequence])
            self.last_token[sequence] = now

    def queue_seconds(self, stages: dict[str, float]) -> float:
        """Return the time before the core got the request, without the seconds of these stages of input processing."""
        end = self.ended if self.admitted is None else self.admitted
        return max(0.0, (time.perf_counter() if end is None else end) - self.arrival - sum(stages.values()))


def span_observer(provider: Any) -> Observer:
    """Return an observer that exports each request as an OpenTelemetry span with one child span per stage.

    Args:
        provider: a TracerProvider, or True for the process's own.

    Raises:
        ConfigError: opentelemetry is not installed, or `provider` is something else.
    """
    try:
        from opentelemetry import trace as api
    except ImportError:
        reason = "tracing needs the package opentelemetry-api; install it, or leave tracing off"
        raise ConfigError(reason, param="tracing") from None
    if provider is True:
        provider = api.get_tracer_provider()
    if not isinstance(provider, api.TracerProvider):
        reason = f"tracing={short_repr(provider)} must be True, False or an opentelemetry TracerProvider"
        raise ConfigError(reason, param="tracing")
    tracer = provider.get_tracer("sensorium")

    def observe(trace: RequestTrace) -> None:
        span = tracer.start_span("sensorium.request", start_time=trace.started, attributes=_attributes(trace))
        if trace.error is not None:
            span.set_status(api.StatusCode.ERROR, trace.error.message)
        context, start = api.set_span_in_context(span), trace.started
        for stage in STAGES:
            if stage in trace.timings:
                end = start + int(trace.timings[stage] * 1e9)
                tracer.start_span(f"sensorium.{stage}", context=context, start_time=start).end(end)
                start = end
        span.end(trace.started + int(trace.seconds * 1e9))

    return observe


def _attributes(trace: RequestTrace) -> dict[str, Any]:
    """Return a span's attributes, named as in OpenTelemetry's conventions for generative models if these have a name."""
    attributes: dict[str, Any] = {
        "gen_ai.response.id": trace.request_id,
        "gen_ai.response.finish_reasons": list(trace.finish_reasons),
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "gen_ai.usage.output_tokens": trace.output_tokens,
        "sensorium.cached_tokens": trace.cached_tokens,
        "sensorium.preemptions": trace.preemptions,
    }
    if trace.time_to_first_token is not None:
        attributes["sensorium.seconds_to_first_token"] = trace.time_to_first_token
    if trace.error is not None:
        attributes["error.type"] = trace.error.code
    for i, item in enumerate(trace.items):
        own = {"bytes": item.source_bytes, "tokens": item.num_tokens, "cached": item.cached, "encoder": item.encoder}
        values = {"modality": item.modality, **own}
        attributes |= {f"sensorium.item.{i}.{name}": value for name, value in values.items()}
    return attributes
