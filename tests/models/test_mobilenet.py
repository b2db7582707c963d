"""MobileNetV5: the composed oracle against timm, the published shape, unsupported configs, and memory."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from measured import filled, peak_bytes
from mobilenet import BLOCKS
from mobilenet import MobileNet as ComposedMobileNet
from oracle import ensure_torchvision, randomise
from sensorium.callers.errors import ConfigError
from sensorium.models.interface import StepLimits
from sensorium.models.vision.mobilenet import MobileNet, mobilenet_bytes
from sensorium.models.vision.mobilenet_spec import EdgeSpec, InvertedSpec, MobileAttentionSpec, MobileNetSpec, mobilenet_spec
from sensorium.models.weights import named_layers

CPU = torch.device("cpu")
SCRATCH = (23 if torch.cpu._is_amx_tile_supported() else 20) << 10  # allocated by torch per thread; oneDNN's tiles take 3 KiB
NAME = "mobilenetv5_300m_enc"
TENSORS, NUMBERS = 548, 294_126_912  # of the published encoder
EARLY = (EdgeSpec(8, stride=2, ratio=1), InvertedSpec(8, ratio=1))
LATE = ((InvertedSpec(8, 3, stride=2, ratio=1),), (InvertedSpec(8, 3, stride=2, ratio=1),))
SMALL = MobileNetSpec((EARLY, *LATE), size=128, side=4, stem=8, out=16)
LARGEST = {
    "a convolution": replace(SMALL, stages=((EdgeSpec(64, stride=2), EdgeSpec(64)), *LATE)),
    "a depthwise convolution": replace(SMALL, stages=((EARLY[0], InvertedSpec(8, 0, 5, ratio=8)), *LATE)),
    "attention": replace(SMALL, stages=(EARLY, (*LATE[0], MobileAttentionSpec(8, 32, 16)), LATE[1])),
    "attention to fewer keys": replace(SMALL, stages=(EARLY, (*LATE[0], MobileAttentionSpec(8, 32, 16, 2)), LATE[1])),
    "the fusion": replace(SMALL, stages=(EARLY, (InvertedSpec(128, 3, stride=2, ratio=1),), *LATE[1:]), out=512),
}
"""Shapes of encoders, by the layer that needs the most memory in them."""


def names_of(model: MobileNet) -> dict[str, int]:
    """Return the numbers in each tensor of a model, by name."""
    return {name: views[name].numel() for name, (_, views) in named_layers(model).items()}


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", LARGEST)
def test_the_encoder_stays_within_its_plan(case: str, dtype: torch.dtype, images: int) -> None:
    spec = LARGEST[case]
    model, patches = filled(MobileNet(spec, dtype, CPU)), torch.randn(images * spec.side**2, spec.patch_dim).to(dtype)
    live, planned = peak_bytes(lambda: model(patches)), mobilenet_bytes(spec, images, dtype, StepLimits(1, 1, 1, CPU))
    assert live <= planned + SCRATCH * torch.get_num_threads()
    assert planned <= 1.1 * live


def test_an_image_has_the_same_bits_in_any_batch() -> None:
    spec = LARGEST["attention"]
    model, patches = filled(MobileNet(spec, torch.float32, CPU)), torch.randn(3 * spec.side**2, spec.patch_dim)
    assert torch.equal(model(patches)[spec.side**2 :], model(patches[spec.side**2 :]))


def test_the_published_shape_needs_no_arguments() -> None:
    names = names_of(MobileNet(mobilenet_spec({"hidden_size": 2048}), torch.float32, torch.device("meta")))
    assert (len(names), sum(names.values())) == (TENSORS, NUMBERS)
    composed = ComposedMobileNet(BLOCKS, 3).state_dict()
    args = {"model_args": {"block_args": BLOCKS, "msfa_output_resolution": 3}, "pretrained_cfg": {"input_size": [3, 96, 96]}}
    small = MobileNet(mobilenet_spec({"hidden_size": 2048, **args}), torch.float32, torch.device("meta"))
    assert names_of(small) == {name: tensor.numel() for name, tensor in composed.items()}


def test_timm_has_the_same_shape_and_computes_the_same() -> None:
    ensure_torchvision()
    timm = pytest.importorskip("timm", reason="timm is not installed")
    with torch.device("meta"):
        published = timm.create_model(NAME).state_dict()
    ours = MobileNet(mobilenet_spec({"hidden_size": 2048}), torch.float32, torch.device("meta"))
    assert names_of(ours) == {name: tensor.numel() for name, tensor in published.items()}
    composed = ComposedMobileNet(BLOCKS, 3)
    randomise(composed, 0)
    small = timm.create_model(NAME, block_args=deepcopy(BLOCKS), msfa_output_resolution=3).eval()
    small.load_state_dict(composed.state_dict())
    pixels = torch.rand(2, 3, 96, 96)
    with torch.inference_mode():
        torch.testing.assert_close(small.forward_features(pixels), composed(pixels), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"architecture": "resnet50"}, "resnet50.*known is mobilenetv5_300m_enc"),
        ({"model_args": {"drop_rate": 0.1}}, "drop_rate"),
        ({"model_args": {"block_args": [[{"block_type": "ir", "out_chs": 8, "stride": 2}]] * 2}}, "type 'ir'"),
        ({"model_args": {"block_args": [[{**BLOCKS[0][0], "se_ratio": 0.25}]] * 2}}, "se_ratio.*does not support"),
        ({"model_args": {"block_args": [[{**BLOCKS[0][0], "out_chs": 12}]] * 2}}, "multiples of 8"),
        ({"model_args": {"block_args": [[BLOCKS[0][1]]] * 2}}, "stride 2"),
        ({"pretrained_cfg": {"input_size": [3, 700, 700]}}, "700.*divides by 32 and by 256"),
        ({"pretrained_cfg": {"input_size": [3, 768, 512]}}, "square"),
    ],
)
def test_configs_that_are_not_supported_say_so(vision: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mobilenet_spec({"hidden_size": 2048, **vision})
