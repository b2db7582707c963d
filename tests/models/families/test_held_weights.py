"""The planned bytes of weights against the bytes of all tensors that the loaded model holds: equal, for every family.

Each case is a family with a tied head or one of its own, in a format. `make test` tries one format of each, in turn.
"""

from __future__ import annotations

import functools
import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fallbacks
import family
import pytest
import torch
from cpu import needs_int8
from family import Family
from measured import held
from parity import ROWS
from safetensors.torch import load_file, save_file
from sensorium.engine.config import make_config
from sensorium.engine.model_files import load_model_files
from sensorium.engine.setup.model_source import ModelSource
from sensorium.engine.setup.resolve import load_processing
from sensorium.kernels.dispatch import use_backends
from sensorium.models.weights import weight_bytes

CPU = torch.device("cpu")
Folder = Callable[..., Path]
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "float16 stored": {"dtype": "auto"},  # runs in float32, with weights that stay in float16
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int8 in bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "int4 in bfloat16": {"dtype": "bfloat16", "quantization": "int4"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
}
HEAD_STORED_THOUGH_TIED = {("text-nemotron_h", "other head"), ("text-kimi_linear", "other head")}
"""Cases whose config.json ties the head although transformers stores one, so that config.json alone plans too little."""


def heads(row: Family) -> dict[str, dict[str, Any]]:
    """Return name -> arguments of `row.build`: the row as it is and, where its config can tie the head, the other way."""
    tied = next((changes for changes in row.variants.values() if "tie" in changes or "tie_word_embeddings" in changes), None)
    parameter = inspect.signature(row.build).parameters.get("tie")
    if tied is None and parameter is not None:
        tied = {"tie": not parameter.default}
    return {"default": {}} if tied is None else {"default": {}, "other head": dict(tied)}


def cases() -> Iterator[Any]:
    number = 0
    for name, row in ROWS.items():
        for head, changes in heads(row).items():
            number += 1
            for place, form in enumerate(FORMATS):
                mark = pytest.mark.sampled if place == number % len(FORMATS) else pytest.mark.full
                marks = [mark, *([needs_int8] if "int8" in form else [])]
                yield pytest.param(row, changes, form, id=f"{name}-{head}-{form}", marks=marks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a function that saves a family's checkpoint; the last one is kept."""
    root = tmp_path_factory.mktemp("planned")

    @functools.lru_cache(1)
    def saved(name: str, half: bool, changes: str) -> Path:
        shutil.rmtree(root / "model", ignore_errors=True)
        family.save(ROWS[name], root / "model", **json.loads(changes))
        if half:
            store_in_float16(root / "model")
        return root / "model"

    return lambda row, changes, half=False: saved(row.name, half, json.dumps(changes))


def store_in_float16(folder: Path) -> None:
    for file in folder.rglob("*.safetensors"):  # an encoder may be in a folder of its own
        tensors = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})

    def changed(section: dict[str, Any]) -> dict[str, Any]:
        inside = {key: changed(value) for key, value in section.items() if isinstance(value, dict)}
        return {**section, **inside, **{key: "float16" for key in ("dtype", "torch_dtype") if key in section}}

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"dtype": "float16", **changed(config)}))


def planned_and_held(folder: Path, **options: Any) -> tuple[int, int]:
    """Return the planned bytes of a checkpoint's weights and those of the loaded model."""
    source = read(folder, **options)
    with use_backends(source.config.kernels):
        planned = weight_bytes(source.build_for_plan(), CPU)
        model = source.build_on_device()
        source.load_weights(model)
    return planned, held(model)


def read(folder: Path, **options: Any) -> ModelSource:
    config = make_config(folder, {"max_num_seqs": 8, "max_model_len": 1024, "block_size": 4, "device": "cpu", **options})
    files = load_model_files(config.model, config.adapter, config.hf_overrides)
    return ModelSource(config, files, load_processing(files, config.mm_processor_kwargs))


@pytest.mark.parametrize(("row", "changes", "form"), cases())
def test_the_planned_weights_are_those_held(row: Family, changes: dict[str, Any], form: str, folder: Folder) -> None:
    options = {**row.options, **FORMATS[form]}
    planned, live = planned_and_held(folder(row, changes, form == "float16 stored"), **options)
    assert planned == live


def parts() -> Iterator[Any]:
    number = 0
    for name, row in ROWS.items():
        if not row.placeholders or not all(row.placeholders.values()):
            continue
        chosen: dict[str, dict[str, Any]] = {
            "no media": {"limit_mm_per_prompt": dict.fromkeys(row.placeholders, 0)},
            "encoder": {"parts": "encoder"},
            "decoder": {"parts": "decoder"},
        }
        if len(row.placeholders) > 1:
            chosen |= {f"no {modality}": {"limit_mm_per_prompt": {modality: 0}} for modality in row.placeholders}
        for place, (part, options) in enumerate(chosen.items()):
            mark = pytest.mark.sampled if place == number % len(chosen) else pytest.mark.full
            yield pytest.param(row, options, id=f"{name}-{part}", marks=mark)
        number += 1


@pytest.mark.parametrize(("row", "options"), parts())
def test_parts_that_are_left_out_are_not_planned(row: Family, options: dict[str, Any], folder: Folder) -> None:
    planned, live = planned_and_held(folder(row, {}), **{**row.options, "dtype": "bfloat16", **options})
    assert planned == live


@pytest.mark.parametrize("half", [
    pytest.param(False, id="float32", marks=pytest.mark.full), pytest.param(True, id="float16", marks=pytest.mark.sampled)
])  # fmt: skip
@pytest.mark.parametrize(("row", "changes"), [
    pytest.param(row, changes, id=f"{name}-{head}")
    for name, row in ROWS.items()
    for head, changes in heads(row).items()
    if (name, head) not in HEAD_STORED_THOUGH_TIED
])  # fmt: skip
def test_the_plan_of_a_folder_without_weights_is_the_same(
    row: Family, changes: dict[str, Any], half: bool, folder: Folder, tmp_path: Path
) -> None:
    whole = folder(row, changes, half)
    weights = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json")
    config_only = shutil.copytree(whole, tmp_path / "model", ignore=weights)
    options = {**row.options, "dtype": "auto"}
    planned = [weight_bytes(read(one, **options).build_on_meta(), CPU) for one in (whole, config_only)]
    assert planned[0] == planned[1]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", fallbacks.BUILD)
def test_weights_of_transformers_classes(
    name: str, tied: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, dtype) == ("glm4v_moe", "bfloat16"):
        pytest.skip("its experts are too nearly equal for 16 bits, so the fallback refuses it")
    fallbacks.hide_native(monkeypatch)
    model, processor = fallbacks.BUILD[name](fallbacks.words(name))
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    head.weight = table.weight if tied else torch.nn.Parameter(table.weight.detach() + 1)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = tied
    fallbacks.randomise(model, 0)
    try:
        model.eval().save_pretrained(tmp_path)
    except RuntimeError:
        assert tied
        pytest.skip("transformers cannot save this class with a tied head")
    processor.save_pretrained(tmp_path)
    planned, live = planned_and_held(tmp_path, dtype=dtype)
    assert planned == live
