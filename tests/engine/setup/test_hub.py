"""Models by name: from the cache, downloaded, continued, refused. A server on localhost stands for the Hub."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from fake_hub import LARGE, FakeHub, blob_hash
from hub_fixtures import NAME, TINY, environment
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import CheckpointError, ConfigError, SensoriumError
from sensorium.cli.list import describe
from sensorium.engine.config import EngineConfig, make_config
from sensorium.engine.setup.doctor import describe_checkpoint, plan_of
from sensorium.engine.setup.hub import find_folder, find_model
from sensorium.engine.setup.hub_cache import CachedModel, RemoteFile, is_name, remote_weights, size_of, small_files
from waiting import wait_until

WEIGHTS = "model.safetensors"
NEEDED = {path.name for path in TINY.iterdir()} - {"README.md"}


def refused(code: str, *args: object, **options: object) -> str:
    """Return the message of the error with this code."""
    with pytest.raises(SensoriumError) as caught:
        find_folder(*(args or (NAME,)), **options)  # type: ignore[arg-type]
    assert caught.value.info.code == code, caught.value
    return str(caught.value)


def shard(hub: FakeHub, names: list[str]) -> None:
    """Replace the weights by an index that names these shards."""
    del hub.files[WEIGHTS]
    index = {"weight_map": {f"tensor{i}": name for i, name in enumerate(names)}}
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()


def start_download(hub: FakeHub, tmp_path: Path) -> subprocess.Popen[str]:
    """Download in another process, which prints the folder."""
    code = f"from sensorium.engine.setup.hub import find_folder; print(find_folder({NAME!r}))"
    env = os.environ | environment(hub, tmp_path / "cache")
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)


def test_first_download_then_cache(hub: FakeHub, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM(NAME, max_model_len=64, device="cpu") as llm:
        assert llm.config.revision == hub.commit
        folder = Path(llm.config.model)
        (first,) = llm.generate(["A"], params)
    assert folder == tmp_path / "cache" / "models--org--tiny-vl" / "snapshots" / hub.commit
    assert hub.fetched() == NEEDED
    assert {path.name for path in folder.iterdir()} == NEEDED
    for name in NEEDED:
        assert (folder / name).read_bytes() == hub.files[name]
        assert (folder / name).resolve().name == blob_hash(hub.files[name])
    count = len(hub.requests)
    with LLM(NAME, max_model_len=64, device="cpu", offline=True) as llm:
        (second,) = llm.generate(["A"], params)
        assert llm.explain().rows()
    with LLM(TINY, max_model_len=64, device="cpu") as llm:
        (third,) = llm.generate(["A"], params)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == third.outputs[0].token_ids
    assert find_folder(NAME) == find_folder(NAME, hub.commit) == folder
    assert len(hub.requests) == count, "a complete cache needs no network"


def test_huggingface_hub_reads_the_cache(hub: FakeHub) -> None:
    from huggingface_hub import scan_cache_dir, snapshot_download

    folder = find_folder(NAME)
    (repo,) = scan_cache_dir().repos
    (revision,) = repo.revisions
    assert (repo.repo_id, revision.commit_hash, revision.refs) == (NAME, hub.commit, {"main"})
    assert {file.file_name for file in revision.files} == NEEDED
    assert Path(snapshot_download(NAME, allow_patterns=["*.safetensors"], local_files_only=True)) == folder


def test_snapshot_of_another_program_is_used_and_completed(hub: FakeHub, caplog: pytest.LogCaptureFixture) -> None:
    folder = find_folder(NAME)
    shutil.rmtree(folder.parents[1] / "trees")
    assert find_folder(NAME, offline=True) == folder
    assert "may be incomplete" in caplog.text
    (folder / "preprocessor_config.json").unlink()
    hub.requests.clear()
    assert find_folder(NAME) == folder
    assert hub.fetched() == set(), "its blob is still there"
    assert (folder / "preprocessor_config.json").is_file()


def test_an_adapter_by_name_names_its_base(hub: FakeHub, tmp_path: Path) -> None:
    """The adapter's small weight file is downloaded for the doctor too. Its base model comes from a folder or the Hub."""
    base = tmp_path / "base"
    shutil.copytree(TINY, base)
    module = "model.language_model.layers.0.mlp.down_proj"
    outputs, inputs = load_file(base / WEIGHTS)["model.layers.0.mlp.down_proj.weight"].shape
    pair = {"A": torch.zeros(2, inputs), "B": torch.zeros(outputs, 2)}
    save_file({f"base_model.model.{module}.lora_{name}.weight": one for name, one in pair.items()}, tmp_path / "adapter")
    settings = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": str(base)}
    hub.files = {
        "adapter_config.json": json.dumps(settings).encode(),
        "adapter_model.safetensors": (tmp_path / "adapter").read_bytes(),
        "README.md": b"",
    }
    assert describe_checkpoint(NAME)["architecture"] == "Qwen2_5_VLForConditionalGeneration"
    assert hub.fetched() == {"adapter_config.json", "adapter_model.safetensors"}
    assert describe(CachedModel(NAME), "main", hub.commit)["kind"] == "adapter"
    with LLM(NAME, max_model_len=64, device="cpu", offline=True) as llm:
        assert (llm.config.model, Path(str(llm.config.adapter)).name) == (str(base), hub.commit)


