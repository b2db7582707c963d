"""Projectors, squares and the Q-Former against plain torch and transformers."""

from __future__ import annotations

import pytest
import torch
from oracle import ensure_torchvision, randomise
from sensorium.callers.errors import ConfigError
from sensorium.models.layers.connectors import Projector, ProjectorSpec, squares
from sensorium.models.layers.qformer import QFormer, QFormerSpec
from sensorium.models.vision.positions import in_squares
from sensorium.models.weights import fill
from torch.nn import functional as F

CPU = torch.device("cpu")


def projector(spec: ProjectorSpec) -> tuple[Projector, dict[str, torch.Tensor]]:
    made, gen, inner = Projector(spec, torch.float32, CPU), torch.Generator().manual_seed(0), spec.group_width
    stored = {}
    for name, outer in zip(spec.layers, spec.outputs, strict=True):
        stored[f"{name}.weight"] = torch.randn(outer, inner, generator=gen)
        if spec.bias:
            stored[f"{name}.bias"] = torch.randn(outer, generator=gen)
        inner = outer
    if spec.norm:
        wide = spec.group_width if spec.joined_norm else spec.width
        stored |= {f"{spec.norm}.weight": torch.rand(wide, generator=gen), f"{spec.norm}.bias": torch.rand(wide, generator=gen)}
    fill(made, stored.items(), ())
    return made, stored


def test_two_layers_without_a_norm() -> None:
    made, w = projector(ProjectorSpec(8, 12, ("linear_1", "linear_2"), inner=12))
    x = torch.randn(6, 8)
    first = F.gelu(F.linear(x, w["linear_1.weight"], w["linear_1.bias"]))
    torch.testing.assert_close(made(x), F.linear(first, w["linear_2.weight"], w["linear_2.bias"]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("joined", [False, True])
def test_groups_are_normed_and_joined(joined: bool) -> None:
    made, w = projector(ProjectorSpec(8, 12, ("proj",), 4, bias=False, norm="ln", joined_norm=joined))
    x = torch.randn(8, 8)
    given = x.view(2, 32) if joined else x
    normed = F.layer_norm(given, given.shape[1:], w["ln.weight"], w["ln.bias"], 1e-5).reshape(2, 32)
    torch.testing.assert_close(made(x), F.linear(normed, w["proj.weight"]), rtol=1e-4, atol=1e-4)


def test_channels_first_is_a_convolution() -> None:
    made, w = projector(ProjectorSpec(8, 12, ("downsample",), 4, channels_first=True))
    x = torch.randn(6, 4, 8)  # squares of 2 x 2
    planes = x.view(6, 2, 2, 8).permute(0, 3, 1, 2)
    wanted = F.conv2d(planes, w["downsample.weight"].view(12, 8, 2, 2), w["downsample.bias"]).flatten(1)
    torch.testing.assert_close(made(x.flatten(0, 1)), wanted, rtol=1e-4, atol=1e-4)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ConfigError, match="'sine' is not supported"):
        Projector(ProjectorSpec(8, 12, ("a", "b"), act="sine"), torch.float32, CPU)


def test_squares() -> None:
    grids = [(2, 4, 6), (1, 2, 2)]
    rows = torch.arange(sum(t * h * w for t, h, w in grids))[:, None]
    frames = [rows[:24].view(4, 6), rows[24:48].view(4, 6), rows[48:].view(2, 2)]
    wanted = torch.cat([in_squares(frame, 2).flatten() for frame in frames])
    assert squares(rows, grids, 2)[:, 0].tolist() == wanted.tolist()


def test_squares_leave_out_what_fills_none() -> None:
    rows = torch.arange(2 * 3 * 5 + 4)[:, None]
    frames = [rows[:15].view(3, 5)[:2, :4], rows[15:30].view(3, 5)[:2, :4], rows[30:].view(2, 2)]
    wanted = torch.cat([in_squares(frame, 2).flatten() for frame in frames])
    assert squares(rows, [(2, 3, 5), (1, 2, 2)], 2)[:, 0].tolist() == wanted.tolist()


@torch.inference_mode()
def test_qformer() -> None:
    ensure_torchvision()
    from transformers import Blip2QFormerConfig, Blip2QFormerModel

    config = Blip2QFormerConfig(
        hidden_size=32, num_attention_heads=4, intermediate_size=48, num_hidden_layers=3, encoder_hidden_size=40
    )
    oracle = Blip2QFormerModel(config).eval()
    randomise(oracle, 0)
    ours = QFormer(QFormerSpec(32, 4, 48, 3, 40, cross_frequency=2), torch.float32, CPU)
    fill(ours, oracle.state_dict().items(), ())
    queries, seen = torch.randn(5, 3, 32), torch.randn(5, 16, 40)
    theirs = oracle(query_embeds=queries, encoder_hidden_states=seen).last_hidden_state
    torch.testing.assert_close(ours(queries, seen), theirs, rtol=1e-4, atol=1e-4)
