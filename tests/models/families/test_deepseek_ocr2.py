"""DeepSeek-OCR with its publisher's config.json: equal to transformers' layout for the second model; sizes of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family import ask, load_rows
from parity import LoadedModels, make_llm, record
from sensorium.callers.errors import ConfigError
from sensorium.models.families.deepseek_ocr2.model import DeepseekOcr, DeepseekOcr2
from sensorium.models.weights import named_layers

SAM = {"width": 768, "layers": 12, "heads": 12, "global_attn_indexes": [2, 5, 8, 11], "downsample_channels": [512, 1024]}
CLIP = {"width": 1024, "layers": 24, "heads": 16, "image_size": 224, "patch_size": 14}
TEXT = {
    "vocab_size": 129280, "hidden_size": 1280, "intermediate_size": 6848, "moe_intermediate_size": 896, "num_hidden_layers": 12,
    "num_attention_heads": 10, "num_key_value_heads": 10, "n_routed_experts": 64, "n_shared_experts": 2, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "topk_method": "greedy", "use_mla": False,
    "kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0,
    "max_position_embeddings": 8192,
}  # fmt: skip


def published(**width: Any) -> dict[str, Any]:
    vision = {"image_size": 1024, "mlp_ratio": 3.7362, "model_type": "vision", "width": {"sam_vit_b": SAM, **width}}
    return {"model_type": "deepseek_vl_v2", "language_config": TEXT, "vision_config": vision, **TEXT}


def shapes(kind: Any, config: dict[str, Any]) -> dict[str, list[int]]:
    model = kind(config, torch.bfloat16, torch.device("meta"))
    return {name: list(views[name].shape) for name, (_, views) in named_layers(model).items()}


def test_the_publishers_config_says_the_same(loaded: LoadedModels, tmp_path: Path) -> None:
    """SAM's last channels equal the encoder's width, whatever the list states."""
    row, folder = load_rows()["deepseek_ocr2"], loaded.folder("deepseek_ocr2")
    config = json.loads((folder / "config.json").read_text())
    text, sam, reader = config["text_config"], *(config["vision_config"][f"{name}_config"] for name in ("sam", "encoder"))
    for part, own in ((sam, "width"), (reader, "dim")):
        part[own], part["layers"], part["heads"] = (
            part.pop(name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
    dense = text.pop("mlp_layer_types").index("sparse")
    sam["downsample_channels"] = [24, 1024]
    said = {
        "architectures": ["DeepseekOCR2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "language_config": text | {"first_k_dense_replace": dense},
        "vision_config": {"mlp_ratio": 3.7362, "width": {"sam_vit_b": sam, "qwen2-0-5b": reader}},
        "image_token_id": config["image_token_id"],
    }
    for file in folder.iterdir():
        (tmp_path / file.name).hardlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(said))
    question = ask(row, "i")
    assert torch.equal(record(make_llm(row, tmp_path), question, 1)[1], record(loaded.llm(row.name), question, 1)[1])


def test_the_published_sizes_of_the_first() -> None:
    found = shapes(DeepseekOcr, published(**{"clip-l-14-224": CLIP}))
    assert found["sam.net_3.weight"] == [1024, 9 * 512]
    assert found["clip.embeddings.position_embedding.weight"] == [257, 1024]
    assert found["clip.transformer.layers.23.self_attn.qkv_proj.weight"] == [3072, 1024]
    assert found["clip.transformer.layers.23.mlp.fc1.weight"] == [4096, 1024]
    assert found["projector.proj.weight"] == [1280, 2048]
    assert found["language_model.layers.11.mlp.experts.63.down_proj.weight"] == [1280, 896]


def test_the_published_sizes_of_the_second() -> None:
    found = shapes(DeepseekOcr2, published(**{"qwen2-0-5b": {"dim": 896}}))
    assert found["sam.net_3.weight"] == [896, 9 * 512]
    assert found["encoder.layers.23.self_attn.k_proj.weight"] == [128, 896]
    assert found["encoder.layers.23.mlp.down_proj.weight"] == [896, 4864]
    assert found["query_1024.weight"] == [256, 896]
    assert found["projector.proj.weight"] == [1280, 896]


def test_widths_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="width 1024, CLIP takes 512"):
        DeepseekOcr(published(**{"clip-l-14-224": CLIP | {"width": 512}}), torch.float32, torch.device("meta"))
