"""Mixed traffic for one engine: good, malformed and abandoned requests, each determined by its number.

`python tests/helpers/soak.py --requests 10000` prints the results.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from hostile import MODEL, NO_NUMBER, FailingEncoder, asked, make_image, marked, numberless, png, raising
from PIL import Image
from sensorium import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams, register_logits_processor
from sensorium.engine.stats import EngineStats

CLIENTS = 96  # concurrent requests
SEQS = 32  # concurrent sequences
KV_SHARE = 0.4  # KV-cache size, as a share of what SEQS sequences need
POOL = 24  # images that are repeated
MEAN_TOKENS = 48  # tokens of a good request, prompt and answer; `Report.kv_share` shows whether it holds
BLOCK_BYTES = 16 * 4 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, head size, float32
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 192,
    "max_num_seqs": SEQS,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "limit_mm_per_prompt": {"image": 3},
    "media": {"max_pixels": 1 << 20},
    "kv_cache_memory_bytes": int(KV_SHARE * SEQS * MEAN_TOKENS / 16) * BLOCK_BYTES,
    "max_encoder_tokens": 128,  # encoder rows of one step
    "encoder_cache_bytes": 160 << 10,  # 320 rows
    "mm_processor_cache_bytes": 2 << 20,
    "quarantine_seconds": 5.0,
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
QUESTIONS = ("Read the text.", "Read the receipt.", "What happens in the clip?")
PREAMBLE = "user: the red circle moves left, the green square moves right and the total is 24.09. "
ABORTS = ("at once", "soon", "later", "after tokens")
TIE = 1e-4  # tokens with log probabilities this close may swap


@dataclass(frozen=True)
class Call:
    """One request. `same`: requests with an equal key have equal answers; `error`: an error is expected."""

    kind: str
    prompt: Any
    params: Mapping[str, Any] = field(default_factory=dict)
    same: str = ""
    fresh: bool = False
    error: bool = False
    abort: str = ""
    patience: float = 0.0  # seconds or tokens before it is abandoned


@dataclass
class Report:
    """Results of the traffic."""

    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)  # good requests with an error, and bad requests without
    differing: list[tuple[Call, tuple[int, ...]]] = field(default_factory=list)
    memory: list[tuple[int, float]] = field(default_factory=list)  # requests done, MiB resident
    tokens: int = 0  # tokens of good requests
    seconds: float = 0.0
    breaks: list[str] = field(default_factory=list)  # failed steps and interrupted loops
    stats: EngineStats = field(default_factory=EngineStats)
    left: list[str] = field(default_factory=list)  # what was not freed

    @property
    def slope(self) -> float:
        """MiB per 1,000 requests, fitted to the last four fifths; before that, caches fill up."""
        done, resident = zip(*self.memory[len(self.memory) // 5 :], strict=True)
        return float(np.polyfit(done, resident, 1)[0] * 1000)

    @property
    def kv_share(self) -> float:
        """KV-cache size, as a share of what the concurrent sequences need."""
        return self.stats.blocks * OPTIONS["block_size"] * self.counts["good"] / (SEQS * self.tokens)

    def text(self) -> str:
        curve = " ".join(f"{resident:.0f}" for _, resident in self.memory[:: max(1, len(self.memory) // 10)])
        return (
            f"{self.counts['asked']} requests in {self.seconds:.0f} s; slope {self.slope:+.2f} MiB per 1,000 ({curve});"
            f" the KV cache has {self.kv_share:.0%} of the demand\n"
            f"{dict(sorted(self.counts.items()))}\n{asdict(self.stats)}\n"
            f"failed {self.failed}, differing {len(self.differing)}, breaks {self.breaks}, left {self.left}"
        )


# The traffic


def raises(token_ids: Sequence[int], logits: torch.Tensor) -> None:
    raise RuntimeError("no token today")


register_logits_processor("soak-raises", lambda: raises)


def make_call(seed: int, number: int, kinds: Sequence[str] | None = None) -> Call:
    """Return request `number`, of a random kind among `kinds` (default: all)."""
    rng = random.Random(f"{seed}.{number}")
    kinds = kinds or list(KINDS)
    kind = rng.choices(kinds, [KINDS[name][0] for name in kinds])[0]
    call = KINDS[kind][1](rng, number + 1000 * POOL)
    if call.error or rng.random() > 0.3:
        return Call(kind, call.prompt, call.params, call.same or f"{seed}.{number}", call.fresh, call.error)
    abort = rng.choice(ABORTS)
    patience = float(rng.randint(1, 6)) if abort == "after tokens" else rng.random() * (0.004 if abort == "soon" else 0.06)
    return Call(kind, call.prompt, call.params, "", call.fresh, False, abort, patience)


def size(rng: random.Random) -> tuple[int, int]:
    """Return width and height of an image of 4 to 40 rows."""
    return 16 * rng.randint(2, 8), 16 * rng.randint(2, 5)


def words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(
        rng.choice(("total", "red", "17.04", "moves", "A7", "circle", "ZK9")) for _ in range(rng.randint(least, most))
    )


def answer(rng: random.Random) -> dict[str, Any]:
    """Return greedy parameters in their various forms, so that answers are comparable."""
    extra: dict[str, Any] = rng.choice(
        ({}, {}, {}, {}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"stop": ["0", "E"]}, {"min_tokens": 3}, {"bad_words": ["A"]})
    )
    return {"max_tokens": rng.randint(3, 32), "ignore_eos": rng.random() < 0.7, **extra}


def fresh(rng: random.Random, number: int) -> Call:
    images = [make_image(8 * number + i, *size(rng)) for i in range(rng.choice((1, 1, 1, 2)))]
    given = [png(image) if rng.random() < 0.3 else image for image in images]
    return Call("", asked(*given, text=rng.choice(QUESTIONS)), answer(rng), fresh=True)


def pooled(rng: random.Random) -> tuple[int, Image.Image]:
    which = rng.randrange(POOL)
    return which, make_image(which, 16 * (2 + which % 7), 16 * (2 + which % 4))


def again(rng: random.Random, number: int) -> Call:
    """Repeat an earlier image and question."""
    which, image = pooled(rng)
    question = rng.choice(QUESTIONS)
    most = rng.choice((4, 12, 20))
    params = {"max_tokens": most, "ignore_eos": True}
    return Call("", asked(image, text=question), params, f"again {which} {question} {most}")


def another(rng: random.Random, number: int) -> Call:
    """Ask a new question about a known image."""
    return Call("", asked(pooled(rng)[1], text=words(rng, 2, 10)), answer(rng))


def mixed(rng: random.Random, number: int) -> Call:
    """Put a known image before a new one."""
    return Call("", asked(pooled(rng)[1], make_image(8 * number, *size(rng)), text=words(rng, 1, 4)), answer(rng), fresh=True)


def text(rng: random.Random, number: int) -> Call:
    return Call("", PREAMBLE + words(rng, 1, 12), answer(rng))


def form(rng: random.Random, number: int) -> Call:
    """Ask for structured output."""
    given: dict[str, Any] = rng.choice(({"regex": "[A-C]{2,5}[0-9]"}, {"choice": ["total", "red 17.04"]}, {"json": SCHEMA}))
    params = {"structured_outputs": StructuredOutputsParams(**given), "max_tokens": 24}
    return Call("", asked(pooled(rng)[1], text=words(rng, 1, 3)), params)


def salted(rng: random.Random, number: int) -> Call:
    which, image = pooled(rng)
    params = {"max_tokens": 6, "ignore_eos": True}
    prompt = asked(image, text=QUESTIONS[0], cache_salt=rng.choice("ab"))
    return Call("", prompt, params, f"again {which} {QUESTIONS[0]} 6")


def bad(make: Callable[[random.Random, int], Any], **params: Any) -> Callable[[random.Random, int], Call]:
    """Return a function that makes requests which must be refused."""
    return lambda rng, number: Call("", make(rng, number), {"max_tokens": 6, **params}, error=True)


def with_failing_item(rng: random.Random, number: int) -> Any:
    """Make a prompt with a failing image: a new one, or one of a few that are soon quarantined."""
    return asked(pooled(rng)[1], marked(rng.choice((rng.randrange(4), 8 * number))), text="x")


KINDS: dict[str, tuple[float, Callable[[random.Random, int], Call]]] = {
    "fresh": (32, fresh),
    "mixed": (9, mixed),
    "again": (20, again),
    "another": (9, another),
    "text": (9, text),
    "salted": (4, salted),
    "form": (3, form),
    "bad bytes": (2, bad(lambda rng, number: asked(rng.randbytes(200)))),
    "bad cut": (2, bad(lambda rng, number: asked(png(make_image(8 * number))[: rng.randint(1, 2000)]))),
    "bad empty": (1, bad(lambda rng, number: asked(b""))),
    "bad type": (2, bad(lambda rng, number: asked(rng.choice((3.5, {}, object(), [], lambda: 0))))),
    "bad shape": (1, bad(lambda rng, number: asked(np.zeros(rng.choice(((0, 4, 3), (5,), (2, 2, 2, 2))), np.uint8)))),
    "bad large": (1, bad(lambda rng, number: asked(np.broadcast_to(np.uint8(9), (300, 4000, 3))))),
    "bad narrow": (1, bad(lambda rng, number: asked(Image.new("RGB", (900, 4))))),
    "bad long": (2, bad(lambda rng, number: words(rng, 300, 400))),
    "bad placeholders": (1, bad(lambda rng, number: {**asked(make_image(8 * number)), "prompt": "no placeholder"})),
    "bad many": (1, bad(lambda rng, number: asked(*[make_image(0)] * 4))),
    "bad option": (1, bad(lambda rng, number: asked(make_image(0), mm_processor_kwargs={"max_pixel": 5}))),
    "bad key": (1, bad(lambda rng, number: {"promt": "x"})),
    "bad token": (1, bad(lambda rng, number: {"prompt_token_ids": [5, 10**6]})),
    "bad grammar": (1, bad(lambda rng, number: asked(make_image(0)), structured_outputs=StructuredOutputsParams(regex="([A-"))),
    "bad processor": (1, bad(lambda rng, number: asked(make_image(0)), logits_processors={"soak-raises": {}})),
    "bad item": (2, bad(with_failing_item)),
    "bad logits": (2, bad(lambda rng, number: words(rng, 1, 5) + NO_NUMBER)),
}
HARMFUL = ("bad item", "bad logits")  # need a patched model, so the core must be in this process


# The run


def run(seed: int, count: int, process: bool = False) -> Report:
    """Serve all requests with one engine, and compare each answer with the one that the request gets alone.

    `process`: run the core in a separate process.
    """
    calls = partial(make_call, seed, kinds=[kind for kind in KINDS if not (process and kind in HARMFUL)])
    expected = answers_alone(calls, count)
    engine = AsyncLLM(MODEL, engine_process=process, **OPTIONS)
    core = engine.engine.loop.core
    if not process:
        do_harm(core.executor.runner.model, engine.llm.get_tokenizer().token_to_id(NO_NUMBER))
    with counted_breaks() as breaks:
        report = asyncio.run(serve(engine, calls, count, expected))
    report.breaks, report.stats = breaks, core.stats
    report.left = leftovers(core)
    engine.close()
    report.differing = [(call, got) for call, got in report.differing if not is_tie(call, got, expected[call.same])]
    return report


def do_harm(model: Any, token: int) -> None:
    model.embed_multimodal = FailingEncoder(model.embed_multimodal, raising(RuntimeError, "failing item"))
    model.forward = numberless(model.forward, token, float("nan"))


@contextlib.contextmanager
def counted_breaks() -> Iterator[list[str]]:
    """Count logged errors. Warnings (failing items) are excluded, because pytest would keep them and their frames."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sensorium")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def leftovers(core: Any, seconds: float = 60.0) -> list[str]:
    """Return what is still held after all answers; waits briefly for the engine to free the last."""
    end = time.perf_counter() + seconds
    while (found := _held(core)) and time.perf_counter() < end:
        time.sleep(0.05)
    return found


