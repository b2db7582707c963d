"""Prometheus metrics of requests and of the engine. They need the package prometheus_client."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ...callers.errors import ConfigError
from ...mm.cache import CacheStats
from ..outputs import RequestOutput
from ..stats import DraftStats, EngineStats, TransferStats
from .engine_loop import EngineLoop
from .media import MultiModalProcessor
from .trace import Observer, RequestTimes

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
_LENGTHS = {
    "request_prompt_tokens": "tokens of a prompt",
    "request_generation_tokens": "tokens of an answer",
}
_HISTOGRAMS = {
    "request_seconds": "from the call to the last token",
    "time_to_first_token_seconds": "from the call to the first token",
    "inter_token_seconds": "between two tokens of an answer",
    "queue_seconds": "waiting in the input queue and the scheduler",
    "fetch_seconds": "reading and downloading media",
    "decode_seconds": "decoding media",
    "process_seconds": "preprocessing media",
    "encode_seconds": "in the encoder",
    "prefill_seconds": "computing the prompt",
    "decode_steps_seconds": "from the first token to the last",
}
_STATES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "requests_running": ("sequences that are computed", lambda stats: stats.running),
    "requests_waiting": ("sequences that wait in the scheduler", lambda stats: stats.waiting),
    "kv_usage_ratio": ("fraction of the KV cache's bytes in use", lambda stats: stats.kv_usage),
    "encoder_cache_bytes": ("bytes of encoder rows in the cache", lambda stats: stats.encoder_bytes),
    "prefix_cache_blocks": ("KV-cache blocks in the prefix cache that no sequence uses", lambda stats: stats.blocks_cached),
}
_COUNTS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "steps": ("steps computed", lambda stats: stats.steps),
    "preemptions": ("preempted sequences", lambda stats: stats.preemptions),
    "prefix_cache_queries": ("prompt tokens of scheduled sequences", lambda stats: stats.prefix_queries),
    "prefix_cache_hits": ("prompt tokens found in the prefix cache", lambda stats: stats.prefix_hits),
    "prefix_cache_evictions": ("evicted KV-cache blocks", lambda stats: stats.prefix_evictions),
    "encoder_cache_hits": ("items whose encoder rows were in the cache", lambda stats: stats.encoder_hits),
    "encoder_cache_misses": ("items that were encoded", lambda stats: stats.encoder_calls),
    "encoder_cache_disk_hits": ("items whose encoder rows were read from disk", lambda stats: stats.encoder_disk_hits),
    "encoder_cache_evictions": ("items evicted from the encoder cache", lambda stats: stats.encoder_evictions),
}

_TRANSFERS: dict[str, tuple[str, Callable[[TransferStats], int]]] = {
    "hits": ("tensors that were found in the connector", lambda stats: stats.hits),
    "misses": ("tensors that were not found in the connector", lambda stats: stats.misses),
    "damaged": ("tensors whose bytes were wrong, which were computed instead", lambda stats: stats.damaged),
    "failures": ("times that the connector could not be reached or did not answer in time", lambda stats: stats.failed),
    "late": ("prompts that stopped waiting for the connector", lambda stats: stats.late),
    "writes": ("tensors written", lambda stats: stats.writes),
    "skipped": ("tensors not written, for lack of room", lambda stats: stats.skipped),
    "read_bytes": ("bytes read", lambda stats: stats.read_bytes),
    "written_bytes": ("bytes written", lambda stats: stats.written_bytes),
    "fallbacks": ("items encoded here because no other engine's encoder gave their rows", lambda stats: stats.fallbacks),
}


def register(registry: Any, engine_loop: EngineLoop, media: MultiModalProcessor) -> Observer:
    """Register metrics named "sensorium_..." and return the observer that updates the request metrics.

    Args:
        registry: a CollectorRegistry, or True for the process's own. It does not keep the engine alive.

    Raises:
        ConfigError: prometheus_client is not installed, `registry` is something else, or it has another engine's metrics.
    """
    try:
        import prometheus_client as prometheus
    except ImportError:
        raise ConfigError("metrics need the package prometheus_client; install it, or leave metrics off") from None
    target = prometheus.REGISTRY if registry is True else registry
    if not isinstance(target, prometheus.CollectorRegistry):
        raise ConfigError(f"metrics={registry!r} must be True, False or a prometheus_client.CollectorRegistry")
    try:
        return _observer(prometheus, target, _Collector(weakref.ref(engine_loop), weakref.ref(media)))
    except ValueError:
        raise ConfigError("the registry has the metrics of another engine; give each engine a CollectorRegistry") from None


def _observer(prometheus: Any, registry: Any, collector: _Collector) -> Observer:
    registry.register(collector)
    requests = prometheus.Counter("sensorium_requests", "answers, by finish reason", ["finish_reason"], registry=registry)
    prompt_tokens = prometheus.Counter("sensorium_prompt_tokens", "tokens of prompts", registry=registry)
    generated_tokens = prometheus.Counter("sensorium_generated_tokens", "tokens of answers", registry=registry)
    items = prometheus.Counter(
        "sensorium_items",
        "items, by how their encoder rows were obtained",
        ["modality", "encoder"],
        registry=registry,
    )
    seconds = {
        name: prometheus.Histogram(f"sensorium_{name}", text, buckets=_SECONDS, registry=registry)
        for name, text in _HISTOGRAMS.items()
    }

    prompt_length, answer_length = (
        prometheus.Histogram(f"sensorium_{name}", text, buckets=_TOKENS, registry=registry) for name, text in _LENGTHS.items()
    )

    def observe(output: RequestOutput, times: RequestTimes) -> None:
        prompt_tokens.inc(len(output.prompt_token_ids))
        prompt_length.observe(len(output.prompt_token_ids))
        for answer in output.outputs:
            requests.labels(answer.finish_reason or "").inc()
            generated_tokens.inc(len(answer.token_ids))
            answer_length.observe(len(answer.token_ids))
        for item in output.trace:
            items.labels(item.modality, item.encoder or "none").inc()
        seconds["request_seconds"].observe(times.seconds)
        if times.time_to_first_token is not None:
            seconds["time_to_first_token_seconds"].observe(times.time_to_first_token)
        for latency in times.inter_token_latencies:
            seconds["inter_token_seconds"].observe(latency)
        for stage, spent in output.timings.items():
            if f"{stage}_seconds" in seconds:
                seconds[f"{stage}_seconds"].observe(spent)

    return observe


class _Collector:
    """Reads the engine's statistics when the registry collects metrics."""

    def __init__(self, engine_loop: weakref.ref[EngineLoop], media: weakref.ref[MultiModalProcessor]) -> None:
        self._engine_loop, self._media = engine_loop, media

    def describe(self) -> list[Any]:
        """Return all metrics without values, for the registry's check of names."""
        return list(self._families(EngineStats(), CacheStats(), 0))

    def collect(self) -> Iterator[Any]:
        engine_loop, media = self._engine_loop(), self._media()
        if engine_loop is not None and media is not None:
            stats = replace(engine_loop.stats, transfers=(*engine_loop.stats.transfers, *media.transfers))
            yield from self._families(stats, media.stats, engine_loop.input_queue.num_waiting)

    def _families(self, stats: EngineStats, processed: CacheStats, preparing: int) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        states = {name: (text, read(stats)) for name, (text, read) in _STATES.items()}
        states["requests_preparing"] = ("prompts in the input queue", preparing)
        states["processor_cache_bytes"] = ("bytes of processed items in the cache", processed.bytes)
        counts = {name: (text, read(stats)) for name, (text, read) in _COUNTS.items()}
        counts["processor_cache_queries"] = ("processed items looked up in the cache", processed.hits + processed.misses)
        counts["processor_cache_hits"] = ("processed items found in the cache", processed.hits)
        counts["processor_cache_misses"] = ("processed items not found in the cache", processed.misses)
        counts["processor_cache_evictions"] = ("processed items evicted from the cache", processed.evictions)
        yield from _draft_families(stats)
        yield from _transfer_families(stats)
        for name, (text, value) in states.items():
            yield GaugeMetricFamily(f"sensorium_{name}", text, value=value)
        for name, (text, value) in counts.items():
            yield CounterMetricFamily(f"sensorium_{name}", text, value=value)


