"""/metrics: the label of the model, histograms of lengths, and vLLM's names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from http_server import TINY, listening, make_server
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from sensorium.engine.frontend.metrics import register
from sensorium.engine.stats import DraftStats, EngineStats
from sensorium.mm.cache import CacheStats
from sensorium.server.metrics_text import ALIASES, metrics_text
from waiting import LONG

httpx = pytest.importorskip("httpx")


@pytest.fixture(scope="module")
def metrics():
    """Metrics after two requests: {(name, labels without the model's): value}."""
    server = make_server(TINY, "tiny-vl", max_model_len=256, warm_up=False)
    with listening(server) as url, httpx.Client(base_url=url, timeout=LONG) as http:
        for count in 3, 7:
            body = {"prompt": "a b c", "max_tokens": count, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == count
        families = list(text_string_to_metric_families(http.get("/metrics").text))
    samples = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = dict(sample.labels)
        assert labels.pop("model_name") == "tiny-vl", sample
        samples[sample.name, *sorted(labels.items())] = sample.value
    server.engine.close()
    return samples


def test_histograms_of_lengths(metrics):
    for system in "sensorium", "vllm":
        name = f"{system}:" if system == "vllm" else f"{system}_"
        assert metrics[f"{name}request_generation_tokens_sum",] == 10
        assert metrics[f"{name}request_generation_tokens_bucket", ("le", "5.0")] == 1
        assert metrics[f"{name}request_generation_tokens_bucket", ("le", "10.0")] == 2
        assert metrics[f"{name}request_prompt_tokens_count",] == 2
        assert metrics[f"{name}request_prompt_tokens_sum",] == metrics[f"{name}prompt_tokens_total",] > 0


def test_the_names_of_vllm(metrics):
    assert metrics["vllm:generation_tokens_total",] == 10
    assert metrics["vllm:request_success_total", ("finished_reason", "length")] == 2
    for name in "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prefill_time_seconds":
        assert metrics[f"vllm:{name}_count",] == 2
    for name in "inter_token_latency_seconds", "time_per_output_token_seconds":
        assert metrics[f"vllm:{name}_count",] == 8  # between 3, and between 7 tokens
    for name in "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc":
        assert metrics[f"vllm:{name}",] >= 0
    names = {name for name, *_ in metrics}
    for ours, theirs in ALIASES.items():
        for name in ours, *theirs:
            assert names & {name, f"{name}_total", f"{name}_count"}, name


class Source:
    """What metrics are read from: the statistics of an engine's loop, or of a cache."""

    def __init__(self, stats: Any) -> None:
        self.transfers = ()
        self.stats, self.input_queue = stats, SimpleNamespace(num_waiting=0)


def test_drafted_tokens_have_the_names_of_vllm():
    drafts = (DraftStats("text", 3, (3, 2, 1), (3, 1, 0)), DraftStats("suffix", 2, (2, 2), (1, 0), switched_off=1))
    loop, media, registry = Source(EngineStats(drafts=drafts)), Source(CacheStats()), CollectorRegistry()
    register(registry, loop, media)
    samples = [
        one for family in text_string_to_metric_families(metrics_text([(registry, "m")]).decode()) for one in family.samples
    ]
    theirs = {
        (sample.name.removeprefix("vllm:spec_decode_"), sample.labels.get("position")): sample.value
        for sample in samples
        if sample.name.startswith("vllm:spec_decode_")
    }
    assert theirs == {
        ("num_drafts_total", None): 5,
        ("num_draft_tokens_total", None): 10,
        ("num_accepted_tokens_total", None): 5,
        ("num_accepted_tokens_per_pos_total", "0"): 4,
        ("num_accepted_tokens_per_pos_total", "1"): 1,
        ("num_accepted_tokens_per_pos_total", "2"): 0,
    }
    ours = {
        (sample.name.removeprefix("sensorium_draft_"), sample.labels["proposer"]): sample.value
        for sample in samples
        if sample.name.startswith("sensorium_draft_")
    }
    assert ours == {
        ("drafts_total", "text"): 3,
        ("drafts_total", "suffix"): 2,
        ("draft_tokens_total", "text"): 6,
        ("draft_tokens_total", "suffix"): 4,
        ("accepted_tokens_total", "text"): 4,
        ("accepted_tokens_total", "suffix"): 1,
        ("switched_off_total", "text"): 0,
        ("switched_off_total", "suffix"): 1,
    }


def test_a_model_name_is_escaped():
    from prometheus_client import Counter

    registry = CollectorRegistry()
    Counter("sensorium_x", "x", registry=registry)
    assert b'sensorium_x_total{model_name="a\\"b\\n"} 0.0' in metrics_text([(registry, 'a"b\n')])
