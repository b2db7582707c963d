"""Requests that schemathesis makes from the OpenAPI document: the server neither fails nor contradicts the document."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "negative_data_rejection", "unsupported_method",
)  # fmt: skip
CONFIG = (
    "\n".join(["[checks]", "enabled = false", *(f"{name}.enabled = true" for name in CHECKS)])
    + """
[[operations]]
include-path = "/v1/documents"
checks.negative_data_rejection.enabled = false
"""
)
"""A number in the place of a text is no violation in a form, whose parts are all texts, but schemathesis counts it as one."""


@pytest.mark.parametrize(
    ("examples", "phases"), [(2, "fuzzing"), pytest.param(60, "examples,coverage,fuzzing", marks=pytest.mark.full)]
)
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_the_server_keeps_to_its_document(tiny, http, tmp_path, examples, phases):
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{tiny[0]}/openapi.json"]
    command += ["--max-examples", str(examples), "--seed", "1", "--generation-database", "none", "--no-color"]
    command += ["--phases", phases, "--request-timeout", "240"]
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    paths = http.get("/openapi.json").json()["paths"]
    assert f"Tested: {sum(map(len, paths.values()))}" in run.stdout


def test_the_document_has_forms_and_errors(http):
    paths = http.get("/openapi.json").json()["paths"]
    form = paths["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert {"file", "language", "timestamp_granularities"} <= form["properties"].keys()
    for path in paths.values():
        for operation in path.values():
            assert {"200", "4XX", "5XX"} <= operation["responses"].keys()
            assert "422" not in operation["responses"]
    assert "text/event-stream" in paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