def _draft_families(stats: EngineStats) -> Iterator[Any]:
    """Yield the counters of drafted tokens: ours by proposer, and vLLM's under its names."""
    from prometheus_client.core import CounterMetricFamily

    of_all: dict[str, tuple[str, Callable[[DraftStats], int]]] = {
        "num_drafts": ("drafts that were verified", lambda proposer: proposer.num_drafts),
        "num_draft_tokens": ("drafted tokens that were verified", lambda proposer: proposer.num_drafted),
        "num_accepted_tokens": ("drafted tokens that were accepted; each saves a step", lambda proposer: proposer.num_accepted),
    }
    for name, (text, read) in of_all.items():
        ours = CounterMetricFamily(f"sensorium_draft_{name.removeprefix('num_')}", text, labels=["proposer"])
        for proposer in stats.drafts:
            ours.add_metric([proposer.proposer], read(proposer))
        yield ours
        yield CounterMetricFamily(f"vllm:spec_decode_{name}", text, value=sum(map(read, stats.drafts)))
    text = "drafted tokens that were accepted, by position in their draft"
    positions = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens_per_pos", text, labels=["position"])
    for position in range(max((len(proposer.accepted) for proposer in stats.drafts), default=0)):
        count = sum(proposer.accepted[position] for proposer in stats.drafts if position < len(proposer.accepted))
        positions.add_metric([str(position)], count)
    yield positions
    off = CounterMetricFamily("sensorium_draft_switched_off", "proposers switched off for a sequence", labels=["proposer"])
    for proposer in stats.drafts:
        off.add_metric([proposer.proposer], proposer.switched_off)
    yield off


def _transfer_families(stats: EngineStats) -> Iterator[Any]:
    """Yield the counters of connectors, by the kind of their tensors."""
    from prometheus_client.core import CounterMetricFamily

    for name, (text, read) in _TRANSFERS.items():
        family = CounterMetricFamily(f"sensorium_connector_{name}", text, labels=["kind", "connector"])
        for connector in stats.transfers:
            family.add_metric([connector.kind, connector.connector], read(connector))
        yield family
