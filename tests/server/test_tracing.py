"""Spans of requests belong to their clients' traces, and go to a collector."""

from __future__ import annotations

import importlib.util
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from http_server import TINY, serving
from sensorium.callers.errors import ConfigError
from sensorium.server.config import ServerConfig
from sensorium.server.tracing import loading_span, make_provider

sdk = pytest.importorskip("opentelemetry.sdk.trace")
BODY = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
EXPORTER = importlib.util.find_spec("opentelemetry.exporter") is not None


def test_a_request_belongs_to_its_client_s_trace() -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with serving(TINY, "tiny-vl", max_model_len=256, tracing=provider) as (url, _), httpx.Client(base_url=url) as client:
        for headers in ({"traceparent": f"00-{trace}-{span}-01"}, {}, {"traceparent": "wrong"}):
            assert client.post("/v1/chat/completions", json=BODY, headers=headers, timeout=240).status_code == 200
    requests = [one for one in exporter.get_finished_spans() if one.name == "sensorium.request"]
    assert [one.parent is not None for one in requests] == [True, False, False]
    assert format(requests[0].context.trace_id, "032x") == trace
    assert format(requests[0].parent.span_id, "016x") == span


@pytest.mark.skipif(EXPORTER, reason="the exporter is installed")
def test_a_missing_exporter_is_named() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'sensorium\[otlp\]'") as caught:
        make_provider("http://localhost:4318/v1/traces", "tiny-vl")
    assert caught.value.info.param == "otlp_traces_endpoint"
    with pytest.raises(ConfigError) as caught:
        ServerConfig(otlp_traces_endpoint="")
    assert caught.value.info.param == "otlp_traces_endpoint"


@pytest.mark.skipif(not EXPORTER, reason="needs opentelemetry-exporter-otlp-proto-http")
def test_spans_reach_a_collector() -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            provider = make_provider(f"http://127.0.0.1:{server.server_port}/v1/traces", "tiny-vl")
            with loading_span(provider):
                pass
            provider.shutdown()
        finally:
            server.shutdown()
            thread.join()
    (path, body) = received[0]
    assert path == "/v1/traces"
    assert b"sensorium.load" in body
    assert b"tiny-vl" in body
