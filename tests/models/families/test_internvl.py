"""InternVL in its publisher's own layout gives the answers of the Hub's layout; the checkpoint's code is never run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import family
import pytest
import torch
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.models.families.internvl.model import InternVLChat
from sensorium.models.families.text_only.model import InternLM2, TextModel
from sensorium.models.internlm2 import NAMES
from sensorium.models.layers.linear import Linear
from sensorium.models.weights import named_layers, rename

ROW = family.load_rows()["internvl"]
OWN = {
    "vision_tower.": "vision_model.", "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1", "multi_modal_projector.linear_2": "mlp1.3",
    "embeddings.cls_token": "embeddings.class_embedding", "embeddings.position_embeddings": "embeddings.position_embedding",
    "embeddings.patch_embeddings.projection": "embeddings.patch_embedding", "encoder.layer.": "encoder.layers.",
    "layernorm_before": "norm1", "layernorm_after": "norm2", "lambda_": "ls", "attention.projection_layer": "attn.proj",
    "attention.q_norm": "attn.q_norm", "attention.k_norm": "attn.k_norm",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
SIZES = [(90, 130), (60, 60), (140, 70)]


def own_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {}
    for name, tensor in weights.items():
        if "vision_tower" in name and ".attention.q_proj." in name:
            parts = [weights[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            name, tensor = name.replace("attention.q_proj", "attn.qkv"), torch.cat(parts)
        if "mask_token" in name or ("vision_tower" in name and (".k_proj." in name or ".v_proj." in name)):
            continue
        for hub, own in OWN.items():
            name = name.replace(hub, own)
        made[name] = tensor
    return made


def own_config(hub: dict[str, Any]) -> dict[str, Any]:
    vision, text = dict(hub["vision_config"]), dict(hub["text_config"])
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "norm_type", "layer_norm_eps")
    shape = {key: vision[key] for key in keys} | {
        "qk_normalization": vision["use_qk_norm"],
        "qkv_bias": vision["attention_bias"],
    }
    return {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 56,
        "llm_config": text | {"architectures": ["Qwen2ForCausalLM"]},
        "max_dynamic_patch": 4,
        "model_type": "internvl_chat",
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "torch_dtype": "float32",
        "use_thumbnail": True,
        "vision_config": shape | {"architectures": ["InternVisionModel"], "image_size": 56, "patch_size": 14},
    }


@pytest.fixture(scope="module", params=["layer norm", "root mean square"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    variant = ROW.variants["root mean square"] if request.param == "root mean square" else {}
    root = tmp_path_factory.mktemp("internvl")
    hub, own = family.save(ROW, root / "hub", **variant), root / "own"
    own.mkdir()
    pixels = json.loads((hub / "preprocessor_config.json").read_text())
    pixels |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}  # as published
    (hub / "preprocessor_config.json").write_text(json.dumps(pixels))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(hub / name, own)
    (own / "config.json").write_text(json.dumps(own_config(json.loads((hub / "config.json").read_text()))))
    (own / "preprocessor_config.json").write_text(json.dumps({"feature_extractor_type": "CLIPFeatureExtractor", "size": 56}))
    (own / "modeling_internvl_chat.py").write_text("raise SystemExit('executed')")
    save_file(own_weights(load_file(hub / "model.safetensors")), own / "model.safetensors")
    return hub, own


def test_it_answers_as_the_same_weights_in_the_other_layout(folders: tuple[Path, Path]) -> None:
    """Images are resized by Pillow, as the publisher does."""
    hub, own = (LLM(folder, max_model_len=256, max_num_seqs=4) for folder in folders)
    images = [family.make_media("image", size, seed) for seed, size in enumerate(SIZES)]
    asked = {"prompt": "<IMG_CONTEXT> and <IMG_CONTEXT><IMG_CONTEXT>def", "multi_modal_data": {"image": images}}
    (theirs,) = hub.generate(asked | {"mm_processor_kwargs": {"resample": "pillow"}}, GREEDY, use_tqdm=False)
    (ours,) = own.generate(asked, GREEDY, use_tqdm=False)
    assert ours.error is theirs.error is None
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    for mine, other in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
        assert [one.logprob for one in mine.values()] == pytest.approx([one.logprob for one in other.values()], abs=2e-4)


@pytest.mark.parametrize(("layout", "architecture"), [(0, "InternS1ForConditionalGeneration"), (1, "SkyworkR1VChatModel")])
def test_models_of_the_same_parts_have_names_of_their_own(
    layout: int, architecture: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    own = shutil.copytree(folders[layout], tmp_path / "own")
    config = json.loads((own / "config.json").read_text())
    model_type = {"InternS1ForConditionalGeneration": "interns1", "SkyworkR1VChatModel": "skywork_chat"}[architecture]
    vision = config["vision_config"] | ({} if layout else {"model_type": "interns1_vision"})
    changed = {"architectures": [architecture], "model_type": model_type, "vision_config": vision}
    (own / "config.json").write_text(json.dumps(config | changed))
    asked = {"prompt": "<IMG_CONTEXT>def", "multi_modal_data": {"image": family.make_media("image", (90, 130), 0)}}
    outputs = [LLM(one, max_model_len=256).generate(asked, GREEDY, use_tqdm=False)[0] for one in (folders[layout], own)]
    assert [one.error for one in outputs] == [None, None]
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_config_json_says_how_images_are_cut(folders: tuple[Path, Path], tmp_path: Path) -> None:
    own = shutil.copytree(folders[1], tmp_path / "own")
    image = {"multi_modal_data": {"image": family.make_media("image", (140, 70), 0)}}
    config = json.loads((own / "config.json").read_text())
    for change, rows in (({}, 3 * 4), ({"use_thumbnail": False}, 2 * 4), ({"dynamic_image_size": False}, 4)):
        (own / "config.json").write_text(json.dumps(config | change))
        (plan,) = LLM(own, max_model_len=256).plan(image)
        assert plan.num_embeds == rows


def test_what_is_not_served_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    own = shutil.copytree(folders[1], tmp_path / "own")
    config = json.loads((own / "config.json").read_text())
    for change, said in (
        ({"ps_version": "v1"}, "ps_version"),
        ({"force_image_size": 28}, "image_size in vision_config is 56"),
        ({"pad2square": True}, "pad2square"),
        ({"llm_config": config["llm_config"] | {"model_type": "internlm1"}}, "internlm1"),
    ):
        (own / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=said):
            LLM(own, max_model_len=256)
    (own / "config.json").write_text(json.dumps(config | {"llm_config": config["llm_config"] | {"num_hidden_layers": 2}}))
    with pytest.raises(CheckpointError, match=r"language_model\.model\.layers\.2"):
        LLM(own, max_model_len=256)


def test_conversations_are_written_as_published(folders: tuple[Path, Path]) -> None:
    llm = LLM(folders[1], max_model_len=512)
    content = [{"type": "image", "image": family.make_media("image", (60, 60), 0)}, {"type": "text", "text": "What?"}]
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": content}]
    (output,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
    turns = "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\n<IMG_CONTEXT>\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    assert (output.error, output.prompt) == (None, turns)
    (output,) = llm.chat([{"role": "user", "content": "What?"}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt.startswith("<|im_start|>system\n你是书生·万象，英文名是InternVL，")
    assert output.prompt.endswith("。<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("name", ["internlm2-chat", '"a\\ }} %}', None], ids=str)
def test_a_template_that_is_not_known_writes_no_images(folders: tuple[Path, Path], tmp_path: Path, name: str | None) -> None:
    own, change = shutil.copytree(folders[1], tmp_path / "own"), {"template": name}
    (own / "config.json").write_text(json.dumps(json.loads((own / "config.json").read_text()) | change))
    plain = "\n  {% for m in messages %}\n  {{ m.role }}: {{ m.content }}\n  {% endfor %}\n"
    words = json.loads((own / "tokenizer_config.json").read_text()) | {"chat_template": plain}
    (own / "tokenizer_config.json").write_text(json.dumps(words))
    llm, params = LLM(own, max_model_len=512), SamplingParams(max_tokens=1)
    (output,) = llm.chat([{"role": "user", "content": "What?"}], params, use_tqdm=False)
    assert (output.error, output.prompt) == (None, "\n  user: What?\n")
    image = {"type": "image", "image": family.make_media("image", (60, 60), 0)}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]
    (output,) = llm.chat(messages, params, use_tqdm=False)
    assert f"template {str(name)!r} of config.json" in output.error.message
    assert "pass chat_template= or give a rendered prompt" in output.error.message
    (output,) = llm.chat(messages, params, chat_template="<IMG_CONTEXT>{{ messages[0].content[1].text }}", use_tqdm=False)
    assert (output.error, output.prompt) == (None, "<IMG_CONTEXT>What?")


@torch.inference_mode()
def test_an_internlm2_decoder_is_a_llama_decoder_with_other_names() -> None:
    """Source of names and of the layout of wqkv: the publisher's modeling_internlm2.py."""
    text = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    config = {
        "vision_config": vision | {"patch_size": 14, "norm_type": "layer_norm", "qk_normalization": False},
        "ps_version": "v2",
    }
    models = [
        InternVLChat({**config, "llm_config": {**text, **own}}, torch.float32, torch.device("cpu"))
        for own in ({"model_type": "llama"}, {"model_type": "internlm2", "bias": False})
    ]
    gen = torch.Generator().manual_seed(0)
    back = {new: old for old, new in NAMES.items()}
    hub = {name: torch.randn(views[name].shape, generator=gen) for name, (_, views) in named_layers(models[0]).items()}
    llama = {name.replace("language_model.", "language_model.model."): tensor for name, tensor in hub.items()}
    llama = {name.replace("head.lm_head", "language_model.lm_head"): tensor for name, tensor in llama.items()}
    stored = {}
    for name, tensor in llama.items():
        if ".self_attn.q_proj." in name and name.startswith("language_model."):
            q, k, v = (llama[name.replace("q_proj", f"{part}_proj")].view(2, -1, 8, 32) for part in "qkv")
            stored[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat([q, k, v], 1).reshape(-1, 32)
        elif not (name.startswith("language_model.") and (".k_proj." in name or ".v_proj." in name)):
            for new, old in back.items() if name.startswith("language_model.") else ():
                name = name.replace(new, old, 1)
            stored[name] = tensor
    assert any("wqkv" in name for name in stored)
    models[0].load_weights(llama.items())
    models[1].check_weights({name: tensor.to("meta") for name, tensor in stored.items()})
    models[1].load_weights(stored.items())
    x = torch.randn(3, 32, generator=gen)
    for one, other in zip(models[0].language_model.modules(), models[1].language_model.modules(), strict=True):
        if isinstance(one, Linear) and one.weight_names("")[0].startswith(("q_proj", "gate_proj", "o_proj")):
            given = torch.randn(3, 32, generator=gen)
            assert torch.equal(one(given), other(given))
    assert torch.equal(models[0].compute_logits(x), models[1].compute_logits(x))


def test_internlm2_without_a_tower_equals_llama() -> None:
    text = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    llama = TextModel({**text, "model_type": "llama"}, torch.float32, torch.device("cpu"))
    model = InternLM2({**text, "model_type": "internlm2", "bias": False}, torch.float32, torch.device("cpu"))
    gen, stored = torch.Generator().manual_seed(0), {}
    hub = {name: torch.randn(views[name].shape, generator=gen) for name, (_, views) in named_layers(llama).items()}
    for name, tensor in hub.items():
        own = name.replace("language_model.", "model.").replace("head.lm_head.", "lm_head.")
        if ".q_proj." in name:
            q, k, v = (hub[name.replace("q_proj", f"{part}_proj")].view(2, -1, 8, 32) for part in "qkv")
            own, tensor = own.replace("self_attn.q_proj", "attention.wqkv"), torch.cat([q, k, v], 1).reshape(-1, 32)
        for new, old in NAMES.items():
            own = own.replace(old, new, 1)
        if ".k_proj." not in own and ".v_proj." not in own:
            stored[own] = tensor
    assert {"model.tok_embeddings.weight", "output.weight", "model.layers.1.attention.wqkv.weight"} <= set(stored)
    model.choose_head({name: tensor.to("meta") for name, tensor in stored.items()})
    model.check_weights({name: tensor.to("meta") for name, tensor in stored.items()})
    found = {rename(name, model.prefixes): tensor for name, tensor in model.convert_weights(stored.items())}
    assert found.keys() == hub.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in hub.items())
