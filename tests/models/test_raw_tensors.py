"""Models that map tensors to a tensor: a small one in place of TerraTorch's, and TerraTorch's if the package is installed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import bands
import pytest
import sensorium
import torch
from safetensors.torch import save_file
from sensorium import LLM, PoolingParams
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.mm.raw_tensors import RawTensors, TensorSpec, read_raw_tensors

sensorium.register_model(
    "TinyBands", model="bands:TinyBands", processing="sensorium.models.families.terratorch.processing:RawTensorInfo"
)


@pytest.fixture(scope="module")
def network() -> bands.Network:
    torch.manual_seed(0)
    return bands.Network().eval()


@pytest.fixture(scope="module")
def folder(network: bands.Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bands")
    (path / "config.json").write_text(json.dumps(bands.CONFIG))
    save_file(dict(network.state_dict()), path / "model.safetensors")
    return path


def item(seed: int, scale: float = 1.0) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(seed)
    pixels, place = torch.randn(3, 8, 6, generator=gen), torch.randn(1, 2, generator=gen)
    return {"pixel_values": pixels, "location_coords": place.numpy(), "scale": [scale, 2.0]}


def prompt(one: object) -> dict[str, Any]:
    return {"prompt": "", "multi_modal_data": {"image": one}}


def test_results_are_the_networks(network: bands.Network, folder: Path) -> None:
    """Alone and in a batch, with equal and different values of the shared tensor. There is no tokenizer."""
    given = [item(0), item(1), item(2, 3.0)]
    with LLM(folder, max_num_seqs=4) as llm:
        together = llm.encode([prompt(one) for one in given], use_tqdm=False)
        alone = [llm.encode(prompt(one), use_tqdm=False)[0] for one in given]
        (scaled,) = llm.encode(prompt(given[0]), PoolingParams(normalize=True), use_tqdm=False)
        (mean,) = llm.encode(prompt(given[0]), PoolingParams(pooling="mean"), use_tqdm=False)
    for one, first, second in zip(given, alone, together, strict=True):
        tensors = {name: torch.as_tensor(value)[None] for name, value in one.items()}
        with torch.inference_mode():
            expected = network(**tensors)[0]
        assert first.error is None
        assert torch.equal(first.data, second.data)
        assert first.data.shape == expected.shape == (2, 8, 6)
        assert (first.data - expected).abs().max() < 1e-6
    assert scaled.data.norm(dim=-1) == pytest.approx(1.0, abs=1e-5)
    assert (mean.data - alone[0].data.view(16, 6).mean(0)).abs().max() < 1e-5


WRONG = [
    (5, "must be a mapping with the tensors pixel_values, location_coords, scale"),
    ({"pixel_values": torch.zeros(3, 8, 6)}, "'location_coords' is missing"),
    (item(0) | {"more": 1.0}, "'more' is missing or unknown"),
    (item(0) | {"pixel_values": torch.zeros(3, 8, 7)}, r"pixel_values must have the shape \[3, 8, 6\], not \[3, 8, 7\]"),
    (item(0) | {"scale": [float("nan"), 1.0]}, "scale holds NaN or infinite values"),
    (item(0) | {"scale": "a"}, "scale must be a tensor"),
    ([item(0), item(1)], "one item per prompt"),
]


def test_wrong_items_are_refused(folder: Path) -> None:
    with LLM(folder, max_num_seqs=4) as llm:
        for given, reason in WRONG:
            (found,) = llm.encode(prompt(given), use_tqdm=False)
            assert found.error is not None
            assert re.search(reason, found.error.message), found.error.message
        (text,) = llm.encode({**prompt(item(0)), "prompt": "a text"}, use_tqdm=False)
        assert "no text" in text.error.message


def test_wrong_weights_and_configs_are_named(network: bands.Network, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(bands.CONFIG))
    save_file({"bands.weight": network.bands.weight}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks bands\.bias, place\.bias, place\.weight"):
        LLM(tmp_path)
    with pytest.raises(ConfigError, match="does not describe the model's tensors"):
        read_raw_tensors({"pretrained_cfg": {"input": {}}})
    with pytest.raises(ConfigError, match="axes must be at least 1"):
        TensorSpec((0, 3))
    with pytest.raises(ConfigError, match="axes must be at least 1"):
        RawTensors({}, ())


def test_prithvi() -> None:
    """The shapes of a published config; the network is TerraTorch's."""
    pytest.importorskip("terratorch")
    tensors = {"pixel_values": {"type": "torch.Tensor", "shape": [6, 512, 512]}}
    model = {"init_args": {"model_args": {"num_classes": 2}}}
    read = read_raw_tensors({"pretrained_cfg": {"input": {"data": tensors}, "model": model}})
    assert (read.rows, read.output) == (1024, (2, 512, 512))
