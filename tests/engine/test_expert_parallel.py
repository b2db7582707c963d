"""Ranks divide the experts of mixtures: answers have the same bits as in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from family import ask, save
from hostile import MODEL
from lora import matrices, write
from parity import ROWS, make_llm
from quantized import SCHEMES
from quantized import write as write_quantized
from sensorium import LLM
from sensorium.callers.errors import ConfigError
from sensorium.engine.setup.doctor import plan_of
from sensorium.models.layers.moe import Mixture, ModalityMixture
from sensorium.models.layers.ranks import Ranks, building_for, rank_traffic
from sensorium.models.text.spec import MoeSpec
from sensorium.models.weights import fill
from several_ranks import GREEDY, SAMPLED, answers, same_bodies  # noqa: F401
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("same_bodies")
DIM, EXPERTS = 16, 7
SPECS = {
    "shared expert": MoeSpec(EXPERTS, 3, (24,), shared_inner=8),
    "experts beside a projection": MoeSpec(EXPERTS, 2, (24,), latent=8),
    "scaled inputs": MoeSpec(EXPERTS, 2, (24,), scaled_inputs=True),
    "modalities": MoeSpec(EXPERTS, 2, (24, 8), modality_experts=("text", "vision")),
}
SPLIT = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


def mixture_of(spec: MoeSpec, ranks: Ranks | None) -> Mixture | ModalityMixture:
    """Return a mixture with random weights, the same in each process."""
    make = Mixture if len(spec.modality_experts) == 1 else ModalityMixture
    with building_for(ranks):
        mixture = make(DIM, spec, torch.float32, torch.device("cpu"))
    generator, weights = torch.Generator().manual_seed(0), list[tuple[str, Tensor]]()
    whole = mixture if ranks is None else make(DIM, spec, torch.float32, torch.device("cpu"))
    root = nn.ModuleDict({"mlp": whole})
    for path, module in root.named_modules():
        for name, tensor in module.tensors(path) if hasattr(module, "tensors") else ():
            weights.append((name, torch.randn(tensor.shape, generator=generator)))
    absent = {
        f"mlp.{path}{'.' * bool(path)}{name}" for path, part in mixture.named_modules() for name in getattr(part, "absent", ())
    }
    fill(nn.ModuleDict({"mlp": mixture}), weights, (), absent=absent)
    return mixture


class Wire:
    """Replaces `Ranks.share_rows_`: counts the bytes of a rank's own rows, and takes the others from those of one process."""

    def __init__(self) -> None:
        self.whole, self.sent, self.calls = list[Tensor](), 0, 0

    def keep(self, ranks: Ranks, x: Tensor, bounds: Sequence[int]) -> None:
        self.whole.append(x.clone())

    def share_rows_(self, ranks: Ranks, x: Tensor, bounds: Sequence[int]) -> None:
        everything, own = self.whole[self.calls % len(self.whole)], slice(bounds[ranks.rank], bounds[ranks.rank + 1])
        assert torch.equal(x[own], everything[own])
        self.sent += x[own].nbytes
        self.calls += 1
        x.copy_(everything)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SPECS)
