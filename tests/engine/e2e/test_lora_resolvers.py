"""Adapters whose names are not loaded: found in a folder, on the Hub or by a function; and defaults of modalities."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from family import ask
from lora import matrices, tokens, write
from parity import ROWS, LoadedModels, greedy, make_llm
from sensorium.callers.errors import CheckpointError, ConfigError, InputError
from sensorium.engine.config import EngineConfig
from sensorium.engine.setup import lora_resolvers

pytestmark = pytest.mark.in_process
PROMPT = {"prompt_token_ids": [5, 6, 7, 8]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LoadedModels(tmp_path_factory.mktemp("models")).folder("qwen2_vl")


@pytest.fixture(scope="module")
def root(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters sql and team/legal, and a link that leads out of it."""
    model, _ = ROWS["qwen2_vl"].load(base)
    outside, root = tmp_path_factory.mktemp("outside"), tmp_path_factory.mktemp("store")
    (root / "team").mkdir()
    for seed, folder in enumerate((root / "sql", root / "team" / "legal", outside / "secret")):
        write(folder, str(base), matrices(model, r"language_model.*q_proj$", seed=seed))
    (root / "link").symlink_to(outside / "secret")
    return root


def answers(llm: Any, *names: str | None) -> list[tuple[int, ...]]:
    return [tokens(llm.generate(PROMPT, greedy(8), use_tqdm=False, adapter=name))[0] for name in names]


def test_a_folder_the_hub_and_a_function(base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked in order, and each name is looked for once."""
    asked = list[tuple[str, str]]()

    def function(name: str, model: str) -> str | None:
        asked.append((name, model))
        if name == "broken":
            raise ValueError("no")
        return {"by-function": str(root / "sql"), "wrong": 5}.get(name)  # type: ignore[return-value]

    def entry_points(group: str) -> list[EntryPoint]:
        assert group == "sensorium.lora_resolvers"
        return [EntryPoint("store", "nowhere:function", group)]

    downloads = list[str]()
    monkeypatch.setattr(EntryPoint, "load", lambda _: function)
    monkeypatch.setattr(lora_resolvers, "entry_points", entry_points)
    monkeypatch.setattr(
        lora_resolvers, "find_folder", lambda name, offline, check: (downloads.append(name), root / "team" / "legal")[1]
    )
    sources = [str(root), "hub:my-org/*", "store"]
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True, lora_resolvers=sources) as llm:
        found = answers(llm, "sql", "team/legal", "my-org/anything", "by-function", None, "sql", "by-function")
        assert found[0] == found[3] == found[5] == found[6]
        assert found[1] == found[2]
        assert len({*found[:2], found[4]}) == 3
        assert (downloads, asked) == (["my-org/anything"], [("by-function", str(base))])
        assert {info.name for info in llm.list_adapters()} == {"sql", "team/legal", "my-org/anything", "by-function"}
        for name in ("other-org/sql", "link", "team"):
            (refused,) = llm.generate(PROMPT, greedy(2), use_tqdm=False, adapter=name)
            assert (refused.error.code, refused.error.param) == ("not_found", "adapter")
        for name in ("broken", "wrong"):
            (refused,) = llm.generate(PROMPT, greedy(2), use_tqdm=False, adapter=name)
            assert refused.error.code == CheckpointError.default_code
        assert downloads == ["my-org/anything"]
        for name in ("../store/sql", "/etc", "a//b"):
            with pytest.raises(InputError) as caught:
                llm.generate(PROMPT, adapter=name)
            assert (caught.value.info.code, caught.value.info.param) == ("invalid_value", "name")
        llm.unload_adapter("sql")
        assert answers(llm, "sql") == found[:1]


def test_weights_of_models_on_the_hub_are_not_downloaded(
    base: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is checked when its small files are there."""
    adapter, checked = tmp_path / "adapter", list[Path]()
    adapter.mkdir()
    shutil.copy(root / "sql" / "adapter_config.json", adapter)
    folders = {"my-org/adapter": adapter, "my-org/model": base}

    def find_folder(name: str, offline: bool, check: Callable[[Path], None]) -> Path:
        check(folders[name])
        checked.append(folders[name])
        return folders[name]

    monkeypatch.setattr(lora_resolvers, "find_folder", find_folder)
    (resolve,) = lora_resolvers.make_resolvers(EngineConfig(str(base), enable_lora=True, lora_resolvers=("hub:my-org/*",)))
    assert resolve("my-org/adapter") == adapter
    with pytest.raises(CheckpointError):
        resolve("my-org/model")
    assert checked == [adapter]


def test_a_function_that_cannot_be_imported(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_resolvers, "entry_points", lambda group: [EntryPoint("store", "nowhere:function", group)])
    with pytest.raises(ConfigError) as caught:
        make_llm(ROWS["qwen2_vl"], base, enable_lora=True, lora_resolvers=["store"])
    assert caught.value.info.param == "lora_resolvers"


def test_a_folder_that_is_given_as_a_word(base: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to give the folder."""
    monkeypatch.chdir(root)
    with pytest.raises(ConfigError, match=r"\./sql") as caught:
        lora_resolvers.make_resolvers(EngineConfig(str(base), enable_lora=True, lora_resolvers=("sql",)))
    assert caught.value.info.param == "lora_resolvers"


def test_defaults_of_modalities(base: Path, root: Path) -> None:
    """Prompts with an image that name no adapter get it; others do not."""
    image, text = ask(ROWS["qwen2_vl"], "i", 0).ours, PROMPT
    defaults = {"image": str(root / "sql")}
    with make_llm(ROWS["qwen2_vl"], base, enable_lora=True, default_mm_loras=defaults) as llm:
        llm.load_adapter("sql", root / "sql")
        llm.load_adapter("legal", root / "team" / "legal")
        plain, by_name, other = (
            tokens(llm.generate([image, text], greedy(8), use_tqdm=False, adapter=name)) for name in (None, "sql", "legal")
        )
        with make_llm(ROWS["qwen2_vl"], base) as bare:
            without = tokens(bare.generate([image, text], greedy(8), use_tqdm=False))
        assert plain == [by_name[0], without[1]]
        assert len({plain[0], other[0], without[0]}) == 3
        with llm.live(image, greedy(8)) as session:
            assert tuple(session.answer().outputs[0].token_ids) == plain[0]


@pytest.mark.parametrize(
    "options",
    [
        {"lora_resolvers": ["/no/such/folder"]},
        {"lora_resolvers": ["no-such-function"]},
        {"lora_resolvers": [""]},
        {"lora_resolvers": 5},
        {"default_mm_loras": {"smell": "a"}},
        {"default_mm_loras": {"image": 5}},
        {"default_mm_loras": ["image"]},
        {"lora_resolvers": ["."], "enable_lora": False},
        {"default_mm_loras": {"image": "a"}, "enable_lora": False},
    ],
    ids=str,
)
def test_wrong_options(base: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_llm(ROWS["qwen2_vl"], base, **{"enable_lora": True, **options})
    assert caught.value.info.param == next(iter(options))
