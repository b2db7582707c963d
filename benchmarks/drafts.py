"""Measure drafted tokens: decode with drafting on and off, in turns, on one engine.

`python -m benchmarks.drafts --model FOLDER_OR_GGUF [--quantization int8] [--write]` prints the table, with the machine, its
instruction set, versions and the date, and `--write` puts it into benchmarks/README.md. Answers are compared too: they must be
equal. With `--model` of real weights, the prompts are an extraction from a table, a page whose text is given, and free
answers; the shipped model, the default, only shows the cost (with `--ignore-eos`). `python -m benchmarks.draft_goals` runs this
on real weights and compares with the goals.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import sensorium
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import InputError
from sensorium.engine.outputs import RequestOutput
from sensorium.engine.stats import add_stats

from .throughput import machine, put

ROWS = [f"| {1000 + 37 * i} | {name} | {city} | {12.5 * i + 3:.2f} |" for i, (name, city) in enumerate(
    zip(["Ada", "Bert", "Carla", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas"],
        ["Lyon", "Porto", "Graz", "Turku", "Izmir", "Fes", "Bergen", "Gent", "Lima", "Oslo"], strict=True)
)]  # fmt: skip
HEAD = "| id | name | city | amount |\n|---|---|---|---|"
TABLE = "\n".join([HEAD, *ROWS])
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
    """Prompts whose answers are drafted from `source`.

    Args:
        lead: the beginning of the answer, because small models need one. Prompts without it are asked in a chat if possible.
        draft: the answer that the caller expects.
        max_tokens: of an answer.
    """

    source: str
    prompts: tuple[str, ...]
    lead: str = ""
    draft: str | None = None
    max_tokens: int = 220


FIRST = '[{"id": 1000, "name": "Ada", "city": "Lyon", "amount": 3.00},\n'
WORKLOADS = (
    Workload(
        "suffix: a table is repeated",
        (f"Repeat this table exactly:\n\n{TABLE}",),
        f"The same table:\n\n{HEAD}\n",
    ),
    Workload(
        "suffix: a table becomes JSON",
        (f"Write this table as a JSON list with the keys id, name, city, amount:\n\n{TABLE}",),
        f"JSON:\n\n{FIRST}",
    ),
    Workload("text: a page", (f"Repeat this text exactly:\n\n{PAGE}",), "The same text:\n\nThe harbour", PAGE, 104),
    Workload("suffix: free answers", tuple(QUESTIONS), max_tokens=100),
)


@dataclass(frozen=True)
class Result:
    """Median ratio of the seconds of pairs, off / on, and how many tokens the answers have, were drafted and accepted."""

    source: str
    temperature: float
    tokens: int
    drafted: int
    accepted: int
    speed: float

    def row(self) -> str:
        """Return the row of a table."""
        counts = f"{self.tokens} | {self.drafted} | {self.accepted}"
        return f"| {self.source} | {self.temperature} | {counts} | {self.speed:.2f}x |"


def switch(llm: LLM, drafter: Any) -> None:
    """Let the engine draft with a drafter, or not at all."""
    step_drafts = llm.engine.loop.core.scheduler.drafts
    step_drafts.drafter, step_drafts.propose = drafter, None


def ask(llm: LLM, work: Workload, params: SamplingParams, has_template: bool) -> tuple[float, list[RequestOutput]]:
    """Return the seconds from the first token of each answer to its last, and the answers."""
    outputs = []
    for prompt in work.prompts:
        if has_template and not work.lead:
            (output,) = llm.chat([[{"role": "user", "content": prompt}]], params, use_tqdm=False)
        else:
            (output,) = llm.generate([f"{prompt}\n\n{work.lead}".strip()], params, use_tqdm=False)
        assert output.error is None, output.error
        outputs.append(output)
    return sum(output.timings["decode_steps"] for output in outputs), outputs


def measure(llm: LLM, work: Workload, params: SamplingParams, rounds: int, has_template: bool = True) -> Result:
    drafter = llm.engine.loop.core.scheduler.drafts.drafter
    params = replace(params, draft_text=work.draft, max_tokens=min(work.max_tokens, params.max_tokens))
    ratios, outputs = [], list[RequestOutput]()
    for number in range(rounds + 1):
        seconds, answers = {}, {}
        for is_on in (True, False) if number % 2 else (False, True):
            switch(llm, drafter if is_on else None)
            limited = params if number else replace(params, max_tokens=min(32, params.max_tokens))
            seconds[is_on], answers[is_on] = ask(llm, work, limited, has_template)
        same = [one.outputs[0].token_ids for one in answers[True]] == [one.outputs[0].token_ids for one in answers[False]]
        assert same, f"{work.source}: the answers differ"
        if number:  # the first pair records graphs and learns; it is short
            ratios.append(seconds[False] / seconds[True])
            outputs = answers[True]
    switch(llm, drafter)
    drafts = add_stats(output.drafts for output in outputs)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    accepted, drafted = sum(one.num_accepted for one in drafts), sum(one.num_drafted for one in drafts)
    return Result(work.source, params.temperature, tokens, drafted, accepted, statistics.median(ratios))


def overhead(llm: LLM) -> tuple[float, float]:
    """Return the microseconds that drafting takes per step in which nothing is verified, and the share of the step."""
    step_drafts, spent, steps = llm.engine.loop.core.scheduler.drafts, 0.0, 0
    drafter = step_drafts.drafter
    plan, settle = drafter.plan, drafter.settle

    def timed(function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            result = function(*arguments)
            spent += time.perf_counter() - start
            return result

        return run

    drafter.plan, drafter.settle = timed(plan), timed(settle)
    step_drafts.propose = lambda request, most: ()
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    before = llm.stats.steps
    (output,) = llm.generate([QUESTIONS[1]], params, use_tqdm=False)
    steps = llm.engine.loop.call(lambda loop: loop.core.stats.steps).result() - before
    drafter.plan, drafter.settle, step_drafts.propose = plan, settle, None
    return 1e6 * spent / steps, spent / output.timings["decode_steps"]


def can_chat(llm: LLM) -> bool:
    try:
        llm.engine.chat_options()
    except InputError:
        return False
    return True


def results(llm: LLM, args: argparse.Namespace) -> Iterator[Result]:
    """Measure every workload at two temperatures."""
    has_template = can_chat(llm)
    for temperature in (0.0, 0.7):
        for work in WORKLOADS:
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos)
            yield measure(llm, work, params, args.rounds, has_template)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-vl")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--ignore-eos", action="store_true", help="for models that do not answer, such as the shipped one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=220)
    parser.add_argument("--json", action="store_true", help="print a JSON object per row, for benchmarks.draft_goals")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    config = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}  # an answer of the last round is no draft
    lines = []
    options = {"dtype": args.dtype, "quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    with LLM(args.model, max_model_len=2048, max_num_seqs=4, speculative_config=config, **options) as llm:
        for result in results(llm, args):
            lines.append(result.row())
            print(json.dumps(asdict(result)) if args.json else lines[-1], flush=True)
        microseconds, share = overhead(llm)
    if args.json:
        print(json.dumps({"overhead": share}), flush=True)
        return
    settings = ", ".join(filter(None, (args.dtype, args.quantization, f"cache {args.kv_cache_dtype}")))
    head = f"{os.path.basename(args.model)}, {settings}, {args.rounds} pairs. sensorium {sensorium.__version__} on {machine()}"
    tail = f"A step in which nothing is verified takes {microseconds:.0f} microseconds longer, {share:.1%} of its time."
    table = [
        "| drafted from | temperature | tokens | drafted | accepted | speed of decoding, on / off |",
        "|---|---|---|---|---|---|",
    ]
    text = "\n".join([head, "", *table, *lines, "", tail])
    print(text)
    if args.write:
        put("Drafted tokens", text)


if __name__ == "__main__":
    main()
