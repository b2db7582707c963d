"""Ranks are killed or stopped at random moments: requests end with typed errors, the ranks start again, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hostile import MODEL, asked, make_image
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import EngineDeadError
from sensorium.engine.core.death_watch import state_of
from several_ranks import children_of, peers, same_bodies  # noqa: F401
from waiting import LONG, wait_until

pytestmark = pytest.mark.usefixtures("same_bodies")
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "limit_mm_per_prompt": {"image": 2}, "warm_up": False}
PROMPTS = [asked(make_image(1)), "The sky is", asked(make_image(2), make_image(1))]
LONG_ANSWER = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


def ranks_of(llm: LLM) -> list[int]:
    """Return the process ids of all ranks."""
    return [llm.engine.loop.core.pid, *peers(llm)]


def strike(pids: list[int], rng: random.Random) -> None:
    """Kill or stop one of these processes, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(rng.choice(pids), rng.choice((signal.SIGKILL, signal.SIGSTOP)))


@pytest.mark.parametrize(
    ("kills", "split"),
    [
        (3, {"tensor_parallel_size": 2}),
        pytest.param(50, {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}, marks=pytest.mark.full),
        pytest.param(50, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_random_kills(kills: int, split: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While three requests are answered; a third of the times also while the ranks start again."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rng, seen, longest = random.Random(kills), set[int](), 0.0
    with LLM(MODEL, **OPTIONS, **split, engine_restarts=3 * kills) as llm, ThreadPoolExecutor(1) as pool:
        whole = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, LONG_ANSWER, use_tqdm=False)]
        for _ in range(kills):
            wait_until(lambda: state_of(llm.engine.loop.core.pid) not in "ZX")  # the next one may not have been started yet
            deaths, pids = llm.engine.loop.num_deaths, ranks_of(llm)
            seen |= set(pids)
            answered = pool.submit(llm.generate, PROMPTS, LONG_ANSWER, use_tqdm=False)
            time.sleep(rng.random())
            strike(pids, rng)
            started = time.monotonic()
            wait_until(lambda deaths=deaths: llm.engine.loop.num_deaths > deaths)
            longest = max(longest, time.monotonic() - started)
            for output, tokens in zip(answered.result(LONG), whole, strict=True):
                assert output.error is not None or output.outputs[0].token_ids == tokens
                assert output.error is None or output.error.code == "engine_dead"
            if rng.random() < 1 / 3:
                wait_until(lambda pids=pids: llm.engine.loop.core.pid != pids[0])
                time.sleep(rng.random())
                strike(ranks_of(llm), rng)
                seen |= set(ranks_of(llm))
        print(f"a kill was noticed after {longest:.1f} s, at most")
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, LONG_ANSWER, use_tqdm=False)] == whole
        seen |= set(ranks_of(llm))
    wait_until(lambda: all(state_of(pid) == "X" for pid in seen))
    assert not list(tmp_path.glob("sensorium*"))
    assert not [path for path in Path("/dev/shm").iterdir() if any(f"_{pid}_" in path.name for pid in seen)]


def load() -> LLM | EngineDeadError:
    try:
        return LLM(MODEL, **OPTIONS, tensor_parallel_size=2)
    except EngineDeadError as error:
        return error


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_while_it_loads_ends_all(rank: int, number: signal.Signals) -> None:
    others = set(children_of(os.getpid(), "core.server"))
    pids = list[int]()

    def find_ranks() -> bool:
        pids[:] = set(children_of(os.getpid(), "core.server")) - others
        pids.extend(child for pid in tuple(pids) for child in children_of(pid, "rank_server"))
        return len(pids) == 2

    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(load)
        wait_until(find_ranks)
        os.kill(pids[rank], number)
        assert isinstance(loaded.result(LONG), EngineDeadError)
    wait_until(lambda: all(state_of(pid) == "X" for pid in pids))
