"""Adapters that peft itself writes: its own model is the oracle. Skipped where peft is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family import ask
from lora import compare
from parity import ROWS, LoadedModels, make_llm

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.in_process

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
TOKENS = [*range(1, 200, 2), 200, 201, 202, *range(300, 600)]
TABLE_AND_HEAD = {"embed_tokens": TOKENS, "lm_head": [7, 9, 300]}
RANKS = {"experts.gate_up_proj": 6}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "decoder and tower": ("qwen2_vl", "i", {"target_modules": r".*(q_proj|down_proj|visual\..*qkv)", "use_rslora": True}),
    "dora": ("qwen2_vl", "i", {"target_modules": r".*language_model.*(v_proj|up_proj)", "use_dora": True}),
    "tables": ("llava", "i", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "modules": (
        "llava", "i", {"target_modules": r".*language_model.*v_proj", "modules_to_save": ["multi_modal_projector", "lm_head"]},
    ),
    "tokens": ("llava", "i", {"target_modules": r".*language_model.*v_proj", "trainable_token_indices": TOKENS}),
    "tokens of a tied head": ("qwen3_vl tied", "i", {"target_modules": ["v_proj"], "trainable_token_indices": TOKENS[::-1]}),
    "tokens of a scaled table": ("gemma3", "i", {"target_modules": ["v_proj"], "trainable_token_indices": TOKENS}),
    "tokens of table and head": (
        "qwen2_vl", "i", {"target_modules": ["v_proj"], "trainable_token_indices": TABLE_AND_HEAD},
    ),
    "whisper": ("whisper", "a", {"target_modules": ["q_proj", "v_proj", "fc1"]}),
    "experts": ("text-qwen3_moe", "", {"target_modules": ["v_proj"], "target_parameters": EXPERTS, "rank_pattern": RANKS}),
    "experts of one parameter": ("text-qwen3_moe", "", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
    "router": ("text-qwen3_moe", "", {"target_modules": [], "target_parameters": ["mlp.gate.weight", *EXPERTS]}),
    "transposed experts": ("text-llama4_text wide experts", "", {"target_modules": [], "target_parameters": EXPERTS}),
    "experts known to be transposed": ("aria", "i", {"target_modules": [], "target_parameters": EXPERTS}),
    "experts beside an MLP": ("text-gemma4_text experts", "", {"target_modules": [], "target_parameters": EXPERTS}),
    "experts of each modality": ("ernie4_5_vl", "i", {"target_modules": [], "target_parameters": EXPERTS}),
    "vision-language experts": ("qwen3_vl_moe", "i", {"target_modules": [], "target_parameters": EXPERTS}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.")
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")  # peft looks for modules only
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_peft(tmp_path: Path, case: str) -> None:
    name, items, settings = CASES[case]
    name, _, variant = name.partition(" ")
    row, base = ROWS[name], LoadedModels(tmp_path).folder(name, variant=variant)
    model, processor = row.load(base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **settings))
    gen = torch.Generator().manual_seed(0)
    for key, parameter in adapted.named_parameters():
        if "lora_" in key or "modules_to_save" in key or "trainable_tokens" in key:
            parameter.data += torch.randn(parameter.shape, generator=gen) / 8
    adapted.save_pretrained(str(tmp_path / "adapter"))
    with make_llm(row, base, enable_lora=True) as llm:
        llm.load_adapter("mine", tmp_path / "adapter")
        oracle = adapted.eval().get_base_model()  # transformers' class with the layers of peft
        compare(llm, row, oracle, processor, ask(row, items, 0), adapter="mine")
        with adapted.disable_adapter():
            compare(llm, row, oracle, processor, ask(row, items, 0))
    if {
        "target_parameters",
        "trainable_token_indices",
    } & settings.keys() and name != "ernie4_5_vl":  # it stores the experts of all modalities in one row
        with make_llm(row, base, adapter=str(tmp_path / "adapter")) as merged:
            compare(merged, row, oracle, processor, ask(row, items, 0))