def _held(core: Any) -> list[str]:
    stats = core.stats
    held = {"sequences": stats.running + stats.waiting + stats.idle, "blocks": stats.blocks_used}
    if hasattr(core, "scheduler"):  # in this process
        rows = set(core.executor.runner.store.rows) - set(core.scheduler.encoder_cache._resident)
        held |= {"requests": len(core.scheduler.requests), "sequence states": len(core.executor.runner.sequences)}
        held |= {"rows without an entry": len(rows)}
    return [f"{count} {name}" for name, count in held.items() if count]


def answers_alone(calls: Callable[[int], Call], count: int) -> dict[str, tuple[int, ...]]:
    """Return the answer of each good request when it runs alone without caches."""
    llm = alone()
    found: dict[str, tuple[int, ...]] = {}
    for number in range(count):
        call = calls(number)
        if call.same in found or not call.same or call.error:
            continue
        (output,) = llm.generate(call.prompt, params_of(call), use_tqdm=False)
        assert output.error is None, (call, output.error)
        found[call.same] = output.outputs[0].token_ids
    return found


def alone() -> LLM:
    own = {"max_num_seqs": 1, "max_num_batched_tokens": 2048, "enable_prefix_caching": False, "kv_cache_memory_bytes": None}
    return LLM(MODEL, **{**OPTIONS, **own})


