"""Measure drafted tokens: decode with drafting on and off, in turns, on one engine.

`python -m benchmarks.drafts --model FOLDER_OR_GGUF [--quantization int8] [--write]` prints the table, with the machine, its
instruction set, versions and the date, and `--write` puts it into benchmarks/README.md. Answers are compared too: they must be
equal. With `--model` of real weights, the prompts are an extraction from a table, a page whose text is given, and free
answers; the shipped model, the default, only shows the cost (with `--ignore-eos`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import sensorium
from sensorium import LLM, SamplingParams
from sensorium.engine.stats import add_stats

from .throughput import machine, put

ROWS = [f"| {1000 + 37 * i} | {name} | {city} | {12.5 * i + 3:.2f} |" for i, (name, city) in enumerate(
    zip(["Ada", "Bert", "Carla", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas"],
        ["Lyon", "Porto", "Graz", "Turku", "Izmir", "Fes", "Bergen", "Gent", "Lima", "Oslo"], strict=True)
)]  # fmt: skip
TABLE = "\n".join(["| id | name | city | amount |", "|---|---|---|---|", *ROWS])
PAGE = (
    "The harbour was rebuilt in 1874 after the great storm, and its breakwater was made of granite from the northern quarries. "
    "Three cranes stood on the eastern quay; the largest could lift twelve tonnes. In 1902 the railway reached the town, and "
    "the customs house was moved beside the new station. The lighthouse keeper wrote down the weather four times a day, and "
    "his books, which fill nine shelves, are kept in the museum. Visitors may read them on the first Monday of each month."
)
QUESTIONS = [
    "Explain why the sky is blue.", "Write a short story about a cat and a lighthouse.", "How do I boil an egg?",
    "What is the difference between a lake and a sea?",
]  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Prompts whose answers are drafted from `source`; `draft` is what the caller expects."""

    source: str
    prompts: tuple[str, ...]
    draft: str | None = None


WORKLOADS = (
    Workload("suffix: a table is repeated as it is", (f"Repeat this table exactly:\n\n{TABLE}",)),
    Workload(
        "suffix: a table becomes JSON", (f"Write this table as a JSON list with the keys id, name, city, amount:\n\n{TABLE}",)
    ),
    Workload("given text: a page", (f"Repeat this text exactly:\n\n{PAGE}",), PAGE),
    Workload("suffix: free answers", tuple(QUESTIONS)),
)


@dataclass(frozen=True)
class Result:
    """Median ratio of the seconds of pairs, off / on, and how many tokens and steps the answers took."""

    speed: float
    tokens: int
    accepted: int
    drafted: int


def measure(llm: LLM, work: Workload, params: SamplingParams, rounds: int) -> Result:
    step_drafts = llm.engine.loop.core.scheduler.drafts
    drafter = step_drafts.drafter
    params = replace(params, draft_text=work.draft)
    ratios, outputs = [], []
    for number in range(rounds + 1):
        seconds, answers = {}, {}
        for is_on in (True, False) if number % 2 else (False, True):
            step_drafts.drafter, step_drafts.propose = (drafter, drafter.take) if is_on else (None, None)
            seconds[is_on] = 0.0
            answers[is_on] = []
            for prompt in work.prompts:
                (output,) = llm.chat([[{"role": "user", "content": prompt}]], params, use_tqdm=False)
                seconds[is_on] += output.timings["decode_steps"]
                answers[is_on].append(output)
        same = [one.outputs[0].token_ids for one in answers[True]] == [one.outputs[0].token_ids for one in answers[False]]
        assert same, f"{work.source}: the answers differ"
        if number:  # the first pair records graphs and learns
            ratios.append(seconds[False] / seconds[True])
            outputs = answers[True]
    step_drafts.drafter, step_drafts.propose = drafter, drafter.take
    drafts = add_stats(output.drafts for output in outputs)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    accepted, drafted = sum(one.num_accepted for one in drafts), sum(one.num_drafted for one in drafts)
    return Result(statistics.median(ratios), tokens, accepted, drafted)


def overhead(llm: LLM) -> float:
    """Return the microseconds that drafting takes per step in which nothing is verified."""
    step_drafts, spent, steps = llm.engine.loop.core.scheduler.drafts, 0.0, 0
    drafter = step_drafts.drafter
    plan, settle = drafter.plan, drafter.settle

    def timed(function: Any) -> Any:
        def run(*arguments: Any) -> None:
            nonlocal spent
            start = time.perf_counter()
            function(*arguments)
            spent += time.perf_counter() - start

        return run

    drafter.plan, drafter.settle = timed(plan), timed(settle)
    step_drafts.propose = lambda request, most: ()
    before = llm.stats.steps
    llm.chat([[{"role": "user", "content": QUESTIONS[1]}]], SamplingParams(temperature=0.0, max_tokens=200), use_tqdm=False)
    steps = llm.engine.loop.call(lambda loop: loop.core.stats.steps).result() - before
    drafter.plan, drafter.settle, step_drafts.propose = plan, settle, drafter.take
    return 1e6 * spent / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-vl")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--ignore-eos", action="store_true", help="for models that do not answer, such as the shipped one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=220)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    config = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}  # an answer of the last round is no draft
    lines = []
    options = {"dtype": args.dtype, "quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    with LLM(args.model, max_model_len=2048, max_num_seqs=4, speculative_config=config, **options) as llm:
        for temperature in (0.0, 0.7):
            for work in WORKLOADS:
                params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos)
                result = measure(llm, work, params, args.rounds)
                counts = f"{result.tokens} | {result.drafted} | {result.accepted}"
                lines.append(f"| {work.source} | {temperature} | {counts} | {result.speed:.2f}x |")
                print(lines[-1], flush=True)
        spent = overhead(llm)
    how = ", ".join(filter(None, (args.dtype, args.quantization, f"cache {args.kv_cache_dtype}")))
    head = f"{os.path.basename(args.model)}, {how}, {args.rounds} pairs. sensorium {sensorium.__version__} on {machine()}"
    table = [
        "| drafted from | temperature | tokens | drafted | accepted | speed of decoding, on / off |",
        "|---|---|---|---|---|---|",
    ]
    text = "\n".join(
        [head, "", *table, *lines, "", f"A step in which nothing is verified takes {spent:.0f} microseconds longer."]
    )
    print(text)
    if args.write:
        put("Drafted tokens", text)


if __name__ == "__main__":
    main()
