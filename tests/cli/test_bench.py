"""`sensorium bench` on the shipped model: counts and fields of its results, never times."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

import pytest
from http_server import TINY, listening, make_server
from sensorium.cli import main as cli
from sensorium.cli.bench import report, serve, workload
from sensorium.cli.bench.client import Client, Reply

WORK = ["--random-input-len", "6", "--random-output-len", "3", "--seed", "5"]
IMAGES = ["--dataset-name", "random-mm", "--random-mm-bucket-config", "{(32, 48, 1): 1}"]
LATENCIES = {
    f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p99") for name in ("ttft", "tpot", "itl", "e2el")
}


@pytest.fixture(scope="module")
def url():
    server = make_server(TINY, "tiny-vl", max_model_len=256, max_num_seqs=4, warm_up=False)
    with server.llm.llm, listening(server) as url:
        yield url


@pytest.fixture
def bench(tmp_path, capsys):
    """Run a mode, and return the exit code and the JSON files that it wrote."""

    def run(mode, *words, name="result.json"):
        report = ["--save-result", "--result-dir", str(tmp_path / "out"), "--result-filename", name]
        code = cli.main(["bench", mode, *words, *report, "--metric-percentiles", "50,99"])
        return code, [json.loads(path.read_text()) for path in sorted((tmp_path / "out").glob("*.json"))]

    return run


def samples(*words, seed=5):
    parser = argparse.ArgumentParser()
    workload.add_workload_arguments(parser)
    args = parser.parse_args([*WORK, *words])
    return workload.make_samples(args, lambda text: list(text.encode()), seed, args.num_prompts)


def test_prompts_are_random_and_reproducible():
    first, again, other = samples("--num-prompts", "4"), samples("--num-prompts", "4"), samples("--num-prompts", "4", seed=6)
    assert first == again
    assert len({tuple(one.token_ids) for one in first + other}) == 8
    assert {(len(one.token_ids), one.output_len) for one in first} == {(6, 3)}
    varied = samples("--num-prompts", "40", "--random-range-ratio", "0.5", "--random-prefix-len", "4")
    assert {len(one.token_ids) for one in varied} == set(range(7, 14))
    assert len({tuple(one.token_ids[:4]) for one in varied}) == 1
    (pair,) = samples(*IMAGES, "--num-prompts", "1", "--random-mm-base-items-per-request", "2")
    assert [image[:4] for image in pair.images] == [b"\x89PNG"] * 2


def test_a_sweep_over_rates(bench, url, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot = tmp_path / "rates.png"
    words = ["--base-url", url, *WORK, *IMAGES, "--num-prompts", "3", "--request-rate", "1000", "inf", "--ignore-eos"]
    code, results = bench("serve", *words, "--max-concurrency", "2", "--num-warmups", "1", "--plot", str(plot))
    assert code == 0
    assert [one["request_rate"] for one in results] == [1000, None]
    for one in results:
        counts = ("num_prompts", "completed", "failed", "total_output_tokens", "max_concurrency", "model_id", "backend")
        assert tuple(one[name] for name in counts) == (3, 3, 0, 9, 2, "tiny-vl", "openai-chat")
        assert one.keys() >= LATENCIES
        assert one["encoder_cache_misses"] + one["encoder_cache_hits"] == 3
        assert 0 <= one["prefix_cache_hits"] <= one["prefix_cache_queries"] == one["total_input_tokens"]
        assert one["encoder_seconds"] >= 0
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_completions(bench, url):
    code, (result,) = bench("serve", "--base-url", url, *WORK, "--num-prompts", "2", "--ignore-eos", "--temperature", "0")
    assert code == 0
    assert (result["backend"], result["total_input_tokens"], result["total_output_tokens"]) == ("openai", 12, 6)


def test_failed_requests_are_counted(bench, url, capsys):
    code, (result,) = bench("serve", "--base-url", url, *WORK, "--num-prompts", "2", "--temperature", "-1")
    assert (code, result["completed"], result["failed"], result["mean_ttft_ms"]) == (2, 0, 2, None)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("sensorium: error: http://") and "temperature" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--base-url", "http://127.0.0.1:9"], "cannot be reached"),
        (["--base-url", "127.0.0.1:9"], "is not an address"),
        (["--backend", "openai", "--dataset-name", "random-mm"], "--backend openai-chat"),
        (["--request-rate", "0"], "above 0"),
        (["--random-range-ratio", "1"], "below 1"),
        (["--random-mm-bucket-config", "{(8, 8, 2): 1}"], "mapping of images"),
        (["--metric-percentiles", "101"], "from 0 to 100"),
    ],
)
def test_wrong_arguments(words, said, capsys):
    try:
        code = cli.main(["bench", "serve", *words])
    except SystemExit as stop:
        code = stop.code
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


def test_plots_need_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "serve", "--plot", "x.png"]) == 2
    assert "pip install 'sensorium[bench]'" in capsys.readouterr().err


def test_latencies_are_those_of_the_tokens(monkeypatch):
    now = iter([0.5, 0.8, 0.9])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    reply = Reply(started=0.0)
    reply.add({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    reply.started = 0.0
    for text in "ab":
        reply.add({"choices": [{"delta": {"content": text}}]})
    details = {"cached_tokens": 1}
    drafts = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": details, "completion_tokens_details": drafts}
    reply.add({"choices": [], "usage": usage})
    assert (reply.text, reply.prompt_tokens, reply.output_tokens, reply.cached_tokens) == ("ab", 4, 2, 1)
    monkeypatch.undo()
    result = serve.summary([reply, Reply(error="x")], 2.0, [99.0])
    assert (result["completed"], result["failed"], result["output_throughput"]) == (1, 1, 1.0)
    assert (result["drafted_tokens"], result["accepted_draft_tokens"]) == (5, 3)


@pytest.mark.parametrize("end", ["data: [DONE]", ""])
def test_a_stream_that_is_cut_is_an_error(monkeypatch, end):
    async def lines(*_):
        yield 'data: {"choices": [{"text": "a"}]}'
        yield end

    client = Client("http://127.0.0.1")
    monkeypatch.setattr(client, "lines", lines)
    error = asyncio.run(client.stream("/v1/completions", {})).error
    assert (error is None) == bool(end)


def test_results_of_several_rates_stay_in_their_folder(tmp_path):
    args = argparse.Namespace(save_result=True, result_dir=tmp_path, result_filename="sub/x.json")
    report.save(args, {}, "serve", 1)
    assert (tmp_path / "sub" / "x-1.json").exists()


def test_an_address_of_ipv6(monkeypatch, capsys):
    urls = []

    async def sweep(client, args):
        urls.append(client.url)
        raise OSError

    monkeypatch.setattr(serve, "sweep", sweep)
    cli.main(["bench", "serve", "--host", "::1", "--port", "9"])
    assert urls == ["http://[::1]:9"]


@pytest.mark.parametrize("words", [[], IMAGES])
def test_offline(bench, words):
    options = ["--model", str(TINY), "--max-model-len", "256", "--warm-up", "false"]
    code, (result,) = bench("offline", *options, *WORK, *words, "--num-prompts", "3")
    assert (code, result["num_requests"], result["failed"]) == (0, 3, 0)
    assert result["encoder_cache_misses"] == (3 if words else 0)
    assert result["total_num_tokens"] >= 27
    for kind, name in ("drafted", "drafted_tokens"), ("accepted", "accepted_draft_tokens"):
        assert result[name] == sum(map(sum, result[f"{kind}_by_position"].values()))
    assert result["p99_ttft_ms"] is not None


@pytest.mark.full
def test_startup(bench, capsys):
    code, (result,) = bench("startup", "--model", str(TINY), "--num-iters", "1", "--max-model-len", "256")
    assert code == 0
    assert 0 < result["median_import_seconds"] < result["median_ready_seconds"] < result["median_first_token_seconds"]
    assert result["max_peak_mb"] > 0
    assert cli.main(["bench", "startup", "--model", str(Path("nowhere")), "--num-iters", "1"]) == 2
    assert "nowhere" in capsys.readouterr().err
