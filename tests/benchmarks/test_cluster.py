"""The simulated cluster obeys laws that hold for every queue, and the limits that are known in closed form."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest

from benchmarks.cluster.__main__ import main
from benchmarks.cluster.costs import Costs, Link, at, kv_capacity, roofline, wire_seconds
from benchmarks.cluster.engine import Limits, RowCache
from benchmarks.cluster.load import Item, Kind, Load, Request, make_requests
from benchmarks.cluster.simulate import ATTEMPTS, Scaling, Setup, quantile, simulate
from benchmarks.cluster.splits import CASES, Split, best_rate, setup_of, splits_of, table

COSTS = Costs(step=[(0, 0.01), (100, 0.02)], per_sequence=1e-4, per_context_token=1e-6, encode=[(0, 0.0), (100, 0.05)])
MIX = (Kind(2, 100, 40), Kind(1, 50, 20, items=1, item_rows=64, repeats=0.5))
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=256, kv_tokens=4096)
SETUP = Setup(COSTS, LIMITS, replicas=2, kv_bytes=1000, row_bytes=500, network=Link(1e6, 0.001))


def one_by_one(services: list[int], rate: float, seed: int) -> list[float]:
    """Return the seconds in a system that serves one request at a time, for these numbers of seconds; check Lindley's law."""
    random, now, requests = Random(seed), 0.0, []
    for number, seconds in enumerate(services):
        now += random.expovariate(rate)
        requests.append(Request(number, now, seconds, 1))
    jobs = simulate(Setup(Costs(step=[(0, 0.0), (1, 1.0)]), Limits(1, 1 << 40, 1 << 40)), requests).jobs
    free_at = 0.0
    for job in jobs:
        free_at = max(free_at, job.request.arrival) + job.request.prompt_tokens
        assert job.finished == pytest.approx(free_at, rel=1e-12)
    return [job.finished - job.request.arrival for job in jobs]


def test_one_server_waits_as_the_formulas_say() -> None:
    """M/M/1 and M/D/1 at 60 % (Pollaczek-Khinchine), with service times of 1000 s in mean, which are nearly continuous."""
    count, mean, rho, random = 50_000, 1000, 0.6, Random(5)
    exponential = [max(1, round(random.expovariate(1 / mean))) for _ in range(count)]
    assert sum(one_by_one(exponential, rho / mean, 1)) / count == pytest.approx(mean / (1 - rho), rel=0.04)
    constant = sum(one_by_one([mean] * count, rho / mean, 1)) / count
    assert constant == pytest.approx(mean + rho * mean / (2 * (1 - rho)), rel=0.04)


@pytest.mark.parametrize(
    "setup",
    [
        SETUP,
        replace(SETUP, prefills=1),
        replace(SETUP, encoders=2, routing="least"),
        replace(SETUP, mean_life=20.0, restart_seconds=3.0),
        replace(SETUP, prefills=2, encoders=1, mean_life=15.0, restart_seconds=1.0),
        replace(SETUP, scaling=Scaling(1, 4, 6.0, start_seconds=2.0, period=1.0), routing="turns"),
        replace(SETUP, limits=replace(LIMITS, kv_tokens=150)),  # some requests can never fit
        replace(SETUP, replicas=0, scaling=Scaling(0, 2, 6.0, start_seconds=2.0, period=1.0)),
    ],
)
def test_each_request_ends_once(setup: Setup) -> None:
    """Requests are finished, or were computed too often, or never fit. Little's law holds exactly."""
    requests = make_requests(Load(MIX, 5.0, 400), 3)
    result = simulate(setup, requests, seed=1)
    assert [job.request for job in result.jobs] == requests
    for job in result.jobs:
        if job.finished is None:
            assert job.attempts == ATTEMPTS or job.kv_tokens > setup.limits.kv_tokens
            continue
        assert job.generated == job.request.output_tokens
        assert job.started is not None
        assert job.request.arrival < job.started <= job.finished
    if len(result.finished) == len(requests):
        assert result.area == pytest.approx(sum(result.latencies))
    assert result.busy_seconds > 0
    assert simulate(setup, requests, seed=1).latencies == result.latencies


def test_an_idle_cluster_needs_the_sum_of_its_costs() -> None:
    request = Request(0, 1.0, 164, 3, [Item(0, 64)])
    costs, network = replace(COSTS, per_request=0.5), SETUP.network
    prefill, decode = at(costs.step, 164) + 1e-4, [at(costs.step, 1) + 1e-4 + tokens * 1e-6 for tokens in (165, 166)]
    encode, rows, cache = at(costs.encode, 64), network.seconds(64 * 500), network.seconds(164 * 1000)
    for setup, first, rest in (
        (SETUP, encode + prefill, sum(decode)),
        (replace(SETUP, encoders=1), encode + rows + prefill, sum(decode)),
        (replace(SETUP, prefills=1), encode + prefill, cache + sum(decode)),
    ):
        (job,) = simulate(replace(setup, costs=costs), [request]).jobs
        assert job.started == pytest.approx(1.0 + 0.5 + first)
        assert job.finished == pytest.approx(1.0 + 0.5 + first + rest)


