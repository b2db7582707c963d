"""Checkpoints of params.json, consolidated weights and tekken.json: they answer as the same weights in the Hub's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import load_rows
from oracle import small_tekken
from PIL import Image
from safetensors.torch import save_file
from sensorium import LLM, SamplingParams
from sensorium.mm.errors import CheckpointError, ConfigError
from sensorium.models.consolidated import hub_config

IMAGE_TOKEN, EDGE, PATCH = 10, 112, 14
PARTS = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "attention.q_proj": "attention.wq", "attention.k_proj": "attention.wk",
    "attention.v_proj": "attention.wv", "attention.o_proj": "attention.wo", "gate_proj": "w1", "down_proj": "w2",
    "up_proj": "w3", "mlp.": "feed_forward.", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "language_model.": "", "embed_tokens": "tok_embeddings", "lm_head": "output", "vision_tower.": "vision_encoder.",
    "multi_modal_projector.linear_1": "vision_language_adapter.w_in", "multi_modal_projector.norm": "pre_mm_projector_norm",
    "multi_modal_projector.linear_2": "vision_language_adapter.w_out", "multi_modal_projector.patch_merger": "patch_merger",
}  # fmt: skip


def own_name(name: str) -> str:
    name = name.removeprefix("model.")
    for hub, own in PARTS.items():
        name = name.replace(hub, own)
    return name


def own_weights(model: Any) -> dict[str, torch.Tensor]:
    """Rows of queries and keys so that pairs of rotary positions are neighbours."""
    out = {}
    for name, tensor in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            heads = 2 if "language_model" in name and "k_proj" in name else 4
            halves = tensor.view(heads, 2, -1, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        out[own_name(name)] = tensor.contiguous().clone()
    return out


def params_of(model: Any) -> dict[str, Any]:
    text, vision = model.config.text_config, model.config.vision_config
    merge = getattr(model.config, "spatial_merge_size", None)
    merged = {"spatial_merge_size": merge, "mm_projector_id": "patch_merge", "max_image_size": EDGE} if merge else {}
    return {
        "dim": text.hidden_size,
        "hidden_dim": text.intermediate_size,
        "n_layers": text.num_hidden_layers,
        "n_heads": text.num_attention_heads,
        "n_kv_heads": text.num_key_value_heads,
        "head_dim": text.head_dim,
        "norm_eps": text.rms_norm_eps,
        "rope_theta": text.rope_parameters["rope_theta"],
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "vision_encoder": {
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_hidden_layers": vision.num_hidden_layers,
            "num_attention_heads": vision.num_attention_heads,
            "num_channels": 3,
            "image_size": EDGE,
            "patch_size": PATCH,
            "rope_theta": 10000.0,
            "image_token_id": IMAGE_TOKEN,
            "adapter_bias": merge is None,
            **merged,
        },
    }


def make(folder: Path, name: str, shards: int = 1) -> Any:
    """The oracle; its weights in the publisher's own layout lie in the folder."""
    model, _ = load_rows()[name].build(0, act="silu", vocab_size=2000)
    model.config.image_token_index = IMAGE_TOKEN
    weights = own_weights(model)
    (folder / "params.json").write_text(json.dumps(params_of(model)))
    (folder / "tekken.json").write_text(json.dumps(small_tekken()))
    if shards == 1:
        save_file(weights, folder / "consolidated.safetensors")
        return model
    names = sorted(weights)
    places = {}
    for number in range(shards):
        file, part = f"consolidated-{number + 1:05d}-of-{shards:05d}.safetensors", names[number::shards]
        save_file({key: weights[key] for key in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return model


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, dtype="float32", device="cpu", max_model_len=512, max_num_seqs=4, block_size=4, **options)


def picture(size: tuple[int, int], seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def oracle_logits(model: Any, ids: list[int], images: list[Image.Image], merge: int) -> torch.Tensor:
    from transformers import PixtralImageProcessor

    side = {"height": PATCH * merge, "width": PATCH * merge}
    made = PixtralImageProcessor(size={"longest_edge": EDGE}, patch_size=side)(images, return_tensors="pt")
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), **made).logits[0]


@pytest.mark.parametrize(("name", "merge", "shards"), [("pixtral", 1, 1), ("pixtral", 1, 3), ("mistral3", 2, 1)])
def test_it_answers_as_the_same_weights_in_the_other_layout(tmp_path, name, merge, shards):
    model, llm = make(tmp_path, name, shards), open_llm(tmp_path)
    images = [picture((60, 90), 1), picture((112, 28), 2)]
    talk = [
        {"role": "user", "content": [*({"type": "image", "image": one} for one in images), {"type": "text", "text": "and?"}]}
    ]
    rows = []
    head = llm._driver.core.runner.model.compute_logits
    llm._driver.core.runner.model.compute_logits = lambda hidden: rows.append(head(hidden)) or rows[-1]
    (output,) = llm.chat(talk, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0))
    ids = list(output.prompt_token_ids) + list(output.outputs[0].token_ids)
    want = oracle_logits(model, ids, images, merge)[:-1]
    torch.testing.assert_close(torch.cat(rows), want, atol=2e-4 * max(1.0, float(want.std())), rtol=0)
    assert [int(token) for token in want[-8:].argmax(-1)] == ids[-8:]
    assert ids.count(IMAGE_TOKEN) == sum(grid.num_embeds for grid in _grids(llm, images))


def _grids(llm: LLM, images: list[Image.Image]) -> list[Any]:
    plans = llm.plan({"prompt": "[IMG]" * len(images), "multi_modal_data": {"image": images}})
    return list(plans)


def test_what_does_not_fit_is_named(tmp_path):
    make(tmp_path, "pixtral")
    params = json.loads((tmp_path / "params.json").read_text())
    for change, said in (
        ({"yarn": {"factor": 4}}, "yarn"),
        ({"vision_encoder": None}, "vision_encoder"),
        ({"dim": None}, "dim"),
    ):
        (tmp_path / "params.json").write_text(json.dumps(params | change))
        with pytest.raises(ConfigError, match=said):
            open_llm(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps(params | {"n_layers": 2}))
    with pytest.raises(CheckpointError, match=r"layers\.2"):
        open_llm(tmp_path)


def test_kinds_are_told_apart():
    params = {"dim": 8, "hidden_dim": 9, "n_layers": 1, "n_heads": 2, "vocab_size": 99, "vision_encoder": {"hidden_size": 8}}
    kind, config = hub_config(params)
    assert (kind, config["spatial_merge_size"]) == ("pictures", 1)
    kind, config = hub_config(params | {"vision_encoder": {"mm_projector_id": "patch_merge", "spatial_merge_size": 2}})
    assert (kind, config["spatial_merge_size"]) == ("merged pictures", 2)
