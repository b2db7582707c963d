"""`sensorium bench serve`: send requests to a server at one or several rates."""

from __future__ import annotations

import argparse
import asyncio
import base64
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from ...callers.errors import ConfigError
from ..common import new_file, positive_int
from .client import Client, Reply
from .report import Result, add_report_arguments, check_plot, latencies, plot, print_table, save
from .workload import Sample, add_workload_arguments, count, make_samples

EXAMPLE = "sensorium bench serve --num-prompts 100 --random-input-len 256 --request-rate 1 2 4 --max-concurrency 64"
PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Default endpoint by backend, with vLLM's names of backends."""
_MAX_ERRORS = 10  # printed
_ENGINE = {
    "encode_seconds_sum": "encoder_seconds",
    "encoder_cache_hits_total": "encoder_cache_hits",
    "encoder_cache_misses_total": "encoder_cache_misses",
    "prefix_cache_queries_total": "prefix_cache_queries",
    "prefix_cache_hits_total": "prefix_cache_hits",
}
"""Metrics of the server whose increase is reported."""


def rate(text: str) -> float:
    """Parse an argument that is a number above 0, or inf."""
    if (value := float(text)) > 0:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, or inf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server", "the API key is read from OPENAI_API_KEY")
    help_text = "form of requests: openai for completions, openai-chat for chat (default: openai; openai-chat with images)"
    server.add_argument("--backend", choices=PATHS, help=help_text)
    server.add_argument("--base-url", metavar="URL", help="address of the server (default: from --host and --port)")
    server.add_argument("--host", default="127.0.0.1", help="host of the server (default: 127.0.0.1)")
    server.add_argument("--port", type=positive_int, default=8000, help="port of the server (default: 8000)")
    server.add_argument("--endpoint", metavar="PATH", help="path of the requests (default: that of the backend)")
    server.add_argument("--model", metavar="NAME", help="model that requests name (default: the server's first)")
    add_workload_arguments(parser)
    load = parser.add_argument_group("load")
    help_text = "requests per second; inf sends all at once; several rates are measured one after another (default: inf)"
    load.add_argument("--request-rate", metavar="RATE", type=rate, nargs="+", default=[math.inf], help=help_text)
    help_text = "shape of the gamma distribution of the times between requests; 1 is a Poisson process (default: 1)"
    load.add_argument("--burstiness", metavar="X", type=rate, default=1.0, help=help_text)
    load.add_argument("--max-concurrency", metavar="N", type=positive_int, help="maximum number of requests in progress")
    load.add_argument("--num-warmups", metavar="N", type=count, default=0, help="requests before the measurement (default: 0)")
    load.add_argument("--ignore-eos", action="store_true", help="generate the whole number of tokens")
    load.add_argument("--temperature", metavar="T", type=float, help="sampling temperature (default: the server's)")
    report = add_report_arguments(parser)
    report.add_argument(
        "--plot", metavar="FILE", type=new_file, help="PNG of latencies and throughput by rate; needs matplotlib"
    )


def run(args: argparse.Namespace) -> int:
    """Return the exit status: 2 if a request failed."""
    if args.dataset_name == "random-mm" and args.backend == "openai":
        raise ConfigError("--backend openai sends text only; give --backend openai-chat for images", param="backend")
    args.backend = args.backend or ("openai-chat" if args.dataset_name == "random-mm" else "openai")
    if args.plot is not None:
        check_plot()
    host = f"[{args.host}]" if ":" in args.host else args.host
    client = Client(args.base_url or f"http://{host}:{args.port}", os.environ.get("OPENAI_API_KEY"))
    try:
        results = asyncio.run(sweep(client, args))
    except OSError as error:
        reason = f"{client.url} cannot be reached ({error}); start `sensorium serve MODEL`, or give --base-url"
        raise ConfigError(reason, param="base_url") from None
    if args.plot is not None:
        plot(results, args.plot)
    return 2 if any(result["failed"] for result in results) else 0


