"""Which split of a number of devices is best for a load: replicas, ranks, an encoder apart, prefill apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .costs import Costs, Link, Machine, Model, at, kv_capacity, roofline
from .engine import Limits
from .load import Kind, Load, make_requests
from .simulate import Result, Setup, quantile, simulate

_STEPS = 7  # of the search for the largest rate: within 1 % of the rate that is surely too large
_HEAD = """\
| split | requests/s | tokens/s | first token p50 / p99 s | token gap p50 / p99 ms | busy |
|---|---|---|---|---|---|
"""
_LEAST = 300  # requests of a simulation


@dataclass(frozen=True)
class Split:
    """How devices are used. `tp`, `pp`: ranks of each engine. `prefills`, `encoders`: as in `Setup`."""

    replicas: int
    tp: int = 1
    pp: int = 1
    prefills: int = 0
    encoders: int = 0

    @property
    def devices(self) -> int:
        return (self.replicas + self.prefills) * self.tp * self.pp + self.encoders

    def __str__(self) -> str:
        parts = [f"{self.replicas} x TP {self.tp}" + (f" x PP {self.pp}" if self.pp > 1 else "")]
        parts += [f"{number} {name}" for number, name in ((self.prefills, "prefill"), (self.encoders, "encoder")) if number]
        return " + ".join(parts)


@dataclass(frozen=True)
class Goal:
    """Latency goals of 99 of 100 requests: seconds to the first token, and seconds between tokens."""

    first_token: float
    token_gap: float

    def holds(self, result: Result) -> bool:
        """Return whether all requests were answered, and 99 % of them in time."""
        return (
            len(result.finished) == len(result.jobs)
            and quantile(result.first_tokens, 0.99) <= self.first_token
            and quantile(result.token_gaps, 0.99) <= self.token_gap
        )


@dataclass(frozen=True)
class Case:
    """A question: a load on devices.

    Args:
        costs: measured, for an engine of one device; None: a roofline.
        seconds: time during which requests come; at least 300 come.
    """

    name: str
    model: Model
    machine: Machine
    devices: int
    mix: Sequence[Kind]
    goal: Goal
    limits: Limits = field(default_factory=Limits)
    costs: Costs | None = None
    seconds: float = 60.0


@dataclass(frozen=True)
class Row:
    """A row of the table. `rate`: the largest one, in requests per second, at which the goal holds; `result` is for it."""

    split: Split
    rate: float
    result: Result | None


def splits_of(devices: int, most_ranks: int = 8, layers: int = 1 << 30) -> Iterator[Split]:
    """Yield the ways to use devices: engines of equal size, and a quarter or half of them for prompts or for the encoder."""
    sizes = [2**power for power in range(most_ranks.bit_length()) if 2**power <= devices]
    for tp in sizes:
        for pp in sizes:
            engines = devices // (tp * pp)
            if tp * pp > most_ranks or pp > layers or engines * tp * pp != devices:
                continue
            yield Split(engines, tp, pp)
            if pp > 1:
                continue
            for part in sorted({engines // 4, engines // 2} - {0, engines}):
                yield Split(engines - part, tp, prefills=part)
            for encoders in sorted({devices // 8, devices // 4} - {0}):
                if encoders % tp == 0 and encoders < devices:
                    yield Split((devices - encoders) // tp, tp, encoders=encoders)


def setup_of(case: Case, split: Split) -> Setup | None:
    """Return the cluster of a split, or None if the model does not fit."""
    tokens = kv_capacity(case.model, case.machine, split.tp, split.pp)
    longest = max(3 * (kind.text_tokens + kind.output_tokens) // 2 + kind.items * kind.item_rows for kind in case.mix)
    if tokens < longest or (case.costs is not None and split.tp * split.pp > 1):
        return None
    return Setup(
        case.costs or roofline(case.model, case.machine, split.tp, split.pp),
        replace(case.limits, kv_tokens=tokens),
        split.replicas,
        split.prefills,
        split.encoders,
        case.model.kv_bytes,
        case.model.row_bytes,
        case.machine.network,
    )


def best_rate(case: Case, split: Split, seed: int = 0) -> Row:
    """Return the largest rate at which the goal holds, by bisection."""
    setup = setup_of(case, split)
    if setup is None:
        return Row(split, 0.0, None)

    def tried(rate: float) -> Result:
        count = max(_LEAST, int(rate * case.seconds))
        return simulate(setup, make_requests(Load(case.mix, rate, count), seed), seed)

    low, high, best = 0.0, most_rate(case, setup), None
    for _ in range(_STEPS):
        middle = (low + high) / 2
        result = tried(middle)
        if case.goal.holds(result):
            low, best = middle, result
        else:
            high = middle
    return Row(split, low, best)


def most_rate(case: Case, setup: Setup) -> float:
    """Return a rate that no cluster of this size reaches: of engines that always compute full steps and lose no time else."""
    costs, sequences, weights = setup.costs, setup.limits.max_num_seqs, sum(kind.weight for kind in case.mix)
    per_token = costs.step_seconds(sequences, sequences, 0) / sequences
    per_row = at(costs.step, setup.limits.max_num_batched_tokens) / setup.limits.max_num_batched_tokens
    seconds = 0.0
    for kind in case.mix:
        context = kind.output_tokens * kind.text_tokens * costs.per_context_token
        seconds += kind.weight / weights * (kind.output_tokens * per_token + kind.text_tokens * per_row + context)
    return 1.5 * (setup.replicas + setup.prefills) / seconds


def table(case: Case, splits: Sequence[Split], seed: int = 0) -> str:
    """Return a table in Markdown, the best split first. A split on which the model does not fit, or which never reaches the
    goal, has no rate."""
    rows = sorted((best_rate(case, split, seed) for split in splits), key=lambda row: -row.rate)
    return _HEAD + "".join(f"| {_cells(row)} |\n" for row in rows)


def _cells(row: Row) -> str:
    if row.result is None:
        return f"{row.split} | - | - | - | - | -"
    result, engines = row.result, row.split.replicas + row.split.prefills
    first, gaps = ([quantile(values, share) for share in (0.5, 0.99)] for values in (result.first_tokens, result.token_gaps))
    cells = (
        f"{row.rate:.3g}",
        f"{result.tokens_per_second:.0f}",
        f"{first[0]:.2f} / {first[1]:.2f}",
        f"{gaps[0] * 1e3:.0f} / {gaps[1] * 1e3:.0f}",
        f"{result.busy_seconds / engines / result.seconds:.0%}",
    )
    return " | ".join((str(row.split), *cells))


QWEN_7B = Model(28, 3584, 18944, 3584, 512, 152064, tower_weights=0.67e9)
QWEN_72B = Model(80, 8192, 29568, 8192, 1024, 152064, tower_weights=0.67e9)
QWEN_7B_INT4 = replace(QWEN_7B, weight_bytes=0.56)
H100 = Machine(400e12, 2.3e12, 70e9, Link(150e9, 15e-6), Link(25e9, 50e-6), overhead=1.5e-3, per_request=0.02)
"""Assumed rates of an H100 with NVLink and a 400 Gb/s port. Its peaks: 989 TFLOPS in bfloat16, 3.35 TB/s, 80 GB."""
CPU_NODE = Machine(8e12, 200e9, 200e9, Link(2.5e9, 60e-6), Link(2.5e9, 60e-6), overhead=3e-3, per_request=0.05)
"""A server with 48 cores that have AMX, eight channels of DDR5, 256 GB, 25 Gb/s Ethernet."""
CHAT = (Kind(7, 400, 200, repeats=0.0), Kind(3, 100, 150, items=1, item_rows=1024, repeats=0.2))
PAGES = (Kind(1, 60, 700, items=1, item_rows=2000),)

_CHAT, _PAGES = "chat with some images", "pages to text"
_INT4 = "Qwen2.5-VL-7B, int4"
CASES: Mapping[str, Case] = {
    "h100-chat-7b": Case(f"Qwen2.5-VL-7B, {_CHAT}, 8 H100", QWEN_7B, H100, 8, CHAT, Goal(2.0, 0.05)),
    "h100-pages-7b": Case(f"Qwen2.5-VL-7B, {_PAGES}, 8 H100", QWEN_7B, H100, 8, PAGES, Goal(10.0, 0.1)),
    "h100-chat-72b": Case(f"Qwen2.5-VL-72B, {_CHAT}, 8 H100", QWEN_72B, H100, 8, CHAT, Goal(2.0, 0.05), seconds=200.0),
    "cpu-chat-7b": Case(f"{_INT4}, {_CHAT}, 64 CPU nodes", QWEN_7B_INT4, CPU_NODE, 64, CHAT, Goal(15.0, 0.2), seconds=120.0),
    "cpu-pages-7b": Case(
        f"{_INT4}, {_PAGES}, 64 CPU nodes", QWEN_7B_INT4, CPU_NODE, 64, PAGES, Goal(120.0, 0.5), seconds=900.0
    ),
}
