"""Quantised experts: those of all experts in one tensor, in every order, equal the same experts stored wide."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from quantized import SCHEMES, fp8, mlx, mxfp4
from sensorium.callers.errors import CheckpointError
from sensorium.checkpoints.formats.read import read_quantization
from sensorium.models.layers.linear import Linear, deferred_weights
from sensorium.models.layers.moe import Mixture, ModalityMixture
from sensorium.models.stored_formats import assign
from sensorium.models.text.spec import MoeSpec
from sensorium.models.weights import check, fill
from torch import Tensor, nn

DIM, INNER, EXPERTS = 64, 32, 5
BLOCK = 16
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
X = torch.randn(9, DIM, generator=torch.Generator().manual_seed(1))


class Root(nn.Module):
    prefixes = (("model.", ""),)

    def __init__(self, deferred: bool, transposed: bool) -> None:
        super().__init__()
        spec = MoeSpec(EXPERTS, 2, (INNER,), transposed=transposed)
        if deferred:
            with deferred_weights():
                self.mlp = Mixture(DIM, spec, torch.float32, torch.device("cpu"))
        else:
            self.mlp = Mixture(DIM, spec, torch.float32, torch.device("cpu"))

    def convert_weights(self, weights: Any) -> Any:
        return weights


def matrices() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return the matrices `[gate and up, in]` and `[out, in]` of the experts, and the router."""
    gen = torch.Generator().manual_seed(0)
    gate_ups = [torch.randn(2 * INNER, DIM, generator=gen) / 8 for _ in range(EXPERTS)]
    downs = [torch.randn(DIM, INNER, generator=gen) / 8 for _ in range(EXPERTS)]
    return gate_ups, downs, torch.randn(EXPERTS, DIM, generator=gen)


def run(stored: dict[str, Tensor], config: dict[str, Any] | None, transposed: bool = False) -> Tensor:
    root = Root(config is not None, transposed)
    if config is not None:
        quantization = read_quantization(config)
        assert quantization is not None
        assign(root, quantization, {name: tensor.to("meta") for name, tensor in stored.items()})
    fill(root, stored.items(), root.prefixes)
    with torch.inference_mode():
        return root.mlp(X)


def by_expert(gate_ups: list[Tensor], downs: list[Tensor], router: Tensor) -> dict[str, Tensor]:
    stored = {"mlp.gate.weight": router}
    for i, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
        gate, up = gate_up.chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        stored |= {f"mlp.experts.{i}.{name}.weight": tensor.contiguous() for name, tensor in parts.items()}
    return stored


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [(BLOCK, BLOCK), (48, 48), (0, 0)], ids=str)
def test_fp8_experts_in_one_tensor(block: tuple[int, int], transposed: bool) -> None:
    """Blocks may end between gate and up or not; one scale per expert; matrices as `[in, out]`."""
    gate_ups, downs, router = matrices()
    stored, wide = {"model.mlp.gate.weight": router}, []
    for name, several in (("gate_up_proj", gate_ups), ("down_proj", downs)):
        packed = [fp8(matrix, *block, name="weight_scale_inv", shape=None if block[0] else ()) for matrix in several]
        parts = {"": "weight", "_scale_inv": "weight_scale_inv"}
        for end, part in parts.items():
            own = torch.stack([tensors[part].float() for tensors, _ in packed]).to(packed[0][0][part].dtype)
            stored[f"model.mlp.experts.{name}{end}"] = (own.mT if transposed and own.ndim == 3 else own).contiguous()
        wide.append([value for _, value in packed])
    config = FP8 | {"weight_block_size": list(block) if block[0] else None}
    expected = run(by_expert(wide[0], wide[1], router), None)
    torch.testing.assert_close(run(stored, config, transposed), expected, rtol=1e-4, atol=1e-5)


def test_experts_under_mixtrals_names() -> None:
    gate_ups, downs, router = matrices()
    stored, wide = {"model.block_sparse_moe.gate.weight": router}, {"mlp.gate.weight": router}
    for i, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
        gate, up = gate_up.chunk(2)
        for name, old, matrix in (("gate_proj", "w1", gate), ("down_proj", "w2", down), ("up_proj", "w3", up)):
            packed, value = fp8(matrix.contiguous(), BLOCK, BLOCK, name="weight_scale_inv")
            stored |= {f"model.block_sparse_moe.experts.{i}.{old}.{part}": tensor for part, tensor in packed.items()}
            wide[f"mlp.experts.{i}.{name}.weight"] = value
    torch.testing.assert_close(run(stored, FP8), run(wide, None), rtol=1e-4, atol=1e-5)


def test_mxfp4_experts_in_one_tensor() -> None:
    """Outputs of gate and up alternate; blocks of 32 codes."""
    gate_ups, downs, router = matrices()
    stored, wide = {"model.mlp.gate.weight": router}, []
    for name, several in (("gate_up_proj", gate_ups), ("down_proj", downs)):
        packed = [mxfp4(matrix) for matrix in several]
        order = torch.arange(2 * INNER).view(2, INNER).T.flatten() if name == "gate_up_proj" else torch.arange(DIM)
        codes = torch.stack([tensors["weight_packed"][order] for tensors, _ in packed])
        stored[f"model.mlp.experts.{name}_blocks"] = codes.unflatten(2, (-1, 16))
        stored[f"model.mlp.experts.{name}_scales"] = torch.stack([tensors["weight_scale"][order] for tensors, _ in packed])
        wide.append([value for _, value in packed])
    expected = run(by_expert(wide[0], wide[1], router), None)
    torch.testing.assert_close(run(stored, {"quant_method": "mxfp4"}), expected, rtol=1e-4, atol=1e-5)


