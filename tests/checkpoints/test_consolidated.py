"""Checkpoints with params.json, consolidated weights and tekken.json give the answers of the Hub's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import load_rows, make_media
from oracle import small_tekken
from PIL import Image
from safetensors.torch import save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.checkpoints.consolidated import hub_config
from sensorium.engine.model_files import load_model_files

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
    """Convert weights to the publisher's layout, in which rotated pairs of queries and keys are adjacent."""
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
    return text_params(text) | {
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


def text_params(text: Any) -> dict[str, Any]:
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
    }


def make(folder: Path, name: str, shards: int = 1) -> Any:
    """Build the oracle and save its weights in the publisher's own layout."""
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


def image(size: tuple[int, int], seed: int) -> Image.Image:
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
    images = [image((60, 90), 1), image((112, 28), 2)]
    talk = [
        {"role": "user", "content": [*({"type": "image", "image": one} for one in images), {"type": "text", "text": "and?"}]}
    ]
    rows = []
    head = llm.engine.loop.core.executor.runner.model.compute_logits
    llm.engine.loop.core.executor.runner.model.compute_logits = lambda hidden: rows.append(head(hidden)) or rows[-1]
    (output,) = llm.chat(talk, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0))
    ids = list(output.prompt_token_ids) + list(output.outputs[0].token_ids)
    want = oracle_logits(model, ids, images, merge)[:-1]
    torch.testing.assert_close(torch.cat(rows), want, atol=2e-4 * max(1.0, float(want.std())), rtol=0)
    assert [int(token) for token in want[-8:].argmax(-1)] == ids[-8:]
    assert ids.count(IMAGE_TOKEN) == sum(grid.num_embeds for grid in _grids(llm, images))


def _grids(llm: LLM, images: list[Image.Image]) -> list[Any]:
    plans = llm.plan({"prompt": "[IMG]" * len(images), "multi_modal_data": {"image": images}})
    return list(plans)


