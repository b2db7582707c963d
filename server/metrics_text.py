"""The text of /metrics: every metric with the label `model_name`, and vLLM's names as aliases, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ALIASES: Mapping[str, tuple[str, ...]] = {
    "sensorium_requests_running": ("vllm:num_requests_running",),
    "sensorium_requests_waiting": ("vllm:num_requests_waiting",),
    "sensorium_kv_usage_ratio": ("vllm:kv_cache_usage_perc",),
    "sensorium_prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "sensorium_prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "sensorium_processor_cache_queries": ("vllm:mm_cache_queries",),
    "sensorium_processor_cache_hits": ("vllm:mm_cache_hits",),
    "sensorium_preemptions": ("vllm:num_preemptions",),
    "sensorium_prompt_tokens": ("vllm:prompt_tokens",),
    "sensorium_generated_tokens": ("vllm:generation_tokens",),
    "sensorium_requests": ("vllm:request_success",),
    "sensorium_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "sensorium_request_generation_tokens": ("vllm:request_generation_tokens",),
    "sensorium_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "sensorium_inter_token_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "sensorium_request_seconds": ("vllm:e2e_request_latency_seconds",),
    "sensorium_queue_seconds": ("vllm:request_queue_time_seconds",),
    "sensorium_prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "sensorium_decode_steps_seconds": ("vllm:request_decode_time_seconds",),
}
"""Our metric -> vLLM's names for the same value. Source: vLLM's documentation of its production metrics."""
_LABELS = {"finish_reason": "finished_reason"}
"""Our label -> vLLM's."""


def metrics_text(registries: Sequence[tuple[Any, str]]) -> bytes:
    """Return the metrics of CollectorRegistries in Prometheus' text format.

    Args:
        registries: each with the label `model_name` of its metrics that have none.
    """
    from prometheus_client import generate_latest

    return generate_latest(_Labelled(registries))


class _Labelled:
    """Collects the metrics of registries with the label `model_name`, those of one name together, followed by their aliases."""

    def __init__(self, registries: Sequence[tuple[Any, str]]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Any]:
        families: dict[str, Any] = {}
        for registry, model_name in self._registries:
            for metric in registry.collect():
                for name in (metric.name, *ALIASES.get(metric.name, ())):
                    copy = _copy(metric, name, model_name)
                    families.setdefault(name, copy)
                    if families[name] is not copy:
                        families[name].samples += copy.samples
        yield from families.values()


def _copy(metric: Any, name: str, model_name: str) -> Any:
    """Return a metric with another name, an alias with the labels of vLLM."""
    from prometheus_client.core import Metric

    renamed = {} if name == metric.name else _LABELS
    copy = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        labels = {renamed.get(label, label): value for label, value in sample.labels.items()}
        whole_name = name + sample.name.removeprefix(metric.name)  # with _total, _bucket and others
        copy.samples.append(sample._replace(name=whole_name, labels={"model_name": model_name, **labels}))
    return copy
