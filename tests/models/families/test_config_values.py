"""Ordinary values of config.json and of the preprocessor's JSON that the rows of tests/families do not have.

Each case saves a row's small checkpoint with one changed value and compares tokens and logits with those of transformers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from family import Family, ask, save
from oracle import ensure_torchvision, randomise
from parity import ROWS, limit, make_llm, positions, record
from sensorium.callers.errors import ConfigError
from sensorium.checkpoints.config import check_activation
from sensorium.kernels.activation import act_and_mul, activation
from sensorium.models.families.dual_encoder.model import AttentionPooling
from sensorium.models.vision.encoders import encoder_spec

ensure_torchvision()
import transformers as tf  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402

SIGLIP = "siglip_vision_model"
CONFIG, IMAGE, VIDEO = "config.json", "preprocessor_config.json", "video_preprocessor_config.json"


def changed(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of a config with one value changed; `path`: its keys, joined by dots."""
    out: dict[str, Any] = copy.deepcopy(dict(config))
    *sections, last = path.split(".")
    part = out
    for section in sections:
        part = part[section]
    part[last] = value
    return out


def save_changed(row: Family, folder: Path, file: str, changes: Mapping[str, Any]) -> Path:
    """Save the row's checkpoint with changed values. Changes of config.json give the model new random weights."""
    save(row, folder)
    values = json.loads((folder / file).read_text())
    for path, value in changes.items():
        values = changed(values, path, value)
    if file == CONFIG:
        kind = getattr(tf, values["architectures"][0])
        model = kind(kind.config_class.from_dict(copy.deepcopy(values))).eval()
        randomise(model, 0)
        generation = folder / "generation_config.json"
        before = generation.read_text() if generation.is_file() else None
        model.save_pretrained(folder)
        if before is not None:
            generation.write_text(before)
    (folder / file).write_text(json.dumps(values))
    return folder


def compare(row: Family, folder: Path, case: str = "", sizes: list[tuple[int, ...]] | None = None) -> None:
    """Assert that prompt tokens and logits are those of transformers."""
    question = ask(row, case or row.default_cases()[-1], 1, sizes)
    llm = make_llm(row, folder)
    output, ours = record(llm, question, 2)
    model, processor = row.load(folder)
    inputs, ids = question.theirs(processor), output.outputs[0].token_ids
    assert inputs["input_ids"][0].tolist() == list(output.prompt_token_ids)
    theirs = row.run(model, inputs, ids, positions(llm, question, len(ids)))
    assert (ours - theirs).abs().max() < limit(row, theirs)