def test_more_load_waits_longer_and_more_engines_less() -> None:
    def latency(rate: float, **changes: object) -> float:
        result = simulate(replace(SETUP, routing="least", **changes), make_requests(Load(MIX, rate, 600), 7))
        return sum(result.latencies) / 600

    by_rate = [latency(rate) for rate in (0.5, 1, 2, 4, 8, 16, 32)]
    assert by_rate == sorted(by_rate)
    by_engines = [latency(16, replicas=number) for number in (1, 2, 4, 8)]
    assert by_engines == sorted(by_engines, reverse=True)
    by_batch = [latency(16, limits=replace(LIMITS, max_num_seqs=number)) for number in (1, 2, 4, 8)]
    assert by_batch == sorted(by_batch, reverse=True)
    shapes = [[replace(request, arrival=0.0) for request in make_requests(Load(MIX, rate, 50), 7)] for rate in (1, 9)]
    assert shapes[0] == shapes[1]


def test_requests_with_the_same_item_meet_its_rows() -> None:
    mix = (Kind(1, 20, 2, items=1, item_rows=100, repeats=0.9),)
    requests = make_requests(Load(mix, 0.5, 400), 2)
    setup = replace(SETUP, replicas=4)
    busy = {name: simulate(replace(setup, routing=name), requests).busy_seconds for name in ("content", "turns")}
    assert busy["content"] < busy["turns"]
    cache = RowCache(150)
    assert [cache.missing([Item(key, 100)]) for key in (0, 0, 1, 0)] == [100, 0, 100, 100]


def test_failures_cost_time_and_end_what_fails_too_often() -> None:
    requests = make_requests(Load(MIX, 2.0, 300), 1)
    never, rarely, often = (
        simulate(replace(SETUP, mean_life=life, restart_seconds=2.0), requests) for life in (None, 200.0, 1.0)
    )
    assert len(never.finished) == len(rarely.finished) == 300
    assert sum(never.latencies) < sum(rarely.latencies)
    assert 0 < len(often.finished) < 300
    assert all(job.attempts == ATTEMPTS for job in often.jobs if job.finished is None)
    assert never.engine_seconds > often.engine_seconds / often.seconds * never.seconds


def test_replicas_follow_the_load_within_their_limits() -> None:
    def scaled(rate: float, most: int) -> object:
        scaling = Scaling(1, most, 4.0, start_seconds=1.0, period=1.0, patience=3)
        return simulate(replace(SETUP, replicas=1, scaling=scaling), make_requests(Load(MIX, rate, 500), 1))

    quiet, busy, full = scaled(0.2, 8), scaled(12.0, 8), scaled(100.0, 3)
    assert quiet.most_replicas == 1
    assert 1 < busy.most_replicas <= 8
    assert full.most_replicas == 3
    assert quiet.engine_seconds == pytest.approx(quiet.seconds, rel=0.1)
    assert busy.engine_seconds < 8 * busy.seconds
    fixed = simulate(replace(SETUP, replicas=1), make_requests(Load(MIX, 12.0, 500), 1))
    assert sum(busy.latencies) < sum(fixed.latencies)


def test_costs_are_read_from_a_table() -> None:
    assert [at([(1, 1.0), (3, 2.0), (5, 6.0)], size) for size in (0, 1, 2, 4, 6)] == [0.5, 1.0, 1.5, 4.0, 8.0]
    assert Costs.from_json(json.loads(json.dumps(COSTS.as_json()))) == replace(
        COSTS, step=[(0.0, 0.01), (100.0, 0.02)], encode=[(0.0, 0.0), (100.0, 0.05)]
    )
    with pytest.raises(ValueError, match="rising"):
        Costs.from_json({**COSTS.as_json(), "step": [[2, 1.0], [1, 2.0]]})
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.25, 0.5, 0.99)] == [1.0, 2.0, 4.0]
    with pytest.raises(ValueError, match="rate"):
        make_requests(Load(MIX, 0.0, 5), 1)


def test_ranks_hold_more_and_wait_for_each_other() -> None:
    case = CASES["h100-chat-72b"]
    model, machine = case.model, case.machine
    assert kv_capacity(model, machine) < 0 < kv_capacity(model, machine, 4) < kv_capacity(model, machine, 8)
    assert setup_of(case, Split(8)) is None
    alone, four = roofline(model, machine), roofline(model, machine, 4)
    assert alone.step_seconds(1, 1, 0) / 4 < four.step_seconds(1, 1, 0) < alone.step_seconds(1, 1, 0)
    assert wire_seconds(model, machine, 10, 1, 1) == 0.0
    assert roofline(model, machine, 1, 4).step_seconds(1, 1, 0) > alone.step_seconds(1, 1, 0)
    assert all(split.devices == 8 for split in splits_of(8))
    assert len({str(split) for split in splits_of(8)}) == len([*splits_of(8)])


def test_a_table_has_the_best_split_first() -> None:
    case = replace(CASES["h100-chat-7b"], devices=2, seconds=2.0)
    splits = [Split(1), Split(2), Split(1, 2), Split(1, prefills=1)]
    rates = {str(split): best_rate(case, split).rate for split in splits}
    lines = table(case, splits).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == sorted(rates, key=lambda name: -rates[name])
    assert 0 < rates["1 x TP 1"] < rates["2 x TP 1"]
    row = best_rate(case, Split(2))
    assert case.goal.holds(row.result)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "cpu-chat-7b", "--devices", "1", "--seconds", "5"]) == 0
    assert "| 1 x TP 1 |" in capsys.readouterr().out
