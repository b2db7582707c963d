"""Text models and encoders of GGUF files: the names that llama.cpp gives them, and what its metadata leave out.

Source: the conversion scripts of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...callers.errors import ConfigError
from ..config import positive_int
from .reader import Gguf

_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
_GEMMA_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_GLM_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


@dataclass(frozen=True)
class Arch:
    """The text model of a `general.architecture`.

    Args:
        name: of its class, without ForCausalLM.
        kind: model_type of its text config. sigmoid: that of files whose router uses sigmoids.
        paired: the file stores rotated pairs of queries and keys side by side; our stack rotates halves.
        local_rope: layers with a window have rotary positions of their own.
        windows: use the sliding window of the metadata.
        log_scale: `rope.scaling.yarn_log_multiplier` is mscale_all_dim times this.
        wide_layers: number of layers of the model that scales attention by hidden size / heads instead of the head's
            width; 0: no such model.
        norms: names of the norms before and after attention and the MLP.
        fused: gate and up projection of the MLP are one matrix.
        norm_offset: the file adds this to the weights of norms.
        more: other keys of config.json.
    """

    name: str
    kind: str
    paired: bool = False
    local_rope: bool = False
    windows: bool = False
    sigmoid: str = ""
    log_scale: float = 1.0
    wide_layers: int = 0
    norms: tuple[str | None, ...] = _NORMS
    fused: bool = False
    norm_offset: float = 0.0
    more: Mapping[str, Any] = field(default_factory=dict)

    def config(self, sigmoid: bool) -> dict[str, Any]:
        """Return keys of config.json. `sigmoid`: the router uses sigmoids."""
        return {"model_type": self.sigmoid if sigmoid and self.sigmoid else self.kind, **self.more}


_GEMMA: dict[str, Any] = {"norms": _GEMMA_NORMS, "norm_offset": 1.0, "more": {"hidden_activation": "gelu_pytorch_tanh"}}
ARCHS: Mapping[str, Arch] = {
    "deepseek2": Arch("DeepseekV3", "deepseek_v2", sigmoid="deepseek_v3", log_scale=0.1),
    "ernie4_5": Arch("Ernie4_5", "ernie4_5"),
    "gemma": Arch("Gemma", "gemma", norm_offset=1.0),
    "gemma2": Arch("Gemma2", "gemma2", windows=True, wide_layers=46, **_GEMMA),
    "gemma3": Arch("Gemma3", "gemma3_text", local_rope=True, windows=True, wide_layers=62, **_GEMMA),
    "glm4": Arch("Glm4", "glm4", norms=_GLM_NORMS, fused=True),
    "granite": Arch("Granite", "granite", paired=True),
    "llama": Arch("Llama", "llama", paired=True, windows=True),
    "mistral3": Arch("Ministral3", "ministral3", paired=True),
    "phi3": Arch("Phi3", "phi3", windows=True, fused=True),
    "qwen2": Arch("Qwen2", "qwen2"),
    "qwen2vl": Arch("Qwen2", "qwen2"),
    "qwen3": Arch("Qwen3", "qwen3"),
    "qwen3moe": Arch("Qwen3Moe", "qwen3_moe"),
    "qwen3vl": Arch("Qwen3", "qwen3"),
    "qwen3vlmoe": Arch("Qwen3Moe", "qwen3_moe"),
}

_SIGLIP = {
    "ln1": "layer_norm1", "ln2": "layer_norm2", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_out": "self_attn.out_proj", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip
_QWEN = {
    "ln1": "norm1", "ln2": "norm2", "attn_q": "attn.qkv", "attn_qkv": "attn.qkv", "attn_out": "attn.proj",
    "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip
_QWEN_GATED = _QWEN | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QWEN3 = _QWEN | {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}
_PIXTRAL = {
    "ln1": "attention_norm", "ln2": "ffn_norm", "attn_q": "attention.q_proj", "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj", "attn_out": "attention.o_proj", "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
}  # fmt: skip
_INTERNVL = {
    "ln1": "norm1", "ln2": "norm2", "attn_q": "attn.qkv", "attn_out": "attn.proj", "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
}  # fmt: skip
_QWEN_WHOLE = {
    "v.patch_embd": "model.visual.patch_embed.proj",
    "v.post_ln": "model.visual.merger.ln_q",
    "mm.0": "model.visual.merger.mlp.0",
    "mm.2": "model.visual.merger.mlp.2",
}


@dataclass(frozen=True)
class ImageProjector:
    """The family of a `clip.projector_type`.

    Args:
        models: `general.architecture` of a text model -> architecture in config.json.
        config: function from the encoder, its shape and the tokens' ids to the sections and keys beside text_config.
        layers: prefix of the tower's layers; `parts`: names within a layer; `whole`: names outside the layers.
        fused: queries, keys and values are one tensor in the Hub's layout.
        paired: the file stores rotated pairs of queries and keys side by side; our tower rotates halves.
        bare: tensors whose names have no ".weight" in the Hub's layout.
        norms: endings of norms that are stored with 1 added.
        section: key of the text config in config.json.
        image_token: placeholder of images, if the vocabulary of a file may lack it; else "".
        last: tensor whose outputs are the encoder rows, if their width is not the metadata's projection_dim; else "".
    """

    models: Mapping[str, str]
    config: Callable[[Gguf, dict[str, Any], Mapping[str, int]], dict[str, Any]]
    layers: str
    parts: Mapping[str, str]
    whole: Mapping[str, str]
    fused: bool = False
    paired: bool = False
    bare: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    section: str = "text_config"
    image_token: str = ""
    last: str = ""


def _qwen_config(gated: bool, encoder: Gguf, shape: dict[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
    width, out = shape["hidden_size"], positive_int(encoder.metadata, "clip.vision.projection_dim", encoder.path.name)
    vision = {
        "depth": shape["num_hidden_layers"],
        "num_heads": shape["num_attention_heads"],
        "patch_size": shape["patch_size"],
        "spatial_merge_size": encoder.metadata.get("clip.vision.spatial_merge_size", 2),
    }
    inner = _rows(encoder, "v.blk.0.ffn_up.bias")
    if gated:
        every = encoder.metadata.get("clip.vision.n_wa_pattern", 8)
        full = range(every - 1, min(shape["num_hidden_layers"], len(encoder.tensors)), every) if every else ()
        window = encoder.metadata.get("clip.vision.window_size", 112)
        vision |= {"hidden_size": width, "intermediate_size": inner, "out_hidden_size": out, "tokens_per_second": 2}
        vision |= {"fullatt_block_indexes": list(full), "window_size": window}
    else:
        inner = max(inner, _rows(encoder, "v.blk.0.ffn_down.bias"))  # older files have the two names swapped
        vision |= {"embed_dim": width, "hidden_size": out, "mlp_ratio": inner / width}
    names = {f"{name}_token_id": f"<|{name}_pad|>" for name in ("image", "video")}
    names |= {f"vision_{end}_token_id": f"<|vision_{end}|>" for end in ("start", "end")}
    ids = {key: tokens[text] for key, text in names.items() if text in tokens}
    return {"vision_config": vision, **ids}


def _gemma3_config(encoder: Gguf, shape: dict[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
    side = shape["image_size"] // shape["patch_size"] // encoder.metadata.get("clip.vision.projector.scale_factor", 4)
    names = {
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
        "image_token_index": "<image_soft_token>",
    }
    return {
        "vision_config": {"model_type": "siglip_vision_model", **shape},
        "mm_tokens_per_image": side**2,
        **{key: tokens[text] for key, text in names.items() if text in tokens},
        "image_token_index": tokens.get("<image_soft_token>", len(tokens)),  # files leave it out; `vocabulary_rows` adds a row
    }


def _qwen3_config(encoder: Gguf, shape: dict[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
    flags = encoder.metadata.get("clip.vision.is_deepstack_layers", ())
    config = _qwen_config(False, encoder, shape, tokens)
    vision = config["vision_config"] | {
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["intermediate_size"],
        "out_hidden_size": config["vision_config"]["hidden_size"],
        "num_position_embeddings": _rows(encoder, "v.position_embd.weight"),
        "deepstack_visual_indexes": [layer for layer, flag in enumerate(flags) if flag],
    }
    return config | {"vision_config": vision}


def _idefics3_config(encoder: Gguf, shape: dict[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the config of SmolVLM, which takes videos too, if the vocabulary has a placeholder for them."""
    smolvlm = {"architectures": ["SmolVLMForConditionalGeneration"]} if "<video>" in tokens else {}
    ids = {"image_token_id": tokens["<image>"]} if "<image>" in tokens else {}
    factor = encoder.metadata.get("clip.vision.projector.scale_factor", 4)
    return {"vision_config": shape, "scale_factor": factor, **ids, **smolvlm}