ENCODER_ACTS = [  # the activations of encoders of images, one for each encoder that has another config class
    ("gemma3", "hidden_act", "relu"),
    ("paligemma", "hidden_act", "mish"),
    ("llava", "hidden_act", "gelu"),
    ("pixtral", "hidden_act", "gelu"),
    ("qwen3_vl", "hidden_act", "silu"),
    ("qwen3_5", "hidden_act", "gelu"),
    ("glm4v", "hidden_act", "gelu"),
    ("llama4", "hidden_act", "relu"),
    ("lfm2_vl", "hidden_act", "quick_gelu"),
    ("idefics3", "hidden_act", "tanh"),
    ("aria", "hidden_act", "relu2"),
    ("ernie4_5_vl", "hidden_act", "gelu"),
    ("gemma4", "hidden_activation", "silu"),
    ("got_ocr2", "hidden_act", "relu"),
    ("phi4_multimodal", "hidden_act", "gelu"),
    ("paddleocr_vl", "hidden_act", "silu"),
]
CONTEXTS: list[dict[str, Any]] = [  # of attention in the encoder of Gemma 4's audio
    {"attention_context_right": 4},
    {"attention_context_left": 9, "attention_chunk_size": 4},
    {"attention_context_left": 4, "attention_context_right": 7, "attention_chunk_size": 16},
]
SYMMETRIC = {"bias_symmetric": True, "bias_max_distance": 90, "depthwise_multiplier": 3}  # transformers fails at 90 rows
MOONSHINE: list[dict[str, Any]] = [
    {"attention_bias": True},
    {"decoder_num_key_value_heads": 1},
    {"encoder_num_attention_heads": 2, "encoder_num_key_value_heads": 2},
    {"encoder_num_attention_heads": 8, "encoder_num_key_value_heads": 8},
    {"decoder_num_attention_heads": 2, "decoder_num_key_value_heads": 2},
]
STREAMING: list[dict[str, Any]] = [
    {"attention_bias": True},
    {"encoder_config.attention_bias": True},
    {"encoder_config.num_key_value_heads": 1},
    {"encoder_config.num_key_value_heads": 2, "encoder_config.attention_bias": True, "attention_bias": True},
    {"encoder_config.num_attention_heads": 8},
    {"head_dim": 24},  # 19 rotated numbers
]
TRAINED = {"original_max_position_embeddings": 40}
ODD = {"partial_rotary_factor": 0.45, "mrope_section": [2, 1, 1]}  # 7 numbers of 16
LONG = {name: [1.2, 1.5, 2.0, 2.2] for name in ("short_factor", "long_factor")} | {
    "factor": 2.0,
    "original_max_position_embeddings": 1024,
}
ROPES = [
    {**values, "rope_theta": 1e3, "partial_rotary_factor": 0.25}
    for values in (
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, **TRAINED},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED},
    )
]
CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2_vl", CONFIG, {"text_config.hidden_act": "gelu_new", "vision_config.hidden_act": "mish"}),
    ("qwen2_5_vl", CONFIG, {"vision_config.hidden_act": "gelu"}),
    ("internvl", CONFIG, {"projector_hidden_act": "gelu_new", "vision_config.hidden_act": "relu6"}),
    ("idefics2", CONFIG, {"perceiver_config.hidden_act": "tanh", "text_config.hidden_act": "relu"}),
    ("text-qwen3_moe", CONFIG, {"hidden_act": "relu"}),
    ("text-llama4_text", CONFIG, {"num_experts_per_tok": 3, "hidden_act": "gelu"}),
    ("llama4", CONFIG, {"text_config.num_experts_per_tok": 2}),
    ("text-gpt_oss", CONFIG, {"swiglu_limit": 0.3, "swiglu_alpha": 2.5, "hidden_act": "gelu"}),
    *(("mllama", CONFIG, {"vision_config.hidden_act": act}) for act in ("gelu_new", "swish")),
    *((name, CONFIG, {f"vision_config.{key}": act}) for name, key, act in ENCODER_ACTS),
    ("pixtral", CONFIG, {"vision_feature_layer": [-1, 0, 2]}),
    ("mistral3", CONFIG, {"vision_feature_layer": [-2]}),
    ("aya_vision", CONFIG, {"vision_feature_layer": [-2]}),
    *(("qwen3_vl", CONFIG, {"vision_config.deepstack_visual_indexes": layers}) for layers in ([2, 0], [1, 3, 0, 1], [])),
    ("qwen3_vl", CONFIG, {"text_config.head_dim": 24}),
    *(
        (name, CONFIG, {f"text_config.rope_parameters.{key}": value for key, value in ODD.items()})
        for name in ("glm4v", "glm_ocr")
    ),
    ("qwen3_5", CONFIG, {"text_config.rope_parameters.partial_rotary_factor": 0.45}),
    *(
        ("qwen3_5", CONFIG, {f"text_config.rope_parameters.{key}": value for key, value in (ODD | rope).items()})
        for rope in ({"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "longrope", **LONG})
    ),
    ("glmasr", CONFIG, {"audio_config.rope_parameters.partial_rotary_factor": 0.35}),
    ("glmasr", CONFIG, {"audio_config.num_key_value_heads": 2, "audio_config.head_dim": 24}),
    ("aria", CONFIG, {"text_config.mlp_bias": True}),
    ("aria", CONFIG, {"text_config.mlp_bias": True, "text_config.hidden_act": "gelu_new"}),
    ("aria", CONFIG, {"max_value_projector_patch_to_query_dict": 17}),
    *(("moonshine", CONFIG, changes) for changes in MOONSHINE),
    *(("moonshine_streaming", CONFIG, changes) for changes in STREAMING),
    ("qwen3_vl", CONFIG, {"text_config.rope_parameters.mrope_section": [24, 20, 20]}),
    *(
        ("molmo2", CONFIG, changes)
        for changes in (
            {"vision_config.num_key_value_heads": 2, "adapter_config.num_key_value_heads": 1},
            {"vision_config.head_dim": 24, "adapter_config.head_dim": 8},
            {"adapter_config.mlp_bias": True, "adapter_config.num_key_value_heads": 2},
        )
    ),
    ("gemma3", CONFIG, {"text_config.use_bidirectional_attention": True, "text_config.sliding_window": 12}),
    ("gemma4", CONFIG, {"vision_config.attention_bias": True}),  # the tower has no biases anyway
    ("qwen3_5", CONFIG, {"vision_config.deepstack_visual_indexes": [0]}),  # ignored by this model
    ("mllama", CONFIG, {"vision_config.intermediate_layers_indices": [-1, 0]}),
    *(("got_ocr2", CONFIG, {"vision_config.use_abs_pos": False, "vision_config.use_rel_pos": flag}) for flag in (True, False)),
    *(("glmasr", CONFIG, {"audio_config.rope_parameters": rope}) for rope in ROPES),
    ("phi4_multimodal", CONFIG, {f"audio_config.{key}": value for key, value in SYMMETRIC.items()}),
    ("fun_asr_nano", CONFIG, {"audio_config.layer_norm_eps": 0.5}),
    ("musicflamingo", CONFIG, {"rope_parameters": ROPES[1]}),
    *(("gemma4", CONFIG, {f"audio_config.{key}": value for key, value in changes.items()}) for changes in CONTEXTS),
]
SIZES: dict[str, list[tuple[int, ...]]] = {  # of images and videos that are not resized
    "qwen2_vl": [(56, 112), (4, 56, 84), (84, 28)], "qwen3_vl": [(64, 96), (4, 64, 32), (32, 64)],
    "glm4v": [(56, 112), (4, 56, 84), (84, 28)], "pixtral": [(60, 90), (14, 112), (100, 57)],
    "idefics2": [(56, 84), (28, 70), (84, 42)], "lighton_ocr": [(60, 90), (42, 100), (56, 70)],
}  # fmt: skip
SIZES["kimi_vl"] = [(60, 93), (84, 59), (57, 112)]  # whole patches make whole rows
IGNORED = {"do_resize": False, "do_normalize": False, "rescale_factor": 2.0, "resample": 2, "size": {"longest_edge": 9}}
KEPT = {"do_resize": False}
PADS = {"image_processor_type": "LlavaImageProcessor"}
CHANGES += [
    *((name, file, KEPT) for name in ("qwen2_vl", "qwen3_vl", "glm4v") for file in (IMAGE, VIDEO)),
    *(
        (name, IMAGE, KEPT)
        for name in ("llava", "llava_next", "llava_onevision", "internvl", "pixtral", "idefics2", "idefics3", "smolvlm")
    ),
    ("lighton_ocr", IMAGE, KEPT),
    ("smolvlm", VIDEO, KEPT),
    ("aria", IMAGE, {"do_resize": False}),
    *(
        ("ovis2", IMAGE, {"use_covering_area_grid": False, "crop_to_patches": True, **more})
        for more in ({}, {"min_patches": 3})
    ),
    ("ovis2", IMAGE, {"do_resize": False, "crop_to_patches": True}),
    *(
        ("llava", IMAGE, {"do_pad": True, "image_mean": [0.2, 0.5, 0.8], **more})
        for more in (
            {},
            PADS,
            {**PADS, "do_resize": False, "crop_size": {"height": 28, "width": 28}},
            {**PADS, "do_center_crop": False, "size": {"height": 28, "width": 28}},
        )
    ),
    ("kimi_vl", IMAGE, {"pad_input": False, "image_mean": [0.2, 0.5, 0.8]}),
    ("kimi_vl", IMAGE, IGNORED),
    *(("molmo2", file, {"do_resize": False}) for file in (IMAGE, VIDEO)),
    *((name, IMAGE, {"resample": 0}) for name in ("qwen2_vl", "llava", "internvl", "idefics2", "pixtral")),
    *((name, IMAGE, {"image_mean": [0.4], "image_std": [0.3]}) for name in ("qwen2_vl", "internvl")),
    ("idefics2", IMAGE, {"size": {"height": 70, "width": 98}}),
    ("idefics3", IMAGE, {"size": {"height": 70, "width": 120}}),
    ("idefics3", IMAGE, {"size": {"height": 70, "width": 120}, "do_image_splitting": False}),
]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "file", "changes"), CHANGES, ids=[f"{name}-{file}-{changes}" for name, file, changes in CHANGES]
)
def test_values_are_computed_as_in_transformers(name: str, file: str, changes: dict[str, Any], tmp_path: Path) -> None:
    keeps = changes is KEPT or "pad_input" in changes
    compare(ROWS[name], save_changed(ROWS[name], tmp_path, file, changes), sizes=SIZES.get(name) if keeps else None)


