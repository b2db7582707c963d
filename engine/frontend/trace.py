"""Timestamps of a request, and finished requests as OpenTelemetry spans."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ...callers.errors import ConfigError, short_repr
from ..outputs import RequestOutput

STAGES = ("fetch", "plan", "decode", "process", "queue", "encode", "prefill", "decode_steps")


trace_context: ContextVar[Mapping[str, str] | None] = ContextVar("trace_context", default=None)
"""The headers `traceparent` and `tracestate` (W3C) of the caller's trace, whose span is the parent of the request's span."""


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
        context: of the caller's trace, see `trace_context`.
    """

    started: int = field(default_factory=time.time_ns)
    arrival: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    ended: float | None = None
    first_token: float | None = None
    last_token: dict[str, float] = field(default_factory=dict)
    inter_token_latencies: list[float] = field(default_factory=list)
    context: Mapping[str, str] | None = field(default_factory=trace_context.get)

    def record_token(self, sequence: str, now: float, latencies: bool) -> None:
        """Record that a sequence got a token. `latencies`: also record the time since its last token."""
        if self.first_token is None:
            self.first_token = now
        if latencies:
            if sequence in self.last_token:
                self.inter_token_latencies.append(now - self.last_token[sequence])
            self.last_token[sequence] = now

    def queue_seconds(self, stages: dict[str, float]) -> float:
        """Return the time until the core got the request, minus the seconds of these input-processing stages."""
        end = self.ended if self.admitted is None else self.admitted
        return max(0.0, (time.perf_counter() if end is None else end) - self.arrival - sum(stages.values()))

    @property
    def seconds(self) -> float:
        """Time from the call to the end."""
        return (self.ended or time.perf_counter()) - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the call to the first token, or None if there is no token."""
        return None if self.first_token is None else self.first_token - self.arrival


Observer = Callable[[RequestOutput, RequestTimes], None]
"""Called with the summary of each finished request, see `OutputBuilder.summary`, and its times."""


on_request_end: ContextVar[Callable[[RequestOutput], object] | None] = ContextVar("on_request_end", default=None)
"""Called with the summary of each request that a task with this context has awaited, at its end or when it is given up."""


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
        reason = f"<<param=>>{short_repr(provider)} must be True, False or an opentelemetry TracerProvider"
        raise ConfigError(reason, param="tracing")
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    tracer, propagator = provider.get_tracer("sensorium"), TraceContextTextMapPropagator()

    def observe(output: RequestOutput, times: RequestTimes) -> None:
        parent = None if times.context is None else propagator.extract(times.context)
        attributes = _attributes(output, times)
        span = tracer.start_span("sensorium.request", parent, start_time=times.started, attributes=attributes)
        if output.error is not None:
            span.set_status(api.StatusCode.ERROR, output.error.message)
        context, start = api.set_span_in_context(span), times.started
        for stage in STAGES:
            if stage in output.timings:
                end = start + int(output.timings[stage] * 1e9)
                tracer.start_span(f"sensorium.{stage}", context=context, start_time=start).end(end)
                start = end
        span.end(times.started + int(times.seconds * 1e9))

    return observe


def _attributes(output: RequestOutput, times: RequestTimes) -> dict[str, Any]:
    """Return a span's attributes. Names follow OpenTelemetry's conventions for generative models where they have one."""
    attributes: dict[str, Any] = {
        "gen_ai.response.id": output.request_id,
        "gen_ai.response.finish_reasons": [answer.finish_reason or "" for answer in output.outputs],
        "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.output_tokens": sum(len(answer.token_ids) for answer in output.outputs),
        "sensorium.cached_tokens": output.num_cached_tokens,
        "sensorium.preemptions": output.num_preemptions,
    }
    for drafts in output.drafts:
        attributes[f"sensorium.drafts.{drafts.proposer}.drafted"] = drafts.num_drafted
        attributes[f"sensorium.drafts.{drafts.proposer}.accepted"] = drafts.num_accepted
    if times.time_to_first_token is not None:
        attributes["sensorium.seconds_to_first_token"] = times.time_to_first_token
    if output.error is not None:
        attributes["error.type"] = output.error.code
    for i, item in enumerate(output.trace):
        counts = {"bytes": item.source_bytes, "tokens": item.num_tokens, "cached": item.cached, "encoder": item.encoder}
        values = {"modality": item.modality, **counts}
        attributes |= {f"sensorium.item.{i}.{name}": value for name, value in values.items()}
    return attributes
