"""Processed items that engines share: the second engine decodes nothing, and what is wrong or late is processed again."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import MODEL, asked, make_image
from sensorium import LLM, SamplingParams
from sensorium.engine.connectors.disk import DiskConnector
from sensorium.engine.connectors.memory import MemoryConnector
from sensorium.engine.connectors.tensor_store import TensorStore
from sensorium.engine.core.codec import decode, encode
from sensorium.engine.frontend import item_store, media
from sensorium.engine.frontend.item_store import ItemStore
from sensorium.engine.frontend.items import ProcessedItem
from sensorium.mm.fields import BatchedField, FieldElem, FlatField
from sensorium.mm.hashing import digest
from sensorium.mm.rules import Rule
from sensorium.mm.types import FramePlan, ItemGeometry

SMALL = {"max_model_len": 256, "max_num_seqs": 2, "warm_up": False}
PROMPTS = [asked(make_image(i)) for i in range(2)]
KEY = digest("item")


def answers(llm: LLM, prompts: list[dict[str, Any]] = PROMPTS) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def options(folder: Path) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder), "keeps": ["processed_items"]}
    return {"ec_connector": "ECExampleConnector", "ec_role": "ec_both", "ec_connector_extra_config": extra}


def counts(llm: LLM) -> Any:
    (stats,) = llm.stats.transfers
    assert stats.kind == "processed items"
    return stats


def make_item(value: float = 1.0) -> ProcessedItem:
    geometry = ItemGeometry(2, 4, 4, 2, times=(0.0, 0.5), tiles=(1, 2), positions=Rule("a.rules:b", (1, (2, 3))))
    kwargs = {
        "pixels": FieldElem(torch.full((3, 4), value, dtype=torch.bfloat16), FlatField(1)),
        "grid": FieldElem(torch.tensor([2, 4, 4]), BatchedField(keep_on_cpu=True)),
        "scale": FieldElem(0.5, FlatField()),
    }
    frames = FramePlan((0, 3), (0.0, 0.5), 9, 2.0, replaced=((1, 2),))
    return ProcessedItem(((kwargs, geometry), (kwargs, ItemGeometry(1, 2, 2))), (30, 40), frames, 1.5)


def plain(item: ProcessedItem) -> object:
    pieces = [({name: (torch.as_tensor(e.data).tolist(), e.field) for name, e in k.items()}, grid) for k, grid in item.pieces]
    return pieces, item.size, item.frames, item.seconds


def make_store(connector: MemoryConnector) -> ItemStore:
    return ItemStore(TensorStore("processed items", digest("space"), [connector]), encode, decode)


def test_an_item_comes_back_as_it_was() -> None:
    store = make_store(MemoryConnector(1 << 20))
    assert store.get(KEY) is None
    store.put(KEY, make_item())
    store.store.flush()
    found = store.get(KEY)
    assert found is not None
    assert plain(found) == plain(make_item())
    assert found.pieces[0][0]["pixels"].data.dtype == torch.bfloat16  # type: ignore[union-attr]
    store.close()


@pytest.mark.parametrize("value", [None, (), ((), (1, 2), None, 0.0), (((5, 6),), (1, 2), None, 0.0), ("x", 1, 2, 3), b"x"])
def test_what_is_no_item_is_not_served(value: object) -> None:
    store = make_store(MemoryConnector(1 << 20))
    data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    store.store.put(KEY, {"item": data})
    store.store.put(digest("other"), {"item": data.float()})
    store.store.flush()
    assert store.get(KEY) is None
    assert store.get(digest("other")) is None
    store.close()


def test_an_item_that_is_late_is_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(MemoryConnector):
        def get(self, key: str, limit: int) -> bytes | None:
            time.sleep(0.2)
            return super().get(key, limit)

    monkeypatch.setattr(item_store, "_READ_SECONDS", 0.02)
    store = make_store(Slow(1 << 20))
    store.put(KEY, make_item())
    store.store.flush()
    assert store.get(KEY) is None
    assert store.store.stats[0].late == 1
    assert store.get(KEY) is None  # it is not asked for a while
    assert store.store.stats[0].late == 1
    store.close()


def test_items_that_are_too_large_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_store, "QUEUE_BYTES", 100)
    store = make_store(MemoryConnector(1 << 20))
    store.put(KEY, make_item())
    store.store.flush()
    assert store.store.stats[0].writes == 0
    store.close()


def test_a_second_engine_decodes_nothing_and_damaged_items_are_processed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(MODEL, ec_transfer_config=options(tmp_path), **SMALL) as llm:
        expected = answers(llm)
        assert (counts(llm).hits, counts(llm).misses) == (0, 2)
        assert answers(llm) == expected  # from its own cache
        assert counts(llm).hits == 0
    copy = shutil.copytree(MODEL, tmp_path / "model")
    with monkeypatch.context() as patch, LLM(copy, ec_transfer_config=options(tmp_path), **SMALL) as llm:
        patch.setattr(media.gate, "decode", lambda *_: pytest.fail("an item was decoded"))
        assert answers(llm) == expected
        assert counts(llm).hits == 2
    for number, path in enumerate(sorted(tmp_path.glob("*/*.safetensors"))):
        data = path.read_bytes()
        path.write_bytes(data[:-9] if number else data[:-1] + bytes([data[-1] ^ 1]))
    with LLM(MODEL, ec_transfer_config=options(tmp_path), **SMALL) as llm:
        assert answers(llm) == expected
        assert (counts(llm).hits, counts(llm).damaged) == (0, 2)


@pytest.mark.parametrize("other", ["salt", "options", "dtype", "model", "background"])
def test_what_items_depend_on_keeps_them_apart(tmp_path: Path, other: str) -> None:
    transfer: Mapping[str, Any] = options(tmp_path)
    with LLM(MODEL, ec_transfer_config=transfer, **SMALL) as llm:
        answers(llm)
    prompts, model, more = PROMPTS, MODEL, dict[str, Any]()
    if other == "salt":
        prompts = [prompt | {"cache_salt": "a"} for prompt in PROMPTS]
    elif other == "options":
        prompts = [prompt | {"mm_processor_kwargs": {"max_pixels": 60_000}} for prompt in PROMPTS]
    elif other == "dtype":
        more = {"dtype": "bfloat16"}
    elif other == "background":
        more = {"media": {"background": (0, 0, 0)}}
    else:
        model = str(shutil.copytree(MODEL, tmp_path / "model"))
        config = json.loads((Path(model) / "config.json").read_text())
        (Path(model) / "config.json").write_text(json.dumps(config | {"model_name": "another"}))
    with LLM(model, ec_transfer_config=transfer, **SMALL, **more) as llm:
        answers(llm, prompts)
        assert (counts(llm).hits, counts(llm).misses) == (0, 2)


def test_a_full_store_keeps_the_newest_items(tmp_path: Path) -> None:
    connector = DiskConnector(tmp_path, 3000)
    store = ItemStore(TensorStore("processed items", digest("space"), [connector]), encode, decode)
    for number in range(10):
        store.put(digest(number), make_item(number))
        store.store.flush()
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 3000
    found = store.get(digest(9))
    assert found is not None
    assert plain(found) == plain(make_item(9))
    assert store.get(digest(0)) is None
    store.close()
