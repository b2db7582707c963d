"""One suite that compares every embedder with transformers, driven by EMBEDDERS of tests/families (helpers/embedder.py)."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from embedder import Embedder, load_embedders
from family import make_media
from measured import measured_steps
from oracle import save_checkpoint
from safetensors.torch import load_file, save_file
from sensorium import LLM
from sensorium.callers.errors import CheckpointError
from sensorium.engine.types import EngineRequest

ROWS = load_embedders()
each = pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in ROWS.items()])


class Loaded:
    """Checkpoints and loaded models, made once per module."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = functools.cache(self._folder)
        self.llm = functools.cache(lambda name: load_llm(ROWS[name], self.folder(name)))
        self.oracle = functools.cache(lambda name: ROWS[name].load(self.folder(name)))

    def _folder(self, name: str) -> Path:
        model, processor = ROWS[name].build(0)
        folder = save_checkpoint(self.root / name, model, processor)
        ROWS[name].finish(folder)
        return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(tmp_path_factory.mktemp("embedders"))


def load_llm(row: Embedder, folder: Path) -> LLM:
    return LLM(folder, **({"max_num_seqs": 8, "max_model_len": 1024, "block_size": 4, "device": "cpu"} | dict(row.options)))


def items_of(row: Embedder) -> list[Any]:
    return [*row.texts, *(make_media("image", size, seed) for seed, size in enumerate(row.sizes))]


def embed(llm: LLM, items: list[Any]) -> tuple[list[torch.Tensor], list[EngineRequest]]:
    """Return the vectors of items, and their requests in any order."""
    core, seen = llm.engine.loop.core, list[EngineRequest]()
    real = core.add

    def add(request: EngineRequest) -> None:
        seen.append(request)
        real(request)

    core.add = add
    try:
        found = llm.embed(items, use_tqdm=False)
    finally:
        del core.add
    assert [one.error for one in found] == [None] * len(items)
    return [one.vector for one in found], seen


@each
def test_vectors_alone(row: Embedder, loaded: Loaded) -> None:
    """Token ids, tensors and vectors are the oracle's; in a batch the vectors have the same bits."""
    model, processor = loaded.oracle(row.name)
    items = items_of(row)
    batch, _ = embed(loaded.llm(row.name), items)
    other = batch[0]
    for item, together in zip(items, batch, strict=True):
        (vector,), (request,) = embed(loaded.llm(row.name), [item])
        theirs = row.inputs(processor, item)
        if row.has_tokens or isinstance(item, str):
            assert list(request.prompt_token_ids) == theirs["input_ids"][0].tolist()
        for name, mine, other_tensor in row.tensors(theirs, request.features) if request.features else ():
            assert mine.shape == other_tensor.shape, name
            assert (mine.double() - other_tensor.double()).abs().max() <= 1e-5, name
        with torch.inference_mode():
            expected = row.run(model, theirs)
        assert vector.shape == expected.shape
        assert (vector - expected).abs().max() <= row.tolerance
        assert torch.equal(vector, together)
        assert item is items[0] or vector.shape != other.shape or (vector - other).abs().max() > 0.01


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.full)])
@each
def test_every_size_takes_the_oracles_tokens(row: Embedder, every: int, loaded: Loaded) -> None:
    processor = loaded.oracle(row.name)[1]
    for size in row.grid[::every]:
        image = make_media("image", size, 0)
        (plan,) = loaded.llm(row.name).plan([{"role": "user", "content": [{"type": "image", "image": image}]}])
        assert plan.num_embeds == row.count(processor, row.inputs(processor, image)), size


@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in ROWS.items() if row.score is not None])
def test_scores(row: Embedder, loaded: Loaded) -> None:
    """Scores of images for a text, and of texts for an image."""
    model, processor = loaded.oracle(row.name)
    text, *others = row.texts
    image, *more = (make_media("image", size, seed) for seed, size in enumerate(row.sizes))
    assert row.score is not None
    with torch.inference_mode():
        own = [row.run(model, row.inputs(processor, one)) for one in (text, image)]
        images, texts = ([row.run(model, row.inputs(processor, one)) for one in several] for several in (more, others))
        expected = [float(row.score(model, own[0], one)) for one in images] + [
            float(row.score(model, own[1], one)) for one in texts
        ]
    llm = loaded.llm(row.name)
    found = [*llm.score(text, more, use_tqdm=False), *llm.score(image, others, use_tqdm=False)]
    assert [one.error for one in found] == [None] * len(found)
    assert [one.score for one in found] == pytest.approx(expected, abs=1e-3)


@each
def test_steps_take_no_more_memory_than_planned(row: Embedder, loaded: Loaded) -> None:
    """One forward pass with texts and images, and one call of the encoder for all images."""
    llm = load_llm(row, loaded.folder(row.name))
    with measured_steps(llm.engine.loop.core.executor.runner.model) as found:
        embed(llm, [row.texts[0], *(make_media("image", (150, 150), seed) for seed in range(6))])
    assert {what for what, _, _ in found} == {"forward", "image"}
    assert [one for one in found if one[2] > 1.001 * one[1]] == []  # small tensors on the host are not planned


def copied(folder: Path, target: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """Copy a checkpoint with other weights and another config.json."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("config.json", "model.safetensors"))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return target


@each
def test_weights_in_every_layout(row: Embedder, loaded: Loaded, tmp_path: Path) -> None:
    """Weights load as transformers stores them, as it holds them, and in the publisher's layout; bad ones are named."""
    folder, image = loaded.folder(row.name), make_media("image", row.sizes[0], 0)
    expected = embed(loaded.llm(row.name), [image])[0][0]
    stored, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    held = {name: tensor for name, tensor in loaded.oracle(row.name)[0].state_dict().items() if tensor.numel()}
    layouts: dict[str, Any] = {"in memory": (held, config)}
    for name, (rename, change) in row.layouts.items():
        layouts[name] = {rename(key): tensor for key, tensor in stored.items()}, change(config)
        assert layouts[name][0].keys() != stored.keys() or layouts[name][1] != config
    for name, layout in layouts.items():
        vector = embed(load_llm(row, copied(folder, tmp_path / name.replace(" ", "-"), *layout)), [image])[0][0]
        assert torch.equal(vector, expected), name
    missing = next(name for name in sorted(stored) if "vis" in name and "norm" in name and name.endswith("weight"))
    with pytest.raises(CheckpointError, match=missing.split(".")[-2]):
        load_llm(row, copied(folder, tmp_path / "a", {n: t for n, t in stored.items() if n != missing}, config))
    with pytest.raises(CheckpointError, match=r"surplus\.weight"):
        load_llm(row, copied(folder, tmp_path / "b", stored | {"surplus.weight": torch.zeros(2)}, config))
