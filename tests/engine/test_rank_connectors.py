"""Several ranks with connectors of KV blocks: answers have the bits of one process, and the ranks may be lost meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from family import ask, load_rows, save
from hostile import MODEL, asked, make_image
from parity import make_llm
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.engine.connectors.memory import MemoryConnector
from sensorium.engine.connectors.peer_server import PeerServer
from sensorium.engine.connectors.shared_memory import ROOT
from sensorium.engine.connectors.tensor_store import QUEUE_BYTES
from sensorium.engine.core.death_watch import state_of
from several_ranks import GREEDY, answers, peers, same_bodies  # noqa: F401
from waiting import LONG, wait_until

pytestmark = pytest.mark.usefixtures("same_bodies")
TEXT = "Read the text of the picture, line by line, and say what is on it. " * 3
PROMPTS = [asked(make_image(i), text=TEXT) for i in range(3)]
GENERATED = [SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)]
GENERATED += [SamplingParams(temperature=0.9, max_tokens=6, ignore_eos=True, seed=3)]
SMALL: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 2, "kv_cache_memory_bytes": 3 << 20, "warm_up": False}
SPLITS = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
FOUR = pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.full)


def tokens_of(llm: LLM, prompts: Sequence[Any] = PROMPTS) -> tuple[list[Any], int]:
    """Return the tokens of greedy and sampled answers, and the number of cached tokens of the greedy ones."""
    outputs = [[llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts] for params in GENERATED]
    assert not [output.error for part in outputs for output in part if output.error is not None]
    tokens = [[list(output.outputs[0].token_ids) for output in part] for part in outputs]
    return tokens, sum(output.num_cached_tokens or 0 for output in outputs[0])


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with LLM(MODEL, enable_prefix_caching=False, **SMALL) as llm:
        return tokens_of(llm)[0]


def connector(kind: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {"kv_connector": kind, "kv_role": role, "kv_connector_extra_config": extra}


def free_ports(count: int) -> int:
    """Return the first of consecutive ports that nobody listens on."""
    while True:
        with ExitStack() as opened:
            first = opened.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for number in range(1, count):
                    opened.enter_context(socket.create_server(("127.0.0.1", first + number)))
            except (OSError, OverflowError):
                continue
            return int(first)


@pytest.mark.parametrize("split", [*SPLITS, FOUR], ids=str)
def test_blocks_in_memory_outlive_their_eviction_and_sleep(split: Mapping[str, int], expected: list[Any]) -> None:
    with LLM(MODEL, kv_offloading_size=0.05, prefix_cache_bytes=1, **SMALL, **split) as llm:
        assert tokens_of(llm)[0] == expected
        tokens, cached = tokens_of(llm)
        assert tokens == expected
        assert cached > 100
        (stats,) = llm.stats.transfers
        assert (stats.connector, stats.damaged, stats.failed, stats.late, stats.skipped) == ("memory", 0, 0, 0, 0)
        assert stats.hits > 0
        llm.sleep()
        llm.wake_up()
        assert tokens_of(llm) == (expected, cached)
        rest = llm.explain().offloaded - int(0.05 * (1 << 30)) // llm.config.num_ranks - QUEUE_BYTES
        assert 0 < rest < 3 << 20, "a rank has its part of the memory"


def test_shared_memory_is_deleted_with_the_last_rank(expected: list[Any]) -> None:
    name = f"test-ranks-{os.getpid()}"
    transfer = connector("SharedMemoryConnector", name=name, max_bytes=64 << 20)
    with LLM(MODEL, kv_transfer_config=transfer, tensor_parallel_size=2, quarantine_seconds=0, **SMALL) as llm:
        assert tokens_of(llm)[0] == expected
        os.kill(peers(llm)[0], signal.SIGKILL)
        wait_until(lambda: llm.engine.loop.num_deaths > 0)
        assert tokens_of(llm)[0] == expected
        llm.reset_prefix_cache()
        tokens, cached = tokens_of(llm)
        assert tokens == expected
        assert cached > 100
    assert not (ROOT / f"sensorium-{os.geteuid()}-{name}").exists()


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_folder_has_the_parts_of_each_rank(split: Mapping[str, int], expected: list[Any], tmp_path: Path) -> None:
    """What one rank lacks, because it is damaged, is computed by all; blocks of another split are not found."""
    transfer = connector("ExampleConnector", shared_storage_path=str(tmp_path / "blocks"))
    with LLM(MODEL, kv_transfer_config=transfer, **SMALL, **split) as llm:
        assert tokens_of(llm)[0] == expected
    transfer["kv_role"] = "kv_consumer"
    with LLM(MODEL, kv_transfer_config=transfer, **SMALL, **split) as llm:
        tokens, cached = tokens_of(llm)
        assert tokens == expected
        assert cached > 100
    other = SPLITS[1 - SPLITS.index(dict(split))]
    for sizes in (other, {}):
        with LLM(MODEL, kv_transfer_config=transfer, **SMALL, **sizes) as llm:
            assert tokens_of(llm, PROMPTS[:1])[1] == 0
    first, second = (tmp_path / "blocks").iterdir()
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    assert not list(tmp_path.rglob("*.tmp"))
    for number, path in enumerate(first.iterdir()):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data if number % 2 else data[:-9])
    with LLM(MODEL, kv_transfer_config=transfer, **SMALL, **split) as llm:
        assert tokens_of(llm) == (expected, 0)
        (stats,) = llm.stats.transfers
        assert stats.damaged > 0
        assert stats.hits > 0


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_prefill_and_decode_engines_of_two_ranks_each(split: Mapping[str, int], expected: list[Any]) -> None:
    """Each rank of the one asks the rank of the other that has its number."""
    address = f"127.0.0.1:{free_ports(2)}"
    serving = connector("PeerConnector", "kv_producer", listen=address)
    asking = connector("PeerConnector", "kv_consumer", peers=[address], timeout_seconds=30)
    with LLM(MODEL, kv_transfer_config=asking, **SMALL, **split) as decode:
        with LLM(MODEL, kv_transfer_config=serving, kv_offloading_size=0.1, **SMALL, **split) as prefill:
            prefill.generate(PROMPTS[:2], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
            tokens, cached = tokens_of(decode, PROMPTS[:2])
            assert tokens == [part[:2] for part in expected]
            assert cached > 100
        decode.reset_prefix_cache()
        assert tokens_of(decode) == (expected, 0)
        (stats,) = decode.stats.transfers
        assert (stats.connector, stats.damaged) == ("peer", 0)
        assert stats.hits > 0
        assert stats.failed > 0


def test_a_port_that_another_rank_cannot_use_is_a_typed_error() -> None:
    port = free_ports(2)
    serving = connector("PeerConnector", listen=f"127.0.0.1:{port}")
    with socket.create_server(("127.0.0.1", port + 1)), pytest.raises(ConfigError) as caught:
        LLM(MODEL, kv_transfer_config=serving, kv_offloading_size=0.1, tensor_parallel_size=2, **SMALL)
    assert caught.value.info.param == "kv_transfer_config"
    assert str(port + 1) in str(caught.value)


@pytest.mark.parametrize("extra", [{"peers": ["h:1", "h:65535"]}, {"listen": "127.0.0.1:65535"}, {"listen": "127.0.0.1:0"}])
def test_each_rank_needs_a_port(extra: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(MODEL, kv_transfer_config=connector("PeerConnector", **extra), kv_offloading_size=1, tensor_parallel_size=2)
    assert caught.value.info.param == "kv_transfer_config"


@pytest.mark.parametrize(
    "name", ["gemma3", *(pytest.param(name, marks=pytest.mark.full) for name in ("lfm2_vl", "kimi_vl", "qwen3_vl_moe"))]
)
def test_stages_without_layers_of_a_group(name: str, tmp_path: Path) -> None:
    """The last stage has a layer with a window, and none of those that read all tokens."""
    row = load_rows()[name]
    folder = save(row, tmp_path / "model")
    prompts = [ask(row, case, seed).ours for seed, case in enumerate(row.default_cases())]
    with make_llm(row, folder) as llm:
        alone = answers(llm, prompts, GREEDY)
        plain = llm.generate(prompts, GENERATED[0], use_tqdm=False)
    options = {"kv_offloading_size": 0.05, "prefix_cache_bytes": 1, "pipeline_parallel_size": 2}
    with make_llm(row, folder, **options) as llm:
        assert answers(llm, prompts, GREEDY) == alone
        again = llm.generate(prompts, GENERATED[0], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in again] == [output.outputs[0].token_ids for output in plain]
        assert sum(output.num_cached_tokens or 0 for output in again) > 0
        assert sum(stats.hits for stats in llm.stats.transfers) > 0


class Waiting(MemoryConnector):
    """A connector that answers once `go_on` is set. `is_asked`: somebody waits for it."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.is_asked, self.go_on = threading.Event(), threading.Event()

    def contains(self, keys: Sequence[str]) -> set[str]:
        self.is_asked.set()
        self.go_on.wait(LONG)
        return super().contains(keys)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_lost_while_blocks_are_read(
    rank: int, number: signal.Signals, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    port, waiting = free_ports(2), [Waiting(), Waiting()]
    with ExitStack() as opened:
        for index, kept in enumerate(waiting):
            opened.enter_context(closing(PeerServer([kept], f"127.0.0.1:{port + index}")))
            opened.callback(kept.go_on.set)
        asking = connector("PeerConnector", peers=[f"127.0.0.1:{port}"], timeout_seconds=60)
        llm = opened.enter_context(
            LLM(MODEL, kv_transfer_config=asking, kv_offloading_size=0.1, tensor_parallel_size=2, quarantine_seconds=0, **SMALL)
        )
        seen = [llm.engine.loop.core.pid, *peers(llm)]
        answered = opened.enter_context(ThreadPoolExecutor(1)).submit(llm.generate, PROMPTS, GENERATED[0], use_tqdm=False)
        wait_until(lambda: all(kept.is_asked.is_set() for kept in waiting))
        waiting[1 - rank].go_on.set()
        os.kill(seen[rank], number)
        wait_until(lambda: llm.engine.loop.num_deaths > 0)
        waiting[rank].go_on.set()
        for output, tokens in zip(answered.result(LONG), expected[0], strict=True):
            assert output.error is not None or list(output.outputs[0].token_ids) == tokens
            assert output.error is None or output.error.code == "engine_dead"
        assert tokens_of(llm)[0] == expected
        seen += [llm.engine.loop.core.pid, *peers(llm)]
    wait_until(lambda: all(state_of(pid) == "X" for pid in seen))
    assert not list(tmp_path.glob("sensorium*"))
    assert not [path for path in Path("/dev/shm").iterdir() if any(f"_{pid}_" in path.name for pid in seen)]