def params_of(call: Call) -> SamplingParams:
    return SamplingParams(temperature=0.0, **call.params)


def is_tie(call: Call, got: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether the first different token is the other of two equally likely ones."""
    at = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return False
    (output,) = alone().generate(call.prompt, SamplingParams(temperature=0.0, **{**call.params, "logprobs": 2}), use_tqdm=False)
    entries = (output.outputs[0].logprobs or ())[at]
    return got[at] in entries and abs(entries[got[at]].logprob - entries[expected[at]].logprob) < TIE


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def serve(engine: Any, calls: Callable[[int], Call], count: int, expected: Mapping[str, tuple[int, ...]]) -> Report:
    """Run `CLIENTS` clients, each with one request at a time, until `count` requests are made."""
    report, numbers = Report(), iter(range(count))
    start = time.perf_counter()

    async def client() -> None:
        for number in numbers:
            await ask(engine, calls(number), expected, report)
            done = sum(report.counts[name] for name in ("good", "refused", "aborted", "failed"))
            if done % max(50, count // 100) == 0:
                report.memory.append((done, resident()))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    report.seconds = time.perf_counter() - start
    return report


async def ask(engine: Any, call: Call, expected: Mapping[str, tuple[int, ...]], report: Report) -> None:
    report.counts.update(("asked", f"kind {call.kind}", *["fresh"] * call.fresh))
    output = await (abandon(engine, call) if call.abort else last(engine, call))
    if output is None:
        report.counts["aborted"] += 1
        report.counts[f"aborted {call.abort}"] += 1
        return
    if call.error != (output.error is not None):
        report.counts["failed"] += 1
        report.failed.append(f"{call.kind}: {output.error}")
        return
    report.counts["refused" if call.error else "good"] += 1
    got = output.outputs[0].token_ids
    report.tokens += 0 if call.error else len(output.prompt_token_ids) + len(got)
    if call.same in expected and not call.error and got != expected[call.same]:
        report.differing.append((call, got))


async def last(engine: Any, call: Call, tokens: float = float("inf")) -> RequestOutput | None:
    """Return the answer, or None once it has `tokens` tokens."""
    output: RequestOutput | None = None
    stream = engine.generate(call.prompt, params_of(call), output_kind="cumulative")
    async with contextlib.aclosing(stream):
        async for output in stream:
            if not output.finished and len(output.outputs[0].token_ids) >= tokens:
                return None
    return output


async def abandon(engine: Any, call: Call) -> RequestOutput | None:
    """Return the answer, or None if it was abandoned in time."""
    if call.abort == "after tokens":
        return await last(engine, call, call.patience)
    task = asyncio.ensure_future(last(engine, call))
    await asyncio.sleep(0 if call.abort == "at once" else call.patience)
    if task.done():
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--process", action="store_true", help="run the core in a separate process")
    args = parser.parse_args()
    print(run(args.seed, args.requests, args.process).text())


if __name__ == "__main__":
    main()
