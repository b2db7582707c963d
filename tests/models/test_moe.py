"""Mixture layers: experts by modality against transformers, every layout of checkpoints, and quantisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import ensure_torchvision
from sensorium.models.layers.linear import Linear
from sensorium.models.layers.moe import Mixture, ModalityMixture
from sensorium.models.text.spec import MoeSpec
from sensorium.models.weights import fill, quantize
from torch import nn

CPU = torch.device("cpu")
DIM, EXPERTS, INNER = 32, 6, (24, 12)
BY_KIND = MoeSpec(EXPERTS, 2, INNER, shared_inner=48, correction=True, modality_experts=("text_moe", "vision_moe"))
PLAIN = MoeSpec(EXPERTS, 2, INNER[:1], correction=True, scoring="sigmoid")
X = torch.randn(19, DIM, generator=torch.Generator().manual_seed(1))
KINDS = torch.tensor([0] * 5 + [1] * 9 + [0] * 5)


class Root(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp


@pytest.fixture(scope="module")
def oracle() -> Any:
    """Return a layer of transformers in which text rows and image rows have their own experts."""
    ensure_torchvision()
    from transformers.models.ernie4_5_vl_moe import configuration_ernie4_5_vl_moe as configs
    from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as models

    config = configs.Ernie4_5_VLMoeTextConfig(
        hidden_size=DIM, moe_intermediate_size=list(INNER), moe_num_experts=EXPERTS, moe_k=2, moe_num_shared_experts=2
    )
    config._experts_implementation = "eager"
    block = models.Ernie4_5_VLMoeMoeBlock(config)
    gen = torch.Generator().manual_seed(0)
    for tensor in block.parameters():
        tensor.data.copy_(torch.randn(tensor.shape, generator=gen) / (tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else 5))
    return block


def filled(stored: dict[str, torch.Tensor]) -> ModalityMixture:
    layer = ModalityMixture(DIM, BY_KIND, torch.float32, CPU)
    fill(Root(layer), stored.items(), ())
    return layer


def published(oracle: Any) -> dict[str, torch.Tensor]:
    """Return the tensors as published checkpoints store them: one list of experts, transposed routers."""
    stored = {name: tensor for name, tensor in oracle.state_dict().items() if name.startswith("shared_experts")}
    corrections = []
    for kind, part in enumerate((oracle.text_moe, oracle.vision_moe)):
        stored["gate.weight" + "_1" * kind] = part.gate.weight.data.T
        corrections.append(part.gate.moe_statics.e_score_correction_bias.data)
        for i in range(EXPERTS):
            gate, up = part.experts.gate_up_proj.data[i].chunk(2)
            matrices = {"gate_proj": gate, "up_proj": up, "down_proj": part.experts.down_proj.data[i]}
            stored |= {f"experts.{kind * EXPERTS + i}.{name}.weight": tensor for name, tensor in matrices.items()}
    return stored | {"moe_statics.e_score_correction_bias": torch.cat(corrections)}


@pytest.mark.parametrize("layout", ["in memory", "published"])
def test_rows_of_each_modality_have_their_experts(layout: str, oracle: Any) -> None:
    stored = oracle.state_dict() if layout == "in memory" else published(oracle)
    layer = filled({f"mlp.{name}": tensor for name, tensor in stored.items()})
    with torch.inference_mode():
        for kinds in (KINDS, None):
            theirs, _ = oracle(X[None], None if kinds is None else kinds[None])
            torch.testing.assert_close(layer(X, kinds), theirs[0], rtol=0, atol=2e-5)
        alone = layer(X[KINDS == 1], KINDS[KINDS == 1])
        assert torch.equal(alone, layer(X, KINDS)[KINDS == 1])


def test_a_matrix_of_all_experts_may_be_transposed() -> None:
    """If the shape is square, the spec decides."""
    square = MoeSpec(EXPERTS, 2, (DIM // 2,), transposed=True)
    gate_up, down = torch.randn(EXPERTS, DIM, DIM), torch.randn(EXPERTS, DIM // 2, DIM)
    stored = {"mlp.gate.weight": torch.randn(EXPERTS, DIM), "mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down}
    layer = Mixture(DIM, square, torch.float32, CPU)
    fill(Root(layer), stored.items(), ())
    gate, up = (X @ gate_up[3]).chunk(2, -1)
    torch.testing.assert_close(layer.experts["3"](X), (nn.functional.silu(gate) * up) @ down[3], rtol=1e-4, atol=1e-4)


def test_routers_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers are float32 in any model and are never quantised."""
    monkeypatch.setattr("sensorium.models.weights.supported", lambda device: True)
    root = Root(Mixture(DIM, PLAIN, torch.bfloat16, CPU))
    quantize(root, "int8")
    layers = {name: layer for name, layer in root.named_modules() if isinstance(layer, Linear)}
    assert [name for name, layer in layers.items() if layer.quantization is None] == ["mlp.gate"]
    assert layers["mlp.gate"].weight.dtype == torch.float32