def test_files_beside_the_weights_only(hub: FakeHub) -> None:
    config = find_model(EngineConfig(NAME), weights=False)
    assert describe_checkpoint(config.model)["architecture"] == "Qwen2_5_VLForConditionalGeneration"
    assert plan_of(NAME, {"device": "cpu"}).rows() == plan_of(config.model, {"device": "cpu"}).rows()
    assert hub.fetched() == NEEDED - {WEIGHTS}
    assert not CachedModel(NAME).is_complete(hub.commit)
    find_folder(NAME)
    assert hub.fetched() == NEEDED


def test_architecture_is_checked_before_the_weights_are_downloaded(hub: FakeHub) -> None:
    hub.files["config.json"] = json.dumps({"architectures": ["Nothing"]}).encode()
    with pytest.raises(ConfigError, match="Nothing"):
        LLM(NAME)
    assert WEIGHTS not in hub.fetched()


def test_revisions(hub: FakeHub) -> None:
    first = hub.commit
    hub.branches["refs/pr/1"] = "b" * 40
    assert find_folder(NAME, "refs/pr/1").name == "b" * 40
    assert find_folder(NAME).name == first
    assert hub.sent[WEIGHTS] == len(hub.files[WEIGHTS]), "both revisions share the blob"
    hub.branches["main"] = "c" * 40
    assert find_folder(NAME).name == first
    assert find_folder(NAME, update=True).name == "c" * 40
    assert find_folder(NAME).name == "c" * 40
    assert find_model(EngineConfig(NAME, revision="refs/pr/1")).revision == "b" * 40
    assert "no revision 'v9'" in refused("not_found", NAME, "v9")
    for wrong in ("../main", "a/../b", "/main", "a b", "-f", ".."):
        assert "revision=" in refused("invalid_config", NAME, wrong)


def test_interrupted_download_is_continued(hub: FakeHub) -> None:
    size, half = len(hub.files[WEIGHTS]), 3 << 20
    hub.cut[WEIGHTS] = [half, 0, 0, 0, 0, 0]
    assert "cannot be reached" in (said := refused("unreachable"))
    assert said.endswith("no folder of this name exists here")
    blobs = CachedModel(NAME).blobs
    (partial,) = blobs.glob("*.incomplete")
    done = partial.stat().st_size
    assert 0 < done <= half
    hub.requests.clear()
    folder = find_folder(NAME)
    assert [asked for _, path, asked in hub.requests if path.endswith(WEIGHTS)] == [f"bytes={done}-"]
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert hub.sent[WEIGHTS] == half + size - done
    assert not list(blobs.glob("*.incomplete"))


def test_killed_process_is_continued(hub: FakeHub, tmp_path: Path) -> None:
    hub.hold[WEIGHTS] = 3 << 20
    process = start_download(hub, tmp_path)
    partial = CachedModel(NAME).blobs / f"{blob_hash(hub.files[WEIGHTS])}.incomplete"
    wait_until(lambda: size_of(partial) >= 2 << 20)
    process.kill()
    process.communicate()
    done = size_of(partial)
    hub.released.set()
    hub.requests.clear()
    folder = find_folder(NAME)
    assert [asked for _, path, asked in hub.requests if path.endswith(WEIGHTS)] == [f"bytes={done}-"]
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_broken_connections_are_continued_in_one_call(hub: FakeHub) -> None:
    hub.cut[WEIGHTS] = [2 << 20, 0, 2 << 20, 1 << 20]
    folder = find_folder(NAME)
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert sum(path.endswith(WEIGHTS) for _, path, _ in hub.requests) == 5