async def sweep(client: Client, args: argparse.Namespace) -> list[Result]:
    """Measure each rate, and print and save the results."""
    model = args.model or (await client.json("/v1/models"))["data"][0]["id"]
    path = args.endpoint or PATHS[args.backend]
    results = []
    for number, rate in enumerate(args.request_rate):
        bodies = await make_bodies(client, args, model, args.seed + number)  # prompts that no cache holds yet
        for body in bodies[args.num_prompts :]:  # the warm-ups
            await client.stream(path, body)
        result = {"date": time.strftime("%Y%m%d-%H%M%S"), "backend": args.backend, "model_id": model}
        result |= await measure(client, path, bodies[: args.num_prompts], rate, args)
        print_table(result)
        save(args, result, f"{args.backend}-{model.replace('/', '_')}", number if len(args.request_rate) > 1 else None)
        results.append(result)
    return results


async def make_bodies(client: Client, args: argparse.Namespace, model: str, seed: int) -> list[dict[str, Any]]:
    """Return the bodies of the requests and then of the warm-ups. The server's tokenizer makes prompts of the right length."""

    def tokenize(text: str) -> list[int]:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        tokens: list[int] = asyncio.run(client.json("/tokenize", body))["tokens"]
        return tokens

    samples = await asyncio.to_thread(make_samples, args, tokenize, seed, args.num_prompts + args.num_warmups)
    return [await _body(client, args, model, sample) for sample in samples]


async def _body(client: Client, args: argparse.Namespace, model: str, sample: Sample) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if args.backend == "openai":
        body |= {"prompt": sample.token_ids, "max_tokens": sample.output_len}
    else:
        text = (await client.json("/detokenize", {"model": model, "tokens": sample.token_ids}))["prompt"]
        urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in sample.images]
        images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        message = {"role": "user", "content": [{"type": "text", "text": text}, *images]}
        body |= {"messages": [message], "max_completion_tokens": sample.output_len}
    optional = {"temperature": args.temperature, "ignore_eos": args.ignore_eos or None}
    return body | {name: value for name, value in optional.items() if value is not None}


async def measure(client: Client, path: str, bodies: Sequence[Any], rate: float, args: argparse.Namespace) -> Result:
    """Send the requests at random times of this rate, and return the result with vLLM's names."""
    import numpy as np

    rng = np.random.default_rng(args.seed)
    mean = 0.0 if rate == math.inf else 1 / (rate * args.burstiness)
    times = np.cumsum(rng.gamma(args.burstiness, mean, len(bodies))) if mean else np.zeros(len(bodies))
    limit = args.max_concurrency
    slots: AbstractAsyncContextManager[Any] = asyncio.Semaphore(limit) if limit else nullcontext()
    before, start = await client.metrics(), time.perf_counter()

    async def send(at: float, body: Any) -> Reply:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        async with slots:
            return await client.stream(path, body)

    replies = await asyncio.gather(*(send(at, body) for at, body in zip(times, bodies, strict=True)))
    seconds, after = time.perf_counter() - start, await client.metrics()
    for reply in [reply for reply in replies if reply.error][:_MAX_ERRORS]:
        print(f"sensorium: error: {reply.error}", file=sys.stderr)
    head = {"num_prompts": len(bodies), "request_rate": None if rate == math.inf else rate, "burstiness": args.burstiness}
    result = {**head, "max_concurrency": limit, **summary(replies, seconds, args.metric_percentiles)}
    return result | {ours: after[name] - before.get(name, 0.0) for name, ours in _ENGINE.items() if name in after}


def summary(replies: Sequence[Reply], seconds: float, wanted: Sequence[float]) -> Result:
    """Return counts, throughput and latencies of requests that took `seconds` together."""
    done = [reply for reply in replies if reply.error is None]
    prompt, output = sum(reply.prompt_tokens for reply in done), sum(reply.output_tokens for reply in done)
    times = {
        "ttft": [reply.ttft for reply in done],
        "tpot": [reply.tpot for reply in done if reply.tpot is not None],
    }
    times |= {"itl": [gap for reply in done for gap in reply.itl], "e2el": [reply.e2el for reply in done]}
    return {
        "duration": seconds,
        "completed": len(done),
        "failed": len(replies) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "total_cached_tokens": sum(reply.cached_tokens for reply in done),
        "drafted_tokens": sum(reply.drafted_tokens for reply in done),
        "accepted_draft_tokens": sum(reply.accepted_tokens for reply in done),
        "request_throughput": len(done) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        **latencies(times, wanted),
    }