def _pixtral_config(encoder: Gguf, shape: dict[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the config of Pixtral or, with merged patches, of Mistral 3."""
    merge = encoder.metadata.get("clip.vision.spatial_merge_size", 1)
    act = "silu" if encoder.metadata.get("clip.use_silu") else "gelu"
    return {
        "vision_config": {"model_type": "pixtral", "hidden_act": act, "rope_theta": 10000.0, **shape},
        "vision_feature_layer": -1,
        "multimodal_projector_bias": "mm.1.bias" in encoder.tensors,
        **({"image_token_id": tokens["[IMG]"]} if "[IMG]" in tokens else {}),
        **({"spatial_merge_size": merge, "architectures": ["Mistral3ForConditionalGeneration"]} if merge != 1 else {}),
    }


def _llava_config(encoder: Gguf, shape: dict[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the config of LLaVA 1.5 or, with tiles, of LLaVA-NeXT. The file lacks layers after the last used one."""
    get = encoder.metadata.get
    act = "gelu" if get("clip.use_gelu") else "silu" if get("clip.use_silu") else "quick_gelu"
    layers, pairs = get("clip.vision.feature_layer"), get("clip.vision.image_grid_pinpoints")
    tiles = {} if pairs is None else {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "image_grid_pinpoints": [[int(high), int(wide)] for wide, high in zip(pairs[::2], pairs[1::2], strict=True)],
    }  # fmt: skip
    return {
        "vision_config": {"model_type": "clip_vision_model", "hidden_act": act, **shape},
        "vision_feature_layer": -1 if layers is None else [int(layer) for layer in layers],
        "image_token_index": tokens.get("<image>", len(tokens)),
        **tiles,
    }


def _internvl_config(encoder: Gguf, shape: dict[str, Any], tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return a config in the layout of InternVL's publisher, whose chat template takes images."""
    first, get = "v.blk.0.", encoder.metadata.get
    vision = shape | {
        "qk_normalization": f"{first}attn_q_norm.weight" in encoder.tensors,
        "qkv_bias": f"{first}attn_q.bias" in encoder.tensors,
        "norm_type": "layer_norm" if f"{first}ln1.bias" in encoder.tensors else "rms_norm",
    }
    return {
        "vision_config": vision,
        "downsample_ratio": 1 / get("clip.vision.projector.scale_factor", 2),
        "force_image_size": shape["image_size"],
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "min_dynamic_patch": get("clip.vision.preproc_min_tiles", 1),
        "max_dynamic_patch": get("clip.vision.preproc_max_tiles", 12),
        "ps_version": "v2",
        "template": "internvl2_5",
    }


PROJECTORS: Mapping[str, ImageProjector] = {
    "gemma3": ImageProjector(
        {"gemma3": "Gemma3ForConditionalGeneration"},
        _gemma3_config,
        "model.vision_tower.encoder.layers",
        _SIGLIP,
        {
            "v.patch_embd": "model.vision_tower.embeddings.patch_embedding",
            "v.position_embd": "model.vision_tower.embeddings.position_embedding",
            "v.post_ln": "model.vision_tower.post_layernorm",
            "mm.input_projection": "model.multi_modal_projector.mm_input_projection",
            "mm.soft_emb_norm": "model.multi_modal_projector.mm_soft_emb_norm",
        },
        norms=("mm_soft_emb_norm.weight",),
        image_token="<image_soft_token>",
    ),
    "qwen2vl_merger": ImageProjector(
        {"qwen2vl": "Qwen2VLForConditionalGeneration"},
        partial(_qwen_config, False),
        "model.visual.blocks",
        _QWEN,
        _QWEN_WHOLE,
        fused=True,
    ),
    "qwen2.5vl_merger": ImageProjector(
        {"qwen2vl": "Qwen2_5_VLForConditionalGeneration"},
        partial(_qwen_config, True),
        "model.visual.blocks",
        _QWEN_GATED,
        _QWEN_WHOLE,
        fused=True,
    ),
    "qwen3vl_merger": ImageProjector(
        {"qwen3vl": "Qwen3VLForConditionalGeneration", "qwen3vlmoe": "Qwen3VLMoeForConditionalGeneration"},
        _qwen3_config,
        "model.visual.blocks",
        _QWEN3,
        {
            "v.patch_embd": "model.visual.patch_embed.proj",
            "v.position_embd": "model.visual.pos_embed",
            "v.post_ln": "model.visual.merger.norm",
            "mm.0": "model.visual.merger.linear_fc1",
            "mm.2": "model.visual.merger.linear_fc2",
        },
        fused=True,
    ),
    "idefics3": ImageProjector(
        {"llama": "Idefics3ForConditionalGeneration"},
        _idefics3_config,
        "model.vision_model.encoder.layers",
        _SIGLIP,
        {
            "v.patch_embd": "model.vision_model.embeddings.patch_embedding",
            "v.position_embd": "model.vision_model.embeddings.position_embedding",
            "v.post_ln": "model.vision_model.post_layernorm",
            "mm.model.fc": "model.connector.modality_projection.proj",
        },
    ),
    "internvl": ImageProjector(
        dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "llama"), "InternVLChatModel"),
        _internvl_config,
        "vision_model.encoder.layers",
        _INTERNVL,
        {
            "v.class_embd": "vision_model.embeddings.class_embedding",
            "v.patch_embd": "vision_model.embeddings.patch_embedding",
            "v.position_embd": "vision_model.embeddings.position_embedding",
            "mm.model.mlp.0": "mlp1.0",
            "mm.model.mlp.1": "mlp1.1",
            "mm.model.mlp.3": "mlp1.3",
        },
        fused=True,
        bare=("position_embd", "ls1", "ls2"),
        section="llm_config",
    ),
    "mlp": ImageProjector(
        dict.fromkeys(("llama", "phi3", "qwen2"), "LlavaForConditionalGeneration"),
        _llava_config,
        "model.vision_tower.vision_model.encoder.layers",
        _SIGLIP,
        {
            "v.class_embd": "model.vision_tower.vision_model.embeddings.class_embedding",
            "v.patch_embd": "model.vision_tower.vision_model.embeddings.patch_embedding",
            "v.position_embd": "model.vision_tower.vision_model.embeddings.position_embedding",
            "v.pre_ln": "model.vision_tower.vision_model.pre_layrnorm",
            "v.post_ln": "model.vision_tower.vision_model.post_layernorm",
            "mm.0": "model.multi_modal_projector.linear_1",
            "mm.2": "model.multi_modal_projector.linear_2",
            "model.image_newline": "model.image_newline",
        },
        image_token="<image>",
        last="mm.2.weight",
    ),
    "pixtral": ImageProjector(
        {"llama": "LlavaForConditionalGeneration", "mistral3": "Mistral3ForConditionalGeneration"},
        _pixtral_config,
        "model.vision_tower.transformer.layers",
        _PIXTRAL,
        {
            "v.patch_embd": "model.vision_tower.patch_conv",
            "v.pre_ln": "model.vision_tower.ln_pre",
            "mm.1": "model.multi_modal_projector.linear_1",
            "mm.2": "model.multi_modal_projector.linear_2",
            "mm.input_norm": "model.multi_modal_projector.norm",
            "mm.patch_merger": "model.multi_modal_projector.patch_merger.merging_layer",
        },
        paired=True,
    ),
}
"""`clip.projector_type` -> family."""


def _rows(encoder: Gguf, name: str) -> int:
    tensor = encoder.tensors.get(name)
    if tensor is None:
        raise ConfigError(f"{encoder.path.name} lacks {name}; download it again")
    return tensor.shape[0]