def test_server_without_ranges(hub: FakeHub) -> None:
    hub.ranges, hub.cut[WEIGHTS] = False, [2 << 20]
    folder = find_folder(NAME)
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_damaged_bytes_are_refused(name: str, hub: FakeHub) -> None:
    assert (len(hub.files[name]) >= LARGE) == (name == WEIGHTS), "one SHA-256 and one of git's hashes"
    hub.damaged = {name}
    assert f"{name} of {NAME} arrived damaged" in refused("checkpoint")
    cached = CachedModel(NAME)
    assert not list(cached.blobs.glob(f"{blob_hash(hub.files[name])}*"))
    hub.damaged = set()
    assert cached.is_complete(find_folder(NAME).name)


def test_damaged_part_is_downloaded_again(hub: FakeHub) -> None:
    blobs = CachedModel(NAME).blobs
    blobs.mkdir(parents=True)
    (blobs / f"{blob_hash(hub.files[WEIGHTS])}.incomplete").write_bytes(b"x" * 1000)
    assert (find_folder(NAME) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_gated(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated, hub.token = True, "secret"
    said = refused("gated")
    assert f"accept its licence at {hub.url}/{NAME}" in said
    assert "HF_TOKEN" in said
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert find_folder(NAME)


def test_missing(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "org/nothing is neither a folder nor a model" in refused("not_found", "org/nothing")
    (tmp_path / "org" / "tiny-vL2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "did you mean the folder org/tiny-vL2?" in refused("not_found", "org/tiny-vl2")
    hub.private, hub.token = True, "secret"
    assert "set HF_TOKEN if the model is private" in refused("not_found")


def test_no_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    assert "and offline is set" in refused("unreachable", NAME, offline=True)
    hub.status = 503
    assert "answers 503" in refused("unreachable")
    assert hub.fetched() == set()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "give the path of a folder" in refused("unreachable")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused("unreachable")


def test_server_that_is_no_hub(hub: FakeHub) -> None:
    hub.branches["main"] = "../../etc"
    assert "did not answer as the Hub does" in refused("unreachable")
    hub.branches["main"], hub.branches["d" * 40] = "e" * 40, "e" * 40
    assert "is not the commit of" in refused("unreachable", NAME, "d" * 40)


def test_disk_space_is_checked_first(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 4 << 20))
    said = refused("disk_full")
    assert "needs 0.00809 GB, and 0.00419 GB are free" in said
    assert "HF_HOME" in said
    assert WEIGHTS not in hub.fetched()


def test_disk_that_fills_up_during_the_download(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sensorium.engine.setup.hub_download._Transfer._append", fail)
    assert "needs more space than there is, and" in refused("disk_full")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", ".."])
def test_index_that_leaves_the_folder_is_refused(name: str, hub: FakeHub) -> None:
    shard(hub, [name])
    hub.listed = [name]
    assert "plain file names" in refused("checkpoint")
    assert not any("passwd" in name or "x.safe" in name for name in hub.fetched())


def test_shards_of_the_index(hub: FakeHub) -> None:
    weights, names = hub.files[WEIGHTS], ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    shard(hub, names)
    assert f"names '{names[0]}', which is not on the Hub" in refused("checkpoint")
    hub.files |= {names[0]: weights[:LARGE], names[1]: weights[LARGE:], "model-unused.safetensors": b"?"}
    folder = find_folder(NAME, update=True)
    assert [(folder / name).read_bytes() for name in names] == [hub.files[name] for name in names]
    assert hub.fetched() == (NEEDED - {WEIGHTS}) | {"model.safetensors.index.json", *names}


@pytest.mark.parametrize(
    ("names", "small", "weights"),
    [
        (["params.json", "tekken.json", "consolidated.safetensors"], 2, ["consolidated.safetensors"]),
        (["config.json", "consolidated.safetensors", WEIGHTS, "model_fp16.safetensors"], 1, [WEIGHTS]),
        (["config.json", WEIGHTS, "adapter_model.safetensors"], 1, [WEIGHTS]),
        (
            ["config.json", WEIGHTS, "adapter_config.json", "adapter_model.safetensors"],
            2,
            [WEIGHTS, "adapter_model.safetensors"],
        ),
        (["vocab.json", "merges.txt", "tokenizer.model", "tiktoken.model", "qwen.tiktoken", WEIGHTS], 5, [WEIGHTS]),
        (["tokenization.py", "pytorch_model.bin.index.json", "training_args.bin", "sub/config.json", WEIGHTS], 0, [WEIGHTS]),
    ],
)
def test_files_of_layouts(names: list[str], small: int, weights: list[str], tmp_path: Path) -> None:
    files = {name: RemoteFile(name, 1, "0" * 40) for name in names}
    assert len(small_files(files)) == small
    assert [file.name for file in remote_weights(NAME, files, tmp_path)] == weights


def test_pickled_weights_only(hub: FakeHub) -> None:
    del hub.files[WEIGHTS]
    assert "has no safetensors weights" in refused("checkpoint")
    files = {name: RemoteFile(name, 1, "0" * 40) for name in ("README.md", "a-Q4_K_M.gguf", "a-Q8_0.gguf")}
    with pytest.raises(CheckpointError, match=r"run `hf download ORG/A 'a-Q4_K_M\.gguf'` and give the file's path"):
        remote_weights("ORG/A", files, Path())
    assert not any(name.endswith((".bin", ".py", ".pt", ".pickle")) for name in hub.fetched())


def test_folders_and_names(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, tmp_path / NAME)
    assert find_model(make_config(NAME, {})) == make_config(NAME, {})
    assert describe_checkpoint(NAME)["dtype"]
    with pytest.raises(ConfigError, match="revision='main' is for a model's name"):
        find_model(make_config(NAME, {"revision": "main"}))
    for path in (
        "./org/tiny",
        "../x",
        "/a/b",
        "tiny",
        "a/b/c",
        "org/",
        "a..b/c",
        "org/a--b",
        "org/x.git",
        "~/x",
        "org/a b",
        "",
    ):
        assert not is_name(path)
    for path in ("./org/x", tmp_path / "x", Path("org/x"), "x"):
        with pytest.raises(ConfigError, match="is not a folder"):
            LLM(path)
    assert hub.requests == []
    assert all(map(is_name, ("Qwen/Qwen2.5-VL-3B-Instruct", "a/b", "google/gemma-3-4b-it", "0x/_y")))


@pytest.mark.full
def test_two_processes_at_once(hub: FakeHub, tmp_path: Path) -> None:
    started = [start_download(hub, tmp_path) for _ in range(2)]
    folders = {process.communicate()[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0]
    (folder,) = folders
    assert all((Path(folder) / name).read_bytes() == hub.files[name] for name in NEEDED)
    assert hub.sent[WEIGHTS] == len(hub.files[WEIGHTS]), "one of them waits for the other"


def test_read_only_cache(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(CheckpointError, match=r"cannot be written \(Permission denied\); set HF_HOME"):
        find_folder(NAME)


def test_the_modules_of_an_embedder_are_fetched(hub: FakeHub) -> None:
    pooling = "1_Pooling/config.json"
    names = ("modules.json", "config_sentence_transformers.json", "2_Dense/config.json", "2_Dense/model.safetensors")
    others = ("2_Dense/pytorch_model.bin", "onnx/config.json", "openvino/model.safetensors")
    hub.files |= {pooling: b'{"pooling_mode_lasttoken": true}'} | dict.fromkeys((*names, *others), b"[]")
    folder = find_folder(NAME)
    assert (folder / pooling).read_bytes() == hub.files[pooling]
    assert all((folder / name).is_file() for name in names)
    assert not any((folder / name).exists() for name in others)


@pytest.mark.parametrize(
    ("config", "places"),
    [
        ({"architectures": ["Phi4MultimodalForCausalLM"]}, {"vision-lora", "speech-lora"}),
        ({"architectures": ["Phi4MMForCausalLM"]}, set()),  # which stores adapters among its weights
        ({"task_names": ["retrieval"]}, {"adapters"}),
    ],
)
def test_adapters_in_folders_are_fetched(config: dict[str, object], places: set[str], hub: FakeHub) -> None:
    every = {"vision-lora", "speech-lora", "adapters", "other"}
    hub.files["config.json"] = json.dumps(json.loads(hub.files["config.json"]) | config).encode()
    hub.files |= {f"{place}/adapter_config.json": b"{}" for place in every}
    hub.files |= {f"{place}/adapter_model.safetensors": place.encode() for place in every}
    hub.listed = ["../adapter_config.json", "a/b/adapter_config.json"]
    folder = find_folder(NAME)
    assert {path.parent.name for path in folder.glob("*/adapter_model.safetensors")} == places
    assert all((folder / place / "adapter_model.safetensors").read_bytes() == place.encode() for place in places)
    assert not any(name in hub.fetched() for name in hub.listed)
    for place in places:  # a snapshot from before they were fetched is completed
        shutil.rmtree(folder / place)
    assert CachedModel(NAME).is_complete(hub.commit) == (not places)
    assert find_folder(NAME) == folder
    assert CachedModel(NAME).is_complete(hub.commit)