@pytest.mark.sampled
def test_the_first_patch_is_dropped_where_there_is_no_class_token(tmp_path: Path) -> None:
    row, siglip = ROWS["llava"], {"model_type": SIGLIP, "vision_use_head": False}
    save(row, tmp_path, vision=siglip, select="default")
    processor = {"patch_size": 7, "num_additional_image_tokens": 0, "vision_feature_select_strategy": "default"}
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    compare(row, tmp_path)


@pytest.mark.sampled
def test_the_projector_beside_a_decoder_with_experts(tmp_path: Path) -> None:
    """Its width is that of `intermediate_size`."""
    row = ROWS["idefics2"]
    save(row, tmp_path, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    compare(row, tmp_path)


@pytest.mark.sampled
def test_several_images_that_are_not_resized(tmp_path: Path) -> None:
    """LLaVA-OneVision pads each of them to a square, which must have the tower's size."""
    row = ROWS["llava_onevision"]
    save_changed(row, tmp_path, IMAGE, KEPT)
    compare(row, tmp_path, "ii", [(28, 20), (9, 28)])
    (output,) = make_llm(row, tmp_path).generate(ask(row, "ii", 0, [(28, 20), (20, 30)]).ours, use_tqdm=False)
    assert output.error is not None
    assert "a longer side of 28 pixels, not 30x20" in output.error.text


@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_activations_are_those_of_transformers(name: str) -> None:
    """The bits of an element are the same wherever it is in a tensor."""
    if name in ("prelu", "xielu"):
        with pytest.raises(ConfigError, match="parameters of its own"):
            check_activation("hidden_act", name)
        return
    ours, x = check_activation("hidden_act", name), torch.randn(41, 2 * 37, generator=torch.Generator().manual_seed(0)) * 4
    made = activation(ours, x)
    torch.testing.assert_close(made, ACT2FN[name](x), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(act_and_mul(ours, x), ACT2FN[name](x[:, :37]) * x[:, 37:], rtol=2e-6, atol=4e-6)
    assert all(torch.equal(activation(ours, row[None]), made[i : i + 1]) for i, row in enumerate(x))
    halves = act_and_mul(ours, x)
    assert all(torch.equal(act_and_mul(ours, row[None]), halves[i : i + 1]) for i, row in enumerate(x))


@pytest.mark.parametrize(("alias", "name"), [("gelu_new", "gelu_pytorch_tanh"), ("swish", "silu")])
def test_pooling_by_attention_takes_other_names_of_activations(alias: str, name: str) -> None:
    """The head of SigLIP's images reads `hidden_act` as its tower does."""
    tower = encoder_spec({"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "hidden_act": alias}, SIGLIP)
    assert AttentionPooling(tower, torch.float32, torch.device("meta")).act == name
