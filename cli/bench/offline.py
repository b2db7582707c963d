"""`sensorium bench offline`: the throughput of a model in this process."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ..common import add_engine_arguments, add_model_arguments, engine_arguments, engine_options
from .report import Result, add_report_arguments, latencies, print_table, save
from .workload import Sample, add_workload_arguments, make_samples

EXAMPLE = "sensorium bench offline --model assets/tiny-vl --num-prompts 100 --input-len 64 --output-len 32"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_workload_arguments(parser)
    add_report_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Return the exit status: 2 if a request failed."""
    from ...engine.llm import LLM

    llm = LLM(**engine_options(args), **engine_arguments(args))
    result = measure(llm, args)
    print_table(result)
    save(args, result, "offline")
    return 2 if result["failed"] else 0


def measure(llm: Any, args: argparse.Namespace) -> Result:
    """Run all requests as one batch. No answer ends early."""
    from ...engine.sampling_params import SamplingParams

    tokenizer = llm.get_tokenizer()
    samples = make_samples(args, lambda text: tokenizer.encode(text, add_special_tokens=False), args.seed, args.num_prompts)
    params = [SamplingParams(temperature=0.0, max_tokens=entry.output_len, ignore_eos=True) for entry in samples]
    before, start = llm.stats, time.perf_counter()
    if args.dataset_name == "random":
        outputs = llm.generate([{"prompt_token_ids": entry.token_ids} for entry in samples], params)
    else:
        outputs = llm.chat([_messages(tokenizer, entry) for entry in samples], params)
    seconds, after = time.perf_counter() - start, llm.stats
    done = [output for output in outputs if output.error is None]
    prompt = sum(len(output.prompt_token_ids) for output in done)
    generated = sum(len(output.outputs[0].token_ids) for output in done)
    firsts = [sum(value for stage, value in entry.timings.items() if stage != "decode_steps") for entry in done]
    each = [entry.timings.get("decode_steps", 0.0) / max(1, len(entry.outputs[0].token_ids) - 1) for entry in done]
    return {
        "elapsed_time": seconds,
        "num_requests": len(samples),
        "failed": len(samples) - len(done),
        "total_num_tokens": prompt + generated,
        "requests_per_second": len(done) / seconds,
        "tokens_per_second": (prompt + generated) / seconds,
        "output_tokens_per_second": generated / seconds,
        "encoder_seconds": sum(entry.timings.get("encode", 0.0) for entry in done),
        "encoder_cache_hits": after.encoder_hits - before.encoder_hits,
        "encoder_cache_misses": after.encoder_calls - before.encoder_calls,
        "prefix_cache_queries": after.prefix_queries - before.prefix_queries,
        "prefix_cache_hits": after.prefix_hits - before.prefix_hits,
        **_drafts(done),
        **latencies({"ttft": firsts, "tpot": each}, args.metric_percentiles),
    }


def _drafts(outputs: list[Any]) -> Result:
    """Return the counts of drafted tokens, by proposer and position."""
    from ...engine.stats import add_stats

    drafts = add_stats(output.drafts for output in outputs)
    return {
        "drafted_tokens": sum(stats.num_drafted for stats in drafts),
        "accepted_draft_tokens": sum(stats.num_accepted for stats in drafts),
        "accepted_by_position": {stats.proposer: list(stats.accepted) for stats in drafts},
        "drafted_by_position": {stats.proposer: list(stats.drafted) for stats in drafts},
    }


def _messages(tokenizer: Any, sample: Sample) -> list[dict[str, Any]]:
    images = [{"type": "image", "image": image} for image in sample.images]
    return [{"role": "user", "content": [*images, {"type": "text", "text": tokenizer.decode(sample.token_ids)}]}]