def test_ranks_send_what_the_plan_says_and_compute_their_experts(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank computes here alone; the results of the others come from one process."""
    spec, rows = SPECS[name], 50
    x, modality_ids = torch.randn(rows, DIM, generator=torch.Generator().manual_seed(1)), torch.arange(rows) % 2
    wire = Wire()
    with monkeypatch.context() as patched:
        patched.setattr(Ranks, "share_rows_", lambda *call: wire.keep(*call))
        alone = mixture_of(spec, Ranks(0, 1, experts=True))(x, modality_ids)
    assert torch.equal(alone, mixture_of(spec, None)(x, modality_ids))

    monkeypatch.setattr(Ranks, "share_rows_", lambda *call: wire.share_rows_(*call))
    for rank in range(size):
        mixture = mixture_of(spec, Ranks(rank, size, experts=True))
        experts = [len(part.experts) for part in mixture.modules() if isinstance(part, Mixture)]
        assert all(EXPERTS // size <= count <= -(-EXPERTS // size) for count in experts)
        assert torch.equal(mixture(x, modality_ids), alone)
    traffic = rank_traffic(mixture)
    assert traffic.messages == 1
    width = spec.latent or DIM
    assert wire.sent == rows * spec.top_k * width * 4
    assert traffic.row_bytes == -(-spec.top_k * width * 4 // size)


def save_adapter(folder: Path, base: Path) -> Path:
    """Write an adapter of attention, routers, shared experts and experts of Qwen2-MoE."""
    model, _ = ROWS["text-qwen3_moe"].load(base)
    pairs = matrices(model, r"[qo]_proj$|mlp\.gate$|shared_expert\.down_proj$")
    gen = torch.Generator().manual_seed(0)
    for path, module in model.named_modules():
        if path.endswith("mlp.experts"):
            for number in range(1, len(module.down_proj), 2):
                out, inner = module.down_proj.shape[1:]
                low = torch.randn(4, inner, generator=gen) / 4, torch.randn(out, 4, generator=gen) / 4
                pairs[f"{path}.{number}.down_proj"] = low
    return write(folder, str(base), pairs)


@pytest.mark.parametrize(
    "split",
    [SPLIT, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True}],
    ids=str,
)
def test_answers_have_the_bits_of_one_process(split: Mapping[str, Any], tmp_path: Path) -> None:
    """With an adapter that changes experts of both ranks, for some requests, and after sleep."""
    row = ROWS["text-qwen3_moe"]
    base = save(row, tmp_path / "model", kind="qwen2_moe")
    adapter = save_adapter(tmp_path / "adapter", base)
    prompts, params = [ask(row, "", seed).ours for seed in range(3)], [GREEDY, SAMPLED, GREEDY]
    found = []
    for sizes in ({}, split):
        with make_llm(row, base, enable_lora=True, **sizes) as llm:
            plain = answers(llm, prompts, params)
            llm.load_adapter("a", adapter)
            found.append((plain, answers(llm, prompts, params, ["a", None, "a"])))
            if sizes:
                llm.sleep()
                llm.wake_up()
                assert answers(llm, prompts, params, ["a", None, "a"]) == found[0][1]
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    whole, part = (plan_of(base, sizes).weights for sizes in ({}, split))
    assert part < 0.7 * whole


FAMILIES = {
    "ernie4_5_vl": {},
    "text-llama4_text": {},
    "kimi_vl": {},
    "qwen3_vl_moe": {},
    "aria": {},
    "text-gpt_oss": {},
    "text-gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48},
    "text-qwen3_moe": {"kind": "mixtral"},
    "text-lfm2": {"kind": "lfm2_moe"},
    "text-nemotron_h": {},
}
"""Experts by modality, with scaled inputs, beside latent attention, with deepstack levels, in one tensor, with biases, beside
an MLP, under Mixtral's names, with a correction, behind a projection. With values of config.json."""


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_answer_with_the_bits_of_one_process(name: str, size: int, tmp_path: Path) -> None:
    row = ROWS[name]
    folder = save(row, tmp_path / "model", **FAMILIES[name])
    prompts = [ask(row, case, seed).ours for seed, case in enumerate(row.default_cases())]
    with make_llm(row, folder) as llm:
        alone = answers(llm, prompts, GREEDY)
    with make_llm(row, folder, tensor_parallel_size=size, enable_expert_parallel=True) as llm:
        assert answers(llm, prompts, GREEDY) == alone


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        (None, {"quantization": "int8"}),
        pytest.param(None, {"quantization": "int4", "dtype": "bfloat16"}, marks=pytest.mark.full),
        ("fp8 block", {}),
        pytest.param("gptq", {"dtype": "bfloat16"}, marks=pytest.mark.full),
        pytest.param("awq", {}, marks=pytest.mark.full),
        pytest.param("ct w8a8", {"quantization": "int8"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_quantised_experts_answer_with_the_bits_of_one_process(
    scheme: str | None, options: Mapping[str, Any], tmp_path: Path
) -> None:
    row = ROWS["text-qwen3_moe"]
    folder = save(row, tmp_path / "model", hidden_size=64, moe_intermediate_size=64)
    if scheme is not None:
        folder, _ = write_quantized(folder, tmp_path / "quantised", SCHEMES[scheme], lambda name: ".experts." in name)
    prompts = [ask(row, "", seed).ours for seed in range(2)]
    with make_llm(row, folder, **options) as llm:
        alone = answers(llm, prompts, GREEDY)
    with make_llm(row, folder, **options, **SPLIT) as llm:
        assert answers(llm, prompts, GREEDY) == alone


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        LLM(MODEL, **SPLIT)
    assert raised.value.info.param == "enable_expert_parallel"


def test_one_process_has_all_experts(tmp_path: Path) -> None:
    """The option has no effect without `tensor_parallel_size`, as in vLLM."""
    row = ROWS["text-qwen3_moe"]
    with make_llm(row, save(row, tmp_path / "model"), enable_expert_parallel=True) as llm:
        assert not llm.config.engine_process
