"""`kv_offloading_size` and `kv_transfer_config` of an engine: the same answers, with blocks from memory and disk."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from hostile import MODEL, asked, make_image
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError
from sensorium.engine.config import make_config
from sensorium.engine.connectors.shared_memory import ROOT
from sensorium.engine.transfer_config import TOKEN_VARIABLE

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=6, ignore_eos=True, seed=3)
TEXT = "Read the text of the picture, line by line, and say what is on it. " * 3
PROMPTS = [asked(make_image(i), text=TEXT) for i in range(3)]
SMALL = {"max_model_len": 256, "max_num_seqs": 2, "kv_cache_memory_bytes": 3 << 20}


def answers(llm: LLM, prompts: list[dict[str, Any]] = PROMPTS) -> tuple[list[Any], int]:
    """Return the tokens of greedy and sampled answers, and the number of cached tokens of the greedy ones."""
    outputs = [[llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts] for params in (GREEDY, SAMPLED)]
    tokens = [[list(output.outputs[0].token_ids) for output in part] for part in outputs]
    return tokens, sum(output.num_cached_tokens or 0 for output in outputs[0])


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with LLM(MODEL, enable_prefix_caching=False, **SMALL) as llm:
        return answers(llm)[0]


@pytest.mark.parametrize("process", [False, True])
def test_blocks_in_memory_outlive_their_eviction_and_sleep(expected: list[Any], process: bool) -> None:
    with LLM(MODEL, kv_offloading_size=0.05, prefix_cache_bytes=1, engine_process=process, **SMALL) as llm:
        assert answers(llm)[0] == expected
        tokens, cached = answers(llm)
        assert tokens == expected
        assert cached > 100
        (stats,) = (stats for stats in llm.stats.transfers if stats.kind == "KV blocks")
        assert stats.connector == "memory"
        assert stats.hits > 0
        assert (stats.damaged, stats.failed, stats.late, stats.skipped) == (0, 0, 0, 0)
        llm.sleep()
        llm.wake_up()
        assert answers(llm) == (expected, cached)
        assert llm.explain().offloaded > 50 << 20


def test_a_later_engine_reads_blocks_from_disk_and_refuses_damaged_ones(expected: list[Any], tmp_path: Path) -> None:
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    transfer |= {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "blocks")}}
    with LLM(MODEL, kv_transfer_config=transfer, engine_process=True, **SMALL) as llm:
        assert answers(llm)[0] == expected
    with LLM(MODEL, kv_transfer_config=transfer | {"kv_role": "kv_consumer"}, **SMALL) as llm:
        tokens, cached = answers(llm)
        assert tokens == expected
        assert cached > 100
    with LLM(MODEL, kv_transfer_config=transfer, dtype="bfloat16", **SMALL) as llm:
        assert answers(llm, PROMPTS[:1])[1] == 0
    for path in (tmp_path / "blocks").glob("*/*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with LLM(MODEL, kv_transfer_config=transfer | {"kv_role": "kv_consumer"}, **SMALL) as llm:
        assert answers(llm) == (expected, 0)
        (stats,) = (stats for stats in llm.stats.transfers if stats.kind == "KV blocks")
        assert stats.damaged > 0


def test_prefill_and_decode_engines_with_copies_of_a_checkpoint(expected: list[Any], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    copy = shutil.copytree(MODEL, tmp_path / "copy", copy_function=shutil.copyfile)
    peer = {"kv_connector": "PeerConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"listen": address}}
    prefill = LLM(MODEL, kv_transfer_config=peer, kv_offloading_size=0.1, **SMALL)
    peer = peer | {"kv_role": "kv_consumer", "kv_connector_extra_config": {"peers": [address], "timeout_seconds": 30}}
    with LLM(copy, kv_transfer_config=peer, **SMALL) as decode:
        with prefill:
            with pytest.raises(ConfigError) as caught:
                LLM(MODEL, kv_transfer_config=prefill.engine.config.kv_transfer_config, kv_offloading_size=0.1, **SMALL)
            assert caught.value.info.param == "kv_transfer_config"  # the port is in use
            prefill.generate(PROMPTS[:2], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
            tokens, cached = answers(decode, PROMPTS[:2])
            assert tokens == [part[:2] for part in expected]
            assert cached > 100
        decode.reset_prefix_cache()
        assert answers(decode) == (expected, 0)
        (stats,) = decode.stats.transfers
        assert (stats.connector, stats.damaged) == ("peer", 0)
        assert stats.hits > 0
        assert stats.failed > 0


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"kv_offloading_size": -1}, "kv_offloading_size"),
        ({"kv_offloading_size": "4"}, "kv_offloading_size"),
        ({"kv_offloading_size": True}, "kv_offloading_size"),
        ({"kv_offloading_size": float("nan")}, "kv_offloading_size"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "kv_offloading_size"),
        ({"kv_offloading_size": 1, "parts": "encoder"}, "kv_offloading_size"),
        ({"kv_transfer_config": "x"}, "kv_transfer_config"),
        ({"kv_transfer_config": {}}, "kv_transfer_config"),
        ({"kv_transfer_config": {"kv_role": "kv_both"}}, "kv_transfer_config"),
        ({"kv_transfer_config": {"kv_role": "kv_both", "kv_connector": "NixlConnector"}}, "kv_transfer_config"),
        ({"kv_transfer_config": {"kv_role": "both", "kv_connector": "OffloadingConnector"}}, "kv_transfer_config"),
        ({"kv_transfer_config": {"kv_role": "kv_both", "kv_connector": "OffloadingConnector"}}, "kv_transfer_config"),
        (
            {
                "kv_transfer_config": {
                    "kv_role": "kv_both",
                    "kv_connector": "OffloadingConnector",
                    "kv_connector_extra_config": {"cpu_bytes": 5},
                }
            },
            "kv_transfer_config",
        ),
        ({"kv_transfer_config": {"kv_role": "kv_both", "kv_load_failure_policy": "fail"}}, "kv_transfer_config"),
        ({"kv_transfer_config": {"kv_role": "kv_both", "kv_rankk": 0}}, "kv_transfer_config"),
        ({"kv_offloading_backend": "lmcache"}, "kv_offloading_backend"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config("m", options)
    assert caught.value.info.param == param


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"listen": "0.0.0.0:9000"},  # other machines reach it, and there is no token
        {"listen": "127.0.0.1:9000"},  # nothing to serve
        {"listen": 9000},
        {"peers": ["h:1"], "listen": 0},
        {"peers": ["h:1"], "listen": False},
        {"peers": ["h:1"], "token": "\ud800secret"},
        {"peers": "127.0.0.1:9000"},
        {"peers": ["127.0.0.1"]},
        {"peers": ["127.0.0.1:99999"]},
        {"peers": ["h:1"], "token": 5},
        {"peers": ["h:1"], "timeout_seconds": 0},
        {"peer": ["h:1"]},
    ],
)
def test_peers_are_checked(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    config = {"kv_connector": "PeerConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    with pytest.raises(ConfigError) as caught:
        make_config("m", {"kv_transfer_config": config})
    assert caught.value.info.param == "kv_transfer_config"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"parts": "encoder"},
        {"kv_transfer_config": '{"kv_connector_extra_config": {"token": "secret"}}'},
        {"kv_transfer_config": {"kv_connector_extra_config": [("token", "secret")]}},
        {
            "kv_transfer_config": {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {"connectors": {"token": "secret"}},
            }
        },
        {"kv_transfer_config": {"kv_connector_extra_config": {"peers": ["h:1"], "token": ["secret"]}}},
    ],
)
def test_no_error_shows_the_token(options: dict[str, Any]) -> None:
    config = {"kv_connector": "PeerConnector", "kv_role": "kv_both"}
    secret = config | {"kv_connector_extra_config": {"peers": ["h:1"], "token": "secret"}}
    assert "secret" not in repr(make_config("m", {"kv_transfer_config": secret}))
    changed = options.get("kv_transfer_config", secret)
    changed = config | changed if isinstance(changed, dict) else changed
    with pytest.raises(ConfigError) as caught:
        make_config("m", options | {"kv_transfer_config": changed})
    assert caught.value.info.param == "kv_transfer_config"
    assert "secret" not in f"{caught.value}{caught.value.info}"


def test_the_token_comes_from_the_options_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    config = {"kv_connector": "PeerConnector", "kv_role": "kv_producer"}
    config |= {"kv_connector_extra_config": {"listen": "0.0.0.0:9000", "timeout_seconds": 5}}
    options = make_config("m", {"kv_transfer_config": config, "kv_offloading_size": 1}).kv_transfer
    assert (options.token, options.listen, options.seconds) == ("secret", "0.0.0.0:9000", 5.0)
    assert "secret" not in repr(options)


@pytest.mark.parametrize("name", ["ECExampleConnector", "ECSharedStorageConnector"])
def test_encoder_rows_are_shared_through_a_folder(name: str, tmp_path: Path) -> None:
    config = {"ec_connector": name, "ec_role": "ec_consumer", "engine_id": "a"}
    config["ec_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}
    options = make_config("m", {"ec_transfer_config": config, "encoder_cache_dir_bytes": 7}).ec_transfer
    assert (options.folder, options.folder_bytes, options.rows, options.items) == (str(tmp_path), 7, True, False)
    with pytest.raises(ConfigError) as caught:
        make_config("m", {"ec_transfer_config": config, "encoder_cache_dir": str(tmp_path)})
    assert caught.value.info.param == "ec_transfer_config"


def test_encoder_rows_and_processed_items_are_shared_in_memory() -> None:
    extra = {"name": f"test-rows-{os.getpid()}", "max_bytes": 64 << 20, "keeps": ["encoder_rows", "processed_items"]}
    transfer = {"ec_connector": "ECSharedMemoryConnector", "ec_role": "ec_both", "ec_connector_extra_config": extra}
    with LLM(MODEL, ec_transfer_config=transfer, engine_process=True, **SMALL) as first:
        expected = answers(first)[0]
        os.kill(first.engine.loop.core.pid, signal.SIGKILL)
        with LLM(MODEL, ec_transfer_config=transfer, engine_process=True, **SMALL) as second:
            assert answers(second)[0] == expected
            assert {(stats.kind, stats.connector, stats.hits > 0) for stats in second.stats.transfers} == {
                ("encoder rows", "shared_memory", True),
                ("processed items", "shared_memory", True),
            }
            assert second.stats.encoder_calls == 0
            assert second.explain().kept_rows == 64 << 20
    assert not list(ROOT.glob(f"*{extra['name']}"))


@pytest.mark.parametrize(
    "changes",
    [
        {"ec_connector": "ECMooncakeConnector"},
        {"ec_connector": None},
        {"ec_role": "kv_both"},
        {"ec_connector_extra_config": {}},
        {"ec_connector_extra_config": {"shared_storage_path": "/x", "port": 5}},
        {"ec_connector_extra_config": "/x"},
        {"ec_connector_extra_config": {"shared_storage_path": __file__}},
        {"ec_connector_extra_config": {"shared_storage_path": "/x", "keeps": ["kv_blocks"]}},
        {"ec_connector_extra_config": {"shared_storage_path": "/x", "keeps": []}},
        {"ec_connector": "ECSharedMemoryConnector", "ec_connector_extra_config": {"name": "a"}},
        {"ec_connector": "ECSharedMemoryConnector", "ec_connector_extra_config": {"name": "a/b", "max_bytes": 5}},
        {"ec_port": 14579},
    ],
)
def test_other_connectors_of_encoder_rows_are_refused_by_name(changes: dict[str, Any]) -> None:
    config = {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}
    config = config | {"ec_connector_extra_config": {"shared_storage_path": "/x"}} | changes
    with pytest.raises(ConfigError) as caught:
        make_config("m", {"ec_transfer_config": config})
    assert caught.value.info.param == "ec_transfer_config"
    with pytest.raises(ConfigError):
        make_config("m", {"ec_transfer_config": "ECExampleConnector"})


def test_several_connectors_and_none() -> None:
    parts = [
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 5}},
        {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "/x", "max_bytes": 7}},
    ]
    several = {"kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"connectors": parts}}
    options = make_config("m", {"kv_transfer_config": several, "kv_offloading_size": 1}).kv_transfer
    assert (options.memory_bytes, options.folder, options.folder_bytes) == (5 + (1 << 30), "/x", 7)
    assert (options.saves, options.loads) == (True, False)
    assert not make_config("m", {"kv_offloading_size": 0}).kv_transfer


def test_engines_share_blocks_in_memory_and_outlive_each_other(expected: list[Any]) -> None:
    name = f"test-{os.getpid()}"
    transfer = {"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both"}
    transfer |= {"kv_connector_extra_config": {"name": name, "max_bytes": 64 << 20}}
    folder = ROOT / f"sensorium-{os.geteuid()}-{name}"
    with LLM(MODEL, kv_transfer_config=transfer, engine_process=True, **SMALL) as first:
        assert answers(first)[0] == expected
        with LLM(MODEL, kv_transfer_config=transfer, engine_process=True, **SMALL) as second:
            os.kill(first.engine.loop.core.pid, signal.SIGKILL)
            tokens, cached = answers(second)
            assert tokens == expected
            assert cached > 100
            with LLM(MODEL, kv_transfer_config=transfer, dtype="bfloat16", **SMALL) as other:
                assert answers(other, PROMPTS[:1])[1] == 0
            assert answers(first)[0] == expected  # by a new process
            for path in folder.glob("*/*.safetensors"):
                path.write_bytes(path.read_bytes()[:-1])
            second.reset_prefix_cache()
            assert answers(second)[0] == expected
            stats = next(stats for stats in second.stats.transfers if stats.kind == "KV blocks")
            assert stats.connector == "shared_memory"
            assert stats.damaged > 0
            assert second.explain().offloaded > 64 << 20
    assert not folder.exists()
