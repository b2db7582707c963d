"""A config.json that leaves out what equals the defaults of the publisher's config classes describes the same model."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import ensure_torchvision
from sensorium.callers.errors import ConfigError
from sensorium.engine.model_files import resolve
from sensorium.models.registry import native_architectures
from sensorium.models.weights import named_layers

ARCHITECTURES = native_architectures()

ensure_torchvision()
import transformers as tf  # noqa: E402

ROPE = {"rope_type": "default", "rope_theta": 1e4}
QWEN2 = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 3}
STATED: dict[str, dict[str, dict[str, Any]]] = {
    "ColQwen2ForRetrieval": {"vlm_config": {"text_config": QWEN2}},
    "Cosmos3Omni": {"vision_config": {"out_hidden_size": 4096}},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "DeepseekV2ForSequenceClassification": {"num_experts_per_tok": 6},
    "Ernie4_5_VLMoe": {"text_config": {"num_hidden_layers": 3}},
    "Ernie4_5_VL_Moe": {"text_config": {"num_hidden_layers": 3}},
    "Exaone4_5_": {"vision_config": {"out_hidden_size": 4096}},
    "FunAsrNano": {"text_config": {"hidden_size": 1024}},
    "Gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "Glm46V": {"text_config": {"rope_parameters": ROPE | {"mrope_section": [16, 24, 24]}}},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Glm4v": {"text_config": {"rope_parameters": ROPE | {"mrope_section": [16, 24, 24]}}},
    "Glm4vMoe": {"text_config": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "head_dim": 128}},
    "GlmOcr": {"text_config": {"hidden_size": 1536, "rope_parameters": ROPE | {"mrope_section": [16, 16, 16]}}},
    "GraniteSpeech": {"projector_config": {"encoder_hidden_size": 1024}},
    "GraniteSpeechPlus": {"projector_config": {"encoder_hidden_size": 1024}},
    "Kimi_K25": {"text_config": {"num_hidden_layers": 4}},
    "Llama4": {"vision_config": {"vision_output_dim": 4096}},
    "Llava/pixtral": {"vision_config": {"model_type": "pixtral"}},
    "LlavaNext": {"vision_config": {"image_size": 336}},
    "LlavaNextVideo": {"vision_config": {"image_size": 336}},
    "LlavaOnevision": {"vision_config": {"image_size": 384}},
    "NemotronH_Omni_Reasoning_V3": {"vision_config": {"layerscale_value": 1.0, "video_temporal_patch_size": 2}},
    "Qwen2VL": {"text_config": QWEN2},
    "Qwen2_5_VL": {"text_config": QWEN2},
    "Qwen3ASR": {"text_config": {"hidden_size": 3584}},
    "Qwen3ASR/qwen3_forced_aligner": {"text_config": {"hidden_size": 3584}},
    "Qwen3ASRForTokenClassification": {"text_config": {"hidden_size": 3584}},
    "Qwen3OmniMoe": {
        "thinker_config": {
            "text_config": {"head_dim": 128},
            "audio_config": {"output_dim": 2048},
            "vision_config": {"out_hidden_size": 2048},
        }
    },
    "Qwen3_5": {"vision_config": {"out_hidden_size": 4096}},
    "Qwen3_5Moe": {"vision_config": {"out_hidden_size": 2048}},
    "Qwen3VL": {"vision_config": {"out_hidden_size": 4096}},
    "Qwen3VLMoe": {"vision_config": {"out_hidden_size": 2048}},
}
"""Values that config.json states for a test, where the defaults of a family contradict each other or are too large."""
COLQWEN25 = ("ColQwen2ForRetrieval/qwen2_5_vl", "ColQwen2ForRetrieval/qwen2_5_vl_vision")  # the default wraps Qwen2-VL
CONTRADICT = (*COLQWEN25, "DeepseekOcr2", "Granite4Vision", "Qwen3OmniMoeThinker")  # too much would have to be stated
END = "ForConditionalGeneration"
HEADLESS = {name for name in ARCHITECTURES if f"{name.removesuffix('Model')}ForCausalLM" in ARCHITECTURES}
"""Decoders saved without a head, which have the class and the config of those with one."""
NAMES = [
    name
    for name in ARCHITECTURES
    if hasattr(tf, name.partition("/")[0]) and name.replace(END, "") not in CONTRADICT and name not in HEADLESS
]


def sections(config: dict[str, Any]) -> dict[str, Any]:
    """Keep the model types of all sections, and nothing else."""
    inside = {key: sections(part) for key, part in config.items() if isinstance(part, dict) and part.get("model_type")}
    return {"model_type": config["model_type"], **inside}


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    inside = {key: merged(config.get(key, {}), part) if isinstance(part, dict) else part for key, part in changes.items()}
    return {**config, **inside}


def described(name: str, config: dict[str, Any]) -> tuple[object, object]:
    """Return the shapes of all tensors, and the decoder's spec."""
    model = resolve(ARCHITECTURES[name].model)(config, torch.bfloat16, torch.device("meta"))
    shapes = {key: view.shape for _, views in named_layers(model).values() for key, view in views.items()}
    spec = getattr(model, "spec", None)
    shapes.pop("head.lm_head.weight", None)
    return shapes, None if spec is None else replace(spec, tied=False)  # whether the head is tied, its stored tensor says


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_the_publishers(name: str) -> None:
    kind = getattr(tf, name.partition("/")[0]).config_class
    short = merged(sections(kind().to_dict()), STATED.get(name.replace(END, ""), {}))
    whole = kind.from_dict(copy.deepcopy(short)).to_dict()
    assert described(name, short) == described(name, whole)


@pytest.mark.parametrize("name", ["Ovis2", "MiniCPMOcr", "MiniCPMV4_6", "PaliGemma", "LlavaNext", "Idefics3"])
def test_heads_are_tied_by_default_as_in_transformers(name: str) -> None:
    """Plans of folders without weights depend on it; with weights, whether a head is stored decides."""
    kind = getattr(tf, name + END)
    short = merged(sections(kind.config_class().to_dict()), STATED.get(name, {}))
    with torch.device("meta"):
        theirs = kind._from_config(kind.config_class.from_dict(copy.deepcopy(short)))
    model = resolve(ARCHITECTURES[name + END].model)(short, torch.bfloat16, torch.device("meta"))
    assert model.spec.tied == (theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight)


@pytest.mark.parametrize("name", [name for name in NAMES if END in name])
def test_families_that_take_any_decoder_are_marked(name: str) -> None:
    """`takes_any_stack` is true where an unknown model_type of the text config is refused."""
    kind = getattr(tf, name.partition("/")[0]).config_class
    config = merged(sections(kind().to_dict()), STATED.get(name.replace(END, ""), {}))
    if not isinstance(config.get("text_config"), dict):
        pytest.skip("its decoder has no section")
    config["text_config"]["model_type"] = "unheard_of"
    refused = False
    try:
        resolve(ARCHITECTURES[name].model)(config, torch.bfloat16, torch.device("meta"))
    except ConfigError as error:
        refused = "'unheard_of' is not supported" in str(error)
    assert refused == ARCHITECTURES[name].takes_any_stack