def test_mlx_experts() -> None:
    """MLX stacks gate, up and down separately; a router may have its own settings."""
    gate_ups, downs, router = matrices()
    packed, wide_router = mlx(router, bits=8, group=32)
    stored, wide = {f"model.mlp.gate.{part}": tensor for part, tensor in packed.items()}, []
    parts = (
        ("gate_proj", [one[:INNER] for one in gate_ups]),
        ("up_proj", [one[INNER:] for one in gate_ups]),
        ("down_proj", downs),
    )
    for name, several in parts:
        both = [mlx(matrix, bits=4, group=16) for matrix in several]
        stacks = {
            part: torch.stack([own[part].view(torch.int32) if part == "weight" else own[part] for own, _ in both])
            for part in packed
        }
        stacks["weight"] = stacks["weight"].view(torch.uint32)
        stored |= {f"model.mlp.switch_mlp.{name}.{part}": tensor for part, tensor in stacks.items()}
        wide.append([value for _, value in both])
    config = {"group_size": 16, "bits": 4, "model.mlp.gate": {"group_size": 32, "bits": 8}}
    expected = run(by_expert([torch.cat(pair) for pair in zip(*wide[:2], strict=True)], wide[2], wide_router), None)
    torch.testing.assert_close(run(stored, config), expected, rtol=1e-4, atol=1e-5)
    index = Root(True, False)
    quantization = read_quantization(config)
    assert quantization is not None
    assign(index, quantization, {name: torch.empty(0, device="meta") for name in stored})
    check(index, ((name, torch.empty(0, device="meta")) for name in stored), index.prefixes)


def test_experts_of_another_shape_are_refused() -> None:
    gate_ups, downs, router = matrices()
    stored = {"model.mlp.gate.weight": router}
    for name, several in (("gate_up_proj", gate_ups), ("down_proj", downs)):
        packed = [fp8(matrix[:16], BLOCK, BLOCK, name="weight_scale_inv")[0] for matrix in several]
        stored[f"model.mlp.experts.{name}"] = torch.stack([own["weight"].float() for own in packed]).to(torch.float8_e4m3fn)
        stored[f"model.mlp.experts.{name}_scale_inv"] = torch.stack([own["weight_scale_inv"] for own in packed])
    with pytest.raises(CheckpointError, match=r"mlp.experts.gate_up_proj.* make no weight .*an expert of shape \[16, 64\]"):
        run(stored, FP8)


def test_experts_of_modalities_are_renamed() -> None:
    """Checkpoints number experts across modalities; their quantised tensors follow to the renamed layers."""
    spec, gen = MoeSpec(2, 1, (INNER, INNER), modality_experts=("text_moe", "vision_moe")), torch.Generator().manual_seed(0)
    routers = {f"mlp.gate.weight{end}": torch.randn(DIM, 2, generator=gen) for end in ("", "_1")}
    stored, wide = dict(routers), dict(routers)
    for number, (name, shape) in product(
        range(4), {"gate_proj": (INNER, DIM), "up_proj": (INNER, DIM), "down_proj": (DIM, INNER)}.items()
    ):
        key = f"mlp.experts.{number}.{name}"
        parts, wide[f"{key}.weight"] = SCHEMES["ct w8a8"].pack(torch.randn(shape, generator=gen) / 8)
        stored |= {f"{key}.{part}": tensor for part, tensor in parts.items()}
    results = []
    for tensors, config in ((stored, SCHEMES["ct w8a8"].config), (wide, None)):
        root = Root(False, False)
        with deferred_weights() if config is not None else nullcontext():
            root.mlp = ModalityMixture(DIM, spec, torch.float32, torch.device("cpu"))
        if config is not None:
            quantization = read_quantization(config)
            assert quantization is not None
            assign(root, quantization, {name: tensor.to("meta") for name, tensor in tensors.items()})
        fill(root, tensors.items(), root.prefixes)
        assert all(bool(layer.formats) == (config is not None) for layer in linears(root))
        with torch.inference_mode():
            results.append(root.mlp(X, torch.arange(len(X)) % 2))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def linears(root: nn.Module) -> list[Linear]:
    """Return the layers of the experts."""
    return [layer for path, layer in root.named_modules() if isinstance(layer, Linear) and ".experts." in path]


@pytest.mark.parametrize("name", ["ct w4a16", "gptq ordered"])
def test_experts_stored_one_by_one(name: str) -> None:
    gate_ups, downs, router = matrices()
    plain = by_expert(gate_ups, downs, router)
    stored, wide = {"mlp.gate.weight": router}, {"mlp.gate.weight": router}
    for key, tensor in plain.items():
        if ".experts." in key:
            parts, wide[key] = SCHEMES[name].pack(tensor)
            stored |= {f"{key.removesuffix('.weight')}.{part}": own for part, own in parts.items()}
    torch.testing.assert_close(run(stored, dict(SCHEMES[name].config)), run(wide, None), rtol=1e-4, atol=1e-5)
