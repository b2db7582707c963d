"""Tests of the replacement of LLM's argument names by command-line options in messages."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest
from sensorium.cli.output import to_json, with_option_names
from sensorium.mm.errors import ErrorInfo
from sensorium.pipelines.transcribe import WindowResult

ARGS = Namespace(command="chat", dtype="auto", device="auto", max_model_len=None, max_tokens=8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dtype 'x' is not supported; pass dtype= one of a, b", "dtype 'x' is not supported; pass --dtype one of a, b"),
        ("max_model_len=9 is above max_position_embeddings=8", "--max-model-len 9 is above max_position_embeddings=8"),
        ("min_tokens=4 is above max_tokens=2; lower it", "min_tokens=4 is above --max-tokens 2; lower it"),
        ("shorten it or raise max_model_len", "shorten it or raise --max-model-len"),
        ("/a/dtype=5/max_tokens.png: no such file", "/a/dtype=5/max_tokens.png: no such file"),
        ("raise kv_cache_memory_bytes to 5", "raise kv_cache_memory_bytes to 5"),
        ("raise max_tokens; the known ones are max_tokens, seed", "raise --max-tokens; the known ones are max_tokens, seed"),
    ],
)
def test_with_option_names(text: str, expected: str) -> None:
    assert with_option_names(text, ARGS) == expected


def test_errors_as_json_have_option_names_too() -> None:
    error = ErrorInfo("invalid_input", "the checkpoint has no chat template; pass chat_template= or give a rendered prompt")
    window = WindowResult(0.0, 1.0, "", (), 0, skip_error=error)
    found = json.loads(to_json({"error": error, "window": window, "doubt": f"it may skip speech: {error}"}, ARGS))
    assert found["doubt"].endswith("no chat template; give --chat-template")
    for one in found["error"], found["window"]["skip_error"]:
        assert one["message"].endswith("no chat template; give --chat-template")