YARN = {"original_max_position_embeddings": 16, "factor": 4, "apply_scale": False, "beta": 32, "alpha": 1}
GROWING = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4,
}  # fmt: skip
LATENT_NAMES = {
    "q_a_proj": "wq_a", "q_b_proj": "wq_b", "q_a_layernorm": "q_a_norm", "kv_a_proj_with_mqa": "wkv_a_with_mqa",
    "kv_b_proj": "wkv_b", "kv_a_layernorm": "kv_a_norm",
}  # fmt: skip
TEXTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # kind, changes of the Hub's config, changes of params.json
    "windows": (
        "ministral",
        {"head_dim": 16, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"sliding_window": [None, 8, None]},
    ),
    "growing queries": (
        "ministral3",
        {"rope_parameters": GROWING, "head_dim": 16},
        {"yarn": YARN, "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.4}},
    ),
    "experts": ("mixtral", {"sliding_window": None}, {"moe": {"num_experts": 8, "num_experts_per_tok": 2}}),
    "latent": (
        "mistral4",
        {"rope_parameters": GROWING, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 8},
        {"yarn": YARN | {"apply_scale": True}, "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.4}},
    ),
    "fp8": ("mistral", {"sliding_window": None}, {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}),
}


def latent_name(own: str) -> str:
    for part in ("gate.", "experts.", "shared_experts."):
        own = own.replace(f"feed_forward.{part}", part)
    for hub, name in LATENT_NAMES.items():
        own = own.replace(f"self_attn.{hub}.", f"attention.{name}.")
    return own


def latent_params(config: Any) -> dict[str, Any]:
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {name: getattr(config, name) for name in sizes} | {
        "moe": {
            "num_experts": config.n_routed_experts, "num_experts_per_tok": config.num_experts_per_tok,
            "expert_hidden_dim": config.moe_intermediate_size, "first_k_dense_replace": config.first_k_dense_replace,
            "num_shared_experts": 1, "num_expert_groups": 1, "num_expert_groups_per_tok": 1, "routed_scale": 1.0,
            "route_every_n": 1, "expert_parallel": 1, "expert_model_parallel": 1,
        },
    }  # fmt: skip


def text_weights(model: Any, fp8: bool) -> dict[str, torch.Tensor]:
    """Convert weights to the publisher's layout. `fp8`: also round those of the model's layers."""
    out, config = {}, model.config
    for name, tensor in list(model.state_dict().items()):
        own = own_name(name).replace("block_sparse_moe.", "feed_forward.").replace("mlp.gate.", "feed_forward.gate.")
        if config.model_type == "mistral4":
            own = latent_name(own)
        if fp8 and tensor.ndim == 2 and ".layers." in name:
            scale = tensor.abs().max() / 448
            codes = (tensor / scale).to(torch.float8_e4m3fn)
            tensor.copy_(codes.float() * scale)
            out[own.replace(".weight", ".qscale_weight")], tensor = scale, codes
            out[own.replace(".weight", ".qscale_act")] = torch.tensor(1.0)
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_key_value_heads if "k_proj" in name else config.num_attention_heads
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        if ".experts." in name:
            stem = own[: own.index("experts.") + 8]
            parts = {"w2": tensor} if "down_proj" in name else dict(zip(("w1", "w3"), tensor.chunk(2, 1), strict=True))
            out |= {f"{stem}{i}.{part}.weight": one.clone() for part, several in parts.items() for i, one in enumerate(several)}
        else:
            out[own] = tensor.contiguous().clone()
    if fp8:
        out["layers.0.attention.kv_fake_quantizer.qscale_act"] = torch.tensor(1.0)
    return out


@pytest.mark.parametrize("name", TEXTS)
def test_text_models(name: str, tmp_path: Path) -> None:
    """The folder also holds the config.json of the Hub's layout, whose weights are not there."""
    kind, changes, params = TEXTS[name]
    model, _ = load_rows()["text-llama"].build(0, kind=kind, vocab_size=2000, **changes)
    save_file(text_weights(model, name == "fp8"), tmp_path / "consolidated.safetensors")
    model.config.save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text(json.dumps(small_tekken()))
    text = model.config
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    own = latent_params(text) if name == "latent" else {}
    (tmp_path / "params.json").write_text(json.dumps(text_params(text) | params | own))
    llm, rows = open_llm(tmp_path), []
    head = llm.engine.loop.core.executor.runner.model.compute_logits
    llm.engine.loop.core.executor.runner.model.compute_logits = lambda hidden: rows.append(head(hidden)) or rows[-1]
    asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    (output,) = llm.chat([{"role": "user", "content": "Which letters follow each other in this sentence? " * 3}], asked)
    ids = list(output.prompt_token_ids) + list(output.outputs[0].token_ids)
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    torch.testing.assert_close(torch.cat(rows), want, atol=2e-4 * max(1.0, float(want.std())), rtol=0)
    assert len(ids) > 40


AUDIO_PARTS = {
    "audio_tower.conv1": "conv_layers.0", "audio_tower.conv2": "conv_layers.1", "audio_tower.layer_norm": "transformer.norm",
    "audio_tower.layers": "transformer.layers", "self_attn.out_proj": "attention.wo", "fc1": "feed_forward.w1",
    "fc2": "feed_forward.w2", "self_attn_layer_norm": "attention_norm", "final_layer_norm": "ffn_norm",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
}  # fmt: skip


def audio_name(name: str) -> str:
    stem = name.removeprefix("model.")
    if stem.startswith("audio_tower."):
        for hub, own in AUDIO_PARTS.items():
            stem = stem.replace(hub, own)
        return f"mm_whisper_embeddings.whisper_encoder.{stem}"
    if stem.startswith("multi_modal_projector.linear_"):
        layer = 2 * int(stem.split("_")[3][0]) - 2
        return f"mm_whisper_embeddings.audio_language_projection.{layer}.weight"
    own = own_name(name)
    return f"mm_whisper_embeddings.{own}" if own.startswith("tok_embeddings") else own


def make_audio(folder: Path) -> tuple[Any, Any]:
    """Build the oracle and its feature extractor; the tower has the published position table, which is not stored."""
    from transformers.models.whisper.modeling_whisper import sinusoids

    row = load_rows()["voxtral"]
    model, extractor = row.build(0, vocab_size=2000)
    text, tower = model.config.text_config, model.model.audio_tower
    tower.embed_positions.weight.data.copy_(sinusoids(*tower.embed_positions.weight.shape))
    weights = {}
    for name, tensor in model.state_dict().items():
        if "language_model" in name and ("q_proj" in name or "k_proj" in name):
            heads = text.num_key_value_heads if "k_proj" in name else text.num_attention_heads
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        if "embed_positions" not in name:
            weights[audio_name(name)] = tensor.contiguous().clone()
    save_file(weights, folder / "consolidated.safetensors")
    audio = model.config.audio_config
    encoder = {
        "dim": audio.hidden_size,
        "n_layers": audio.num_hidden_layers,
        "hidden_dim": audio.intermediate_size,
        "n_heads": audio.num_attention_heads,
        "max_source_positions": audio.max_source_positions,
        "audio_encoding_args": {"num_mel_bins": audio.num_mel_bins, "hop_length": 160, "window_size": 400},
    }
    heard = {"encoder_args": encoder, "downsample_args": {"downsample_factor": 4}}
    params = text_params(text) | {"multimodal": {"whisper_model_args": heard}}
    (folder / "params.json").write_text(json.dumps(params))
    row.finish(folder)
    return model, extractor


def test_audio_answers_as_the_same_weights_in_the_other_layout(tmp_path):
    model, extractor = make_audio(tmp_path)
    llm = open_llm(tmp_path)
    items = [make_media("audio", (samples,), samples) for samples in (30_000, 70_234)]
    content = [*({"type": "audio", "audio": (one, 16_000)} for one in items), {"type": "text", "text": "and?"}]
    rows = []
    head = llm.engine.loop.core.executor.runner.model.compute_logits
    llm.engine.loop.core.executor.runner.model.compute_logits = lambda hidden: rows.append(head(hidden)) or rows[-1]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    (output,) = llm.chat([{"role": "user", "content": content}], params)
    assert output.error is None
    ids = list(output.prompt_token_ids) + list(output.outputs[0].token_ids)
    assert ids.count(model.config.audio_token_id) == 25 + 75
    window = 2 * 16_000
    whole = [np.pad(one, (0, -len(one) % window)) for one in items]
    features = [extractor(one, sampling_rate=16_000, truncation=False, return_tensors="pt")["input_features"] for one in whole]
    windows = torch.cat([torch.cat(one.split(window // 160, -1)) for one in features])
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([ids]), input_features=windows).logits[0, :-1]
    torch.testing.assert_close(torch.cat(rows), want, atol=2e-4 * max(1.0, float(want.std())), rtol=0)
    assert [int(token) for token in want[-8:].argmax(-1)] == ids[-8:]
    assert llm.transcribe((items[0], 16_000), language="en", use_tqdm=False)[0].error is None


def test_what_does_not_fit_is_named(tmp_path):
    make(tmp_path, "pixtral")
    params = json.loads((tmp_path / "params.json").read_text())
    for change, said in (
        ({"yarn": {"factor": 4}}, "yarn"),
        ({"yarn": {"factor": 4, "original_max_position_embeddings": 16, "gamma": 2}}, "gamma"),
        ({"llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1}}, "llama_4_scaling"),
        ({"llama_4_scaling": {"beta": 0.1}}, r"llama_4_scaling in params\.json needs yarn"),
        ({"sliding_window": [{}, None]}, r"sliding_window in params\.json is \{\}"),
        ({"moe": {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}}, "num_shared_experts"),
        ({"quantization": {"qformat_weight": "nvfp4"}}, "quantization in params.json"),
        ({"sliding_window": [16, 32]}, "sliding_window"),
        ({"dim": None}, "dim"),
    ):
        (tmp_path / "params.json").write_text(json.dumps(params | change))
        with pytest.raises(ConfigError, match=said):
            open_llm(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps(params | {"vision_encoder": None}))  # a text model
    with pytest.raises(CheckpointError, match="holds unknown"):
        open_llm(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps(params | {"n_layers": 2}))
    with pytest.raises(CheckpointError, match=r"layers\.2"):
        open_llm(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"multimodal": "x"}, "multimodal in params.json is a str"),
        ({"multimodal": [1]}, "multimodal in params.json is a list"),
        ({"multimodal": {"whisper_model_args": 1}}, "whisper_model_args in params.json is an int"),
        ({"multimodal": {"whisper_model_args": {}}}, "no audio encoder"),
        ({"vision_encoder": [1]}, "vision_encoder in params.json is a list"),
        ({"encoder_args": [1]}, "encoder_args in params.json is a list"),
        ({"downsample_args": "x"}, "downsample_args in params.json is a str"),
        ({"downsample_args": {"downsample_factor": "4"}}, "downsample_factor in params.json is '4'"),
        ({"audio_encoding_args": "x"}, "audio_encoding_args in params.json is a str"),
        ({"audio_encoding_args": {"sampling_rate": 0}}, "sampling_rate in params.json is 0;"),
        ({"audio_encoding_args": {"sampling_rate": "x"}}, "sampling_rate in params.json is 'x'"),
        ({"audio_encoding_args": {"hop_length": None}}, "params.json lacks 'hop_length'"),
        ({"max_source_positions": [1]}, "max_source_positions in params.json"),
        ({"dim": "x"}, "dim in params.json is 'x'"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_named_with_its_file(tmp_path, change, said):
    encoder = {"dim": 8, "hidden_dim": 32, "n_layers": 1, "n_heads": 2}
    heard = {"encoder_args": encoder} | {key: change[key] for key in ("encoder_args", "downsample_args") if key in change}
    if not change.keys() & {"multimodal", "vision_encoder", *heard}:
        heard["encoder_args"] = encoder | change
        change = {}
    params = {"dim": 8, "hidden_dim": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 16}
    params |= {"multimodal": {"whisper_model_args": heard}} | change
    (tmp_path / "params.json").write_text(json.dumps(params))
    with pytest.raises(ConfigError, match=said):
        load_model_files(tmp_path)


def test_audio_encoding_args_may_be_missing():
    encoder = {"dim": 8, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "audio_encoding_args": None}
    params = {"dim": 8, "hidden_dim": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 16, "vision_encoder": None}
    kind, config = hub_config(params | {"multimodal": {"whisper_model_args": {"encoder_args": encoder}}})
    assert (kind, config["feature_extractor"]["sampling_rate"]) == ("audio", 16_000)


def test_kinds_are_told_apart():
    params = {"dim": 8, "hidden_dim": 9, "n_layers": 1, "n_heads": 2, "vocab_size": 99, "vision_encoder": {"hidden_size": 8}}
    kind, config = hub_config(params)
    assert (kind, config["spatial_merge_size"]) == ("images", 1)
    assert config["text_config"]["sliding_window"] is None  # a missing key means no window, unlike in the Hub's layout
    encoder = {"dim": 8, "n_layers": 1, "hidden_dim": 32, "n_heads": 2}
    heard = {"vision_encoder": None, "multimodal": {"whisper_model_args": {"encoder_args": encoder}}}
    kind, config = hub_config(params | heard)
    assert (kind, config["feature_extractor"]["chunk_length"]) == ("audio", 30)
    for change, said in (
        ({"causal": True}, "causal"),
        ({"hidden_dim": 31}, "downsample_factor 4"),
        ({"n_heads": None}, "n_heads"),
    ):
        made = {"vision_encoder": None, "multimodal": {"whisper_model_args": {"encoder_args": encoder | change}}}
        with pytest.raises(ConfigError, match=said):
            hub_config(params | made)
    kind, config = hub_config(params | {"vision_encoder": {"mm_projector_id": "patch_merge", "spatial_merge_size": 2}})
    assert (kind, config["spatial_merge_size"]) == ("merged images", 2)
