"""Adapters per request above weights in published quantised formats: as above the same weights, dequantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family import ask
from gguf_files import Q, everything
from gguf_files import write as write_gguf
from lora import matrices, record, write
from oracle import save_checkpoint
from parity import ROWS, LoadedModels, make_llm
from quantized import SCHEMES
from quantized import write as write_quantized

pytestmark = pytest.mark.in_process
FORMATS = ("fp8 block", "ct fp8 dynamic", "ct w8a16", "awq", "gptq ordered", "bnb nf4", "ct mxfp4", "mlx 4 bits")
PAIRS = r"(language_model|model)\.layers\.\d+\..*(q_proj|v_proj|down_proj)$|visual.*(qkv|linear_fc1)$"


def in_decoder(name: str) -> bool:
    return "language_model.layers" in name and name.endswith("proj.weight")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LoadedModels:
    return LoadedModels(tmp_path_factory.mktemp("quantised"))


def compare_answers(row: Any, quantised: Path, wide: Path, folder: Path, question: Any, **options: Any) -> None:
    """Compare the answers of a quantised model and its wide copy, with an adapter and beside a request without one."""
    found = []
    for path in (quantised, wide):
        with make_llm(row, path, enable_lora=True, **options) as llm:
            llm.load_adapter("mine", folder)
            found.append([record(llm, question, 12, adapter=name) for name in ("mine", None)])
    for (ours, logits), (theirs, expected) in zip(*found, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-3 * float(expected.std()))
    (_, adapted), (_, plain) = found[0]
    assert (adapted[0] - plain[0]).abs().max() > 0.1 * plain.std()


@pytest.mark.parametrize("name", FORMATS)
def test_published_formats(name: str, world: LoadedModels, tmp_path: Path) -> None:
    row, base = ROWS["qwen3_vl"], world.folder("qwen3_vl")
    model, _ = row.load(base)
    folder = write(tmp_path / "adapter", str(base), matrices(model, PAIRS))
    packed, wide = write_quantized(base, tmp_path, SCHEMES[name], in_decoder)
    compare_answers(row, packed, wide, folder, ask(row, "i", 0), dtype="float32")


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0], ids=str)
def test_gguf(kind: Any, tmp_path: Path) -> None:
    row = ROWS["text-llama"]
    model, processor = row.build(0, kind="llama")
    base = save_checkpoint(tmp_path / "source", model, processor)
    folder = write(tmp_path / "adapter", str(base), matrices(model, PAIRS))
    file, wide = write_gguf(base, tmp_path / "gguf", everything(kind))
    compare_answers(row, file, wide, folder, ask(row, "", 0), dtype="float32")


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_formats_that_are_made_while_loading(quantization: str, world: LoadedModels, tmp_path: Path) -> None:
    """An adapter changes the logits of a prompt in the direction in which it changes those of the wide model."""
    row, base = ROWS["qwen3_vl"], world.folder("qwen3_vl")
    model, _ = row.load(base)
    folder, question = write(tmp_path / "adapter", str(base), matrices(model, PAIRS)), ask(row, "i", 0)
    changes = []
    for options in ({"quantization": quantization}, {}):
        with make_llm(row, base, enable_lora=True, **options) as llm:
            llm.load_adapter("mine", folder)
            adapted, plain = (record(llm, question, 1, adapter=name)[1] for name in ("mine", None))
            changes.append((adapted - plain).flatten())
    assert torch.cosine_similarity(*changes, dim=0) > 0.9
