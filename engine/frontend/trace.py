"""What became of one request, in numbers, for whoever observes: and as OpenTelemetry spans. Knows no engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..mm.errors import ConfigError
from .types import ItemTrace

STAGES = ("fetch", "plan", "decode", "process", "queue", "encode", "prefill", "decode_steps")


@dataclass(frozen=True)
class RequestTrace:
    """One finished request.

    Args:
        started: when it was asked, nanoseconds since 1970.
        seconds: until it was finished. first_token: until the first token, None without any.
        gaps: seconds between the tokens of a sequence, of all its answers.
        finish_reasons: one per answer.
        timings, items, cached_tokens, preemptions: see RequestOutput.
    """

    request_id: str
    started: int
    seconds: float
    first_token: float | None
    gaps: tuple[float, ...]
    finish_reasons: tuple[str, ...]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    timings: dict[str, float]
    items: tuple[ItemTrace, ...]
    error: str | None


Observer = Callable[[RequestTrace], None]


@dataclass(eq=False)
class Clock:
    """The marks of one request, in seconds of `time.perf_counter`."""

    started: int = field(default_factory=time.time_ns)
    arrival: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first: float | None = None
    last: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)

    def heard(self, sequence: str, now: float, gaps: bool) -> None:
        """A sequence made a token; `gaps`: keep the time since its last."""
        if self.first is None:
            self.first = now
        if gaps:
            if sequence in self.last:
                self.gaps.append(now - self.last[sequence])
            self.last[sequence] = now

    def waited(self, prepared: dict[str, float]) -> float:
        """Seconds in line before the engine had it, being prepared not counted."""
        admitted = time.perf_counter() if self.admitted is None else self.admitted
        return max(0.0, admitted - self.arrival - sum(prepared.values()))


def span_observer(provider: Any) -> Observer:
    """Each request as an OpenTelemetry span with a child per stage, one after the other.

    Args:
        provider: a TracerProvider, or True for the process's own.

    Raises:
        ConfigError: opentelemetry is not installed, or no provider.
    """
    try:
        from opentelemetry import trace as api
    except ImportError:
        raise ConfigError("tracing needs the package opentelemetry-api; install it, or leave tracing off") from None
    made = api.get_tracer_provider() if provider is True else provider
    if not isinstance(made, api.TracerProvider):
        raise ConfigError(f"tracing={provider!r} must be True, False or an opentelemetry TracerProvider")
    tracer = made.get_tracer("sensorium")

    def observe(trace: RequestTrace) -> None:
        span = tracer.start_span("sensorium.request", start_time=trace.started, attributes=_attributes(trace))
        if trace.error is not None:
            span.set_status(api.StatusCode.ERROR, trace.error)
        inside, start = api.set_span_in_context(span), trace.started
        for stage in STAGES:
            if stage in trace.timings:
                end = start + int(trace.timings[stage] * 1e9)
                tracer.start_span(f"sensorium.{stage}", context=inside, start_time=start).end(end)
                start = end
        span.end(trace.started + int(trace.seconds * 1e9))

    return observe


def _attributes(trace: RequestTrace) -> dict[str, Any]:
    """Names of OpenTelemetry's conventions for generative models where there are some."""
    found: dict[str, Any] = {
        "gen_ai.response.id": trace.request_id,
        "gen_ai.response.finish_reasons": list(trace.finish_reasons),
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "gen_ai.usage.output_tokens": trace.output_tokens,
        "sensorium.cached_tokens": trace.cached_tokens,
        "sensorium.preemptions": trace.preemptions,
    }
    if trace.first_token is not None:
        found["sensorium.seconds_to_first_token"] = trace.first_token
    for place, item in enumerate(trace.items):
        own = {"bytes": item.source_bytes, "tokens": item.num_tokens, "cached": item.cached, "encoder": item.encoder}
        found |= {f"sensorium.item.{place}.{name}": value for name, value in {"modality": item.modality, **own}.items()}
    return found
