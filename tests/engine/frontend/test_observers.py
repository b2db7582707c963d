"""Outputs, Prometheus metrics and OpenTelemetry spans report the same numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.engine.frontend import trace
from sensorium.engine.stats import DraftStats

prometheus = pytest.importorskip("prometheus_client")
export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

MODEL = Path(__file__).parents[3] / "assets" / "tiny-vl"
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def seen():
    """Return outputs of three prompts, metrics by name and labels, spans, and statistics."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    registry, spans, provider = prometheus.CollectorRegistry(), export.InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    picture = {"prompt": PLACEHOLDER + "Read. " * 12, "multi_modal_data": {"image": Image.new("RGB", (64, 32), (1, 2, 3))}}
    with LLM(MODEL, max_model_len=256, metrics=registry, tracing=provider) as llm:
        outputs = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in (picture, picture, {"prompt": PLACEHOLDER})]
        with pytest.raises(ConfigError, match="another engine"):
            LLM(MODEL, max_model_len=256, metrics=registry)
        text = prometheus.generate_latest(registry).decode()
        stats = llm.stats
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return outputs, {name: float(value) for name, value in samples.items()}, spans.get_finished_spans(), stats


def test_metrics_count_what_happened(seen):
    outputs, samples, _, stats = seen
    assert samples['sensorium_requests_total{finish_reason="length"}'] == 2
    assert samples['sensorium_requests_total{finish_reason="error"}'] == 1
    assert samples["sensorium_generated_tokens_total"] == 12
    assert samples["sensorium_prompt_tokens_total"] == sum(len(output.prompt_token_ids) for output in outputs)
    assert samples['sensorium_items_total{encoder="encoded",modality="image"}'] == 1
    assert samples["sensorium_time_to_first_token_seconds_count"] == 2
    assert samples["sensorium_inter_token_seconds_count"] == 10
    assert samples["sensorium_request_seconds_count"] == 3
    assert samples["sensorium_processor_cache_hits_total"] == 1
    assert samples["sensorium_encoder_cache_misses_total"] == stats.encoder_calls == 1
    assert samples["sensorium_prefix_cache_hits_total"] == stats.prefix_hits == outputs[1].num_cached_tokens > 0
    assert samples["sensorium_preemptions_total"] == 0
    assert samples["sensorium_requests_running"] == samples["sensorium_kv_usage_ratio"] == 0
    total = sum(output.timings["queue"] for output in outputs)
    assert samples["sensorium_queue_seconds_sum"] == pytest.approx(total)


def test_every_request_is_a_span_with_its_stages(seen):
    outputs, _, spans, _ = seen
    requests = [span for span in spans if span.name == "sensorium.request"]
    assert [span.attributes["gen_ai.response.id"] for span in requests] == [output.request_id for output in outputs]
    for output, parent in zip(outputs, requests, strict=True):
        children = [span for span in spans if span.parent is not None and span.parent.span_id == parent.context.span_id]
        assert {span.name.removeprefix("sensorium.") for span in children} == set(output.timings)
        for span in children:
            spent = output.timings[span.name.removeprefix("sensorium.")]
            assert (span.end_time - span.start_time) / 1e9 == pytest.approx(spent, abs=1e-6)
        assert parent.status.is_ok == (output.error is None)
    assert requests[0].attributes["sensorium.item.0.encoder"] == "encoded"
    assert requests[1].attributes["sensorium.item.0.cached"] is True
    assert requests[2].status.description == outputs[2].error.message


def test_a_span_counts_drafted_tokens(seen):
    output = replace(seen[0][0], drafts=(DraftStats("text", 2, (2, 1), (1, 1)), DraftStats("mine", 1, (4,), (0,))))
    found = trace._attributes(output, trace.RequestTimes())
    assert {name: value for name, value in found.items() if "drafts" in name} == {
        "sensorium.drafts.text.drafted": 3,
        "sensorium.drafts.text.accepted": 2,
        "sensorium.drafts.mine.drafted": 4,
        "sensorium.drafts.mine.accepted": 0,
    }


def test_a_failing_observer_ends_no_request(caplog):
    def broken(output, times):
        raise RuntimeError("no more room")

    with LLM(MODEL, max_model_len=256) as llm:
        llm.engine.loop.observers.append(broken)
        assert llm.generate("user 1", GREEDY, use_tqdm=False)[0].error is None
    assert "an observer of requests failed" in caplog.text


@pytest.mark.parametrize("wrong", ["yes", 5, [1]])
@pytest.mark.parametrize("option", ["metrics", "tracing"])
def test_invalid_registries_and_providers_are_refused(option, wrong):
    with pytest.raises(ConfigError, match=f"{option}=.* must be True, False or a"):
        LLM(MODEL, max_model_len=256, **{option: wrong})
