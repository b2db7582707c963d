"""Molmo in the parity suite, composed of transformers' CLIP and Qwen2 (7B-D), OLMo 2 (7B-O) or OLMoE (MolmoE-1B).

Source of what is around them: the publisher's modeling_molmo.py, image_preprocessing_molmo.py and preprocessing_molmo.py; for
MolmoE, whose config.json and tensors have names of their own, modeling_molmoe.py.
"""

import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from family import IMAGE_SIZES, Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

MARKS = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>")
PATCH, SIDE, CROPS, MARGIN, WIDTH, HEADS = 4, 12, 12, 4, 64, 4
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
STEP, POOLED = SIDE - 2 * MARGIN, SIDE // 2
LAYERS = [-2, -4]
VISION = {
    "image_default_input_size": [PATCH * SIDE] * 2, "image_patch_size": PATCH, "image_emb_dim": WIDTH, "image_head_dim": 16,
    "image_num_heads": HEADS, "image_num_key_value_heads": HEADS, "image_num_layers": 4, "image_mlp_dim": 96,
    "image_num_pos": SIDE**2 + 1,
}  # fmt: skip
BACKBONE = "model.vision_backbone."
TOWER = {
    "embeddings.class_embedding": "class_embedding", "embeddings.position_embedding.weight": "positional_embedding",
    "embeddings.patch_embedding.": "patch_embedding.", "pre_layrnorm.": "pre_ln.",
    "encoder.layers.": "transformer.resblocks.", "self_attn.q_proj.": "attention.wq.", "self_attn.k_proj.": "attention.wk.",
    "self_attn.v_proj.": "attention.wv.", "self_attn.out_proj.": "attention.wo.", "layer_norm1.": "attention_norm.",
    "layer_norm2.": "ffn_norm.", "mlp.fc1.": "feed_forward.w1.", "mlp.fc2.": "feed_forward.w2.",
}  # fmt: skip
TEXT = {
    "model.layers.": "blocks.", "self_attn.o_proj.": "attn_out.", "self_attn.q_norm.": "q_norm.",
    "self_attn.k_norm.": "k_norm.", "mlp.down_proj.": "ff_out.", "model.norm.": "ln_f.", "lm_head.": "ff_out.",
}  # fmt: skip
NORMS = {
    True: {"post_attention_layernorm.": "attn_norm.", "post_feedforward_layernorm.": "ff_norm."},
    False: {"input_layernorm.": "attn_norm.", "post_attention_layernorm.": "ff_norm."},
}
SPARSE = {
    "model.layers.": "blocks.", "self_attn.o_proj.": "attn.attn_out.", "self_attn.q_norm.": "attn.q_norm.",
    "self_attn.k_norm.": "attn.k_norm.", "self_attn.att_proj.": "attn.att_proj.", "input_layernorm.": "attn.attn_norm.",
    "post_attention_layernorm.": "mlp.ff_norm.", "model.norm.": "ln_f.", "lm_head.": "ff_out.",
}  # fmt: skip
OLMO_KEYS = {
    "hidden_size": "d_model", "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads",
    "num_hidden_layers": "n_layers", "intermediate_size": "mlp_hidden_size",
}  # fmt: skip
PARTS = {"self_attn.q_proj": 0, "self_attn.k_proj": 1, "self_attn.v_proj": 2, "mlp.up_proj": 0, "mlp.gate_proj": 1}

EXPERTS = {
    "architectures": ["OLMoForCausalLM"], "qkv_bias": False, "attention_layer_norm": True, "n_kv_heads": None, "head_dim": None,
    "block_type": "moe", "mlp_hidden_size": None, "mlp_ratio": 1, "moe_num_experts": 4, "moe_top_k": 2, "moe_interleave": False,
    "moe_shared_expert": False, "rope_impl": "llama", "activation_type": "swiglu", "query_pre_attn_scalar": 224,
    "attention_layer_norm_with_affine": True, "image_projector": "mlp", "alibi": False, "include_bias": False,
}  # fmt: skip
"""Keys of MolmoE's config.json that the other models do not have, or for which it has other values."""


def with_plain_keys(config):
    """Return a config.json with the keys of Molmo-7B's."""
    made = {**config, **{key: config[own] for key, own in OLMO_KEYS.items() if own in config}}
    made["num_key_value_heads"] = made["num_key_value_heads"] or made["num_attention_heads"]
    return {**made, "intermediate_size": made["intermediate_size"] or made["mlp_ratio"] * made["hidden_size"]}


class Composed(nn.Module):
    def __init__(self, config):
        super().__init__()
        import transformers as tf

        self.config, config = config, with_plain_keys(config)
        self.experts, hidden, inner = config.get("moe_num_experts"), config["hidden_size"], config["intermediate_size"] // 2
        vision = {
            "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": HEADS,
            "image_size": PATCH * SIDE, "patch_size": PATCH, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
        }  # fmt: skip
        plain = {"attn_implementation": "eager"}
        self.tower = tf.CLIPVisionModel._from_config(tf.CLIPVisionConfig(**vision), **plain)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.o_proj, self.pad_embed = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.empty(2, 2 * WIDTH))
        self.w1, self.w3 = (nn.Linear(WIDTH, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, hidden, bias=False)
        rows = config["embedding_size"]
        own = {key: config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")}
        own |= {"vocab_size": rows + config["additional_vocab_size"], "intermediate_size": inner, "tie_word_embeddings": False}
        own |= {"rope_theta": config["rope_theta"], "rms_norm_eps": config["layer_norm_eps"], "pad_token_id": None}
        kind = tf.Olmo2Config if config["norm_after"] else tf.Qwen2Config
        if self.experts:
            kind = tf.OlmoeConfig
            own |= {"num_experts": self.experts, "num_experts_per_tok": config["moe_top_k"], "norm_topk_prob": False}
        self.language = tf.AutoModelForCausalLM.from_config(kind(**own, max_position_embeddings=4096), **plain)
        self.language.lm_head = nn.Linear(hidden, rows, bias=False)

    def encode(self, views, masks, tiling):
        """Return the rows of one image: `views` `[n, 3, side, side]`, the first small; `masks` `[n, patches]`."""
        states = self.tower(views, output_hidden_states=True).hidden_states
        x = torch.cat([states[layer] for layer in LAYERS], -1)[:, 1:]
        all_pad = masks == 0
        partly = (masks < 1) & ~all_pad
        x = x + self.pad_embed[0] * all_pad[..., None] + self.pad_embed[1] * partly[..., None]
        x = x.view(len(x), POOLED, 2, POOLED, 2, -1).transpose(2, 3).reshape(-1, 4, 2 * WIDTH)
        q, k, v = self.q_proj(x.mean(1, keepdim=True)), self.k_proj(x), self.v_proj(x)
        q, k, v = (one.unflatten(2, (HEADS, -1)).transpose(1, 2) for one in (q, k, v))
        pooled = self.o_proj(F.scaled_dot_product_attention(q, k, v)[:, :, 0].flatten(1))
        rows = self.w2(F.silu(self.w1(pooled)) * self.w3(pooled)).view(len(views), POOLED, POOLED, -1)
        cut, (tall, wide) = MARGIN // 2, tiling
        lines = []
        for i in range(tall):
            crops = rows[1 + i * wide : 1 + (i + 1) * wide, cut * (i > 0) : POOLED - cut * (i < tall - 1)]
            kept = [crops[j, :, cut * (j > 0) : POOLED - cut * (j < wide - 1)] for j in range(wide)]
            lines.append(torch.cat(kept, 1))
        return torch.cat([rows[0].flatten(0, 1), torch.cat(lines).flatten(0, 1)])

    def forward(self, input_ids, views=(), masks=(), tilings=(), past_key_values=None, use_cache=True):
        embeds = self.language.get_input_embeddings()(input_ids)
        if len(views):
            rows = [self.encode(*item) for item in zip(views, masks, tilings, strict=True)]
            embeds[input_ids == self.config["own"]["<im_patch>"]] += torch.cat(rows)
        return self.language(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=use_cache)

    def place(self, name):
        """Return the published name of a tensor, and its number among those that are joined."""
        if name.startswith("tower."):
            name = name.removeprefix("tower.").removeprefix("vision_model.")
            for ours, theirs in TOWER.items():
                name = name.replace(ours, theirs)
            return f"{BACKBONE}image_vit.{name}", 0
        if not name.startswith("language."):
            name = re.sub(r"^([qkvo])_proj", r"image_pooling_2d.w\1", name)
            return BACKBONE + re.sub(r"^(w\d)", r"image_projector.\1", name), 0
        name = name.removeprefix("language.")
        number = next((number for part, number in PARTS.items() if part in name), 0)
        module = "self_attn.att_proj" if self.experts else "att_proj"
        name = re.sub(r"self_attn\.[qkv]_proj", module, re.sub(r"mlp\.(up|gate)_proj", "ff_proj", name))
        for ours, theirs in (SPARSE if self.experts else TEXT | NORMS[self.config["norm_after"]]).items():
            name = name.replace(ours, theirs)
        return f"model.transformer.{name}", number

    def single(self):
        """Yield names and tensors, those of each expert apart."""
        for name, tensor in super().state_dict().items():
            path, found, part = name.partition("experts.")
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for number in range(self.experts) if found else ():
                for own, shard in zip(names, tensor[number].chunk(len(names)), strict=True):
                    yield f"{path}experts.{number}.{own}.weight", shard
            if not found:
                yield name, tensor

    def groups(self):
        """Return the published names and the tensors that are joined under each."""
        joined = {}
        for name, tensor in self.single():
            published, number = self.place(name)
            joined.setdefault(published, {})[number] = tensor
        return {name: [tensor for _, tensor in sorted(parts.items())] for name, parts in joined.items()}

    def state_dict(self, *args, **kwargs):
        made = {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in self.groups().items()}
        table = made.pop("model.transformer.model.embed_tokens.weight")
        rows = self.config["embedding_size"]
        made["model.transformer.wte.embedding"], made["model.transformer.wte.new_embedding"] = table[:rows], table[rows:]
        patches = f"{BACKBONE}image_vit.patch_embedding.weight"
        made[patches] = made[patches].permute(0, 2, 3, 1).flatten(1)
        return {name: tensor for name, tensor in made.items() if "post_layernorm" not in name}

    def restore(self, stored):
        stored = dict(stored)
        halves = [stored.pop(f"model.transformer.wte.{name}") for name in ("embedding", "new_embedding")]
        stored["model.transformer.model.embed_tokens.weight"] = torch.cat(halves)
        patches = f"{BACKBONE}image_vit.patch_embedding.weight"
        stored[patches] = stored[patches].unflatten(1, (PATCH, PATCH, 3)).permute(0, 3, 1, 2)
        for name, parts in self.groups().items():
            if "post_layernorm" not in name:
                for part, tensor in zip(parts, stored[name].split([len(part) for part in parts]), strict=True):
                    part.copy_(tensor)
        return self

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(
            {name: tensor.contiguous().clone() for name, tensor in self.state_dict().items()}, folder / "model.safetensors"
        )


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.words.save_pretrained(folder)
        made = {
            "base_image_input_size": [PATCH * SIDE] * 2, "do_normalize": True, "image_mean": MEAN, "image_std": STD,
            "image_padding_mask": True, "image_patch_size": PATCH, "image_processor_type": "MolmoImageProcessor",
            "image_token_length_h": POOLED, "image_token_length_w": POOLED, "max_crops": CROPS, "overlap_margins": [MARGIN] * 2,
        }  # fmt: skip
        (folder / "preprocessor_config.json").write_text(json.dumps(made))


def build(seed, olmo=False, experts=False, **more):
    words = fast_tokenizer(["<eos>", *MARKS], eos_token="<eos>", pad_token="<eos>")
    own, rows = text_config(words), len(words) - len(MARKS)
    heads = own["num_attention_heads"] if olmo else own["num_key_value_heads"]
    config = {
        "architectures": ["MolmoForCausalLM"], "model_type": "molmo", "attention_layer_norm": olmo, "norm_after": olmo,
        "qkv_bias": not olmo, "layer_norm_type": "rms", "layer_norm_eps": 1e-6, "rope_theta": 1e4, "clip_qkv": None,
        "weight_tying": False, "use_position_ids": True, "tie_word_embeddings": False, "max_position_embeddings": 4096,
        "embedding_size": rows, "vocab_size": rows - 1, "additional_vocab_size": len(MARKS), "vision_backbone": VISION,
        "vit_layers": LAYERS, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": heads, "own": dict(zip(MARKS, words.convert_tokens_to_ids(MARKS), strict=True)), **more,
    }  # fmt: skip
    if experts:
        config = {OLMO_KEYS.get(key, key): value for key, value in config.items()} | EXPERTS
    model = Composed(config).eval()
    randomise(model, seed)
    sharpen(model.tower)
    return model, Processor(words=words)


def load(folder):
    import transformers as tf

    model = Composed(json.loads((folder / "config.json").read_text()))
    stored = load_file(folder / "model.safetensors")
    return model.restore(stored).eval(), Processor(words=tf.PreTrainedTokenizerFast.from_pretrained(folder))


def fit(pixels, tall, wide):
    """Return uint8 pixels `[3, h, w]`, resized in float32 and padded with zeros, and a mask: True where not padded."""
    ensure_torchvision()
    from torchvision.transforms.functional import InterpolationMode, convert_image_dtype, resize

    size = pixels.shape[1:]
    scale = min(np.float32(wide) / np.float32(size[1]), np.float32(tall) / np.float32(size[0]))
    inner = [int(np.float32(side) * scale) for side in size]
    image = resize(convert_image_dtype(pixels), inner, InterpolationMode.BILINEAR, antialias=True).clip(0, 1)
    top, left = (tall - inner[0]) // 2, (wide - inner[1]) // 2
    pads = (left, wide - inner[1] - left, top, tall - inner[0] - top)
    mask = F.pad(torch.ones(inner), pads)
    return (F.pad(image, pads) - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None], mask


def select_tiling(tall, wide):
    grids = [(i, j) for i in range(1, CROPS + 1) for j in range(1, CROPS + 1) if i * j <= CROPS]
    grids = sorted(grids, key=lambda grid: (grid[0] * grid[1], grid[0]))
    with np.errstate(divide="ignore"):
        scales = (np.array(grids, np.float32) * (STEP * PATCH) / np.array([tall, wide], np.float32)).min(1)
    return grids[scales.argmax() if (scales < 1).all() else np.where(scales < 1, 10e9, scales).argmin()]


def prepare(image):
    """Return the views, the share of each patch that is not padding, and rows and columns of crops."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    margin = 2 * MARGIN * PATCH
    tiling = select_tiling(*(side - margin for side in pixels.shape[1:]))
    large, mask = fit(pixels, *(count * STEP * PATCH + margin for count in tiling))
    side, step = SIDE * PATCH, STEP * PATCH
    corners = [(i * step, j * step) for i in range(tiling[0]) for j in range(tiling[1])]
    views = [fit(pixels, side, side)[0], *(large[:, y : y + side, x : x + side] for y, x in corners)]
    shares = [F.avg_pool2d(mask[None, y : y + side, x : x + side], PATCH).flatten() for y, x in corners]
    shares.append(torch.full_like(shares[0], -1))  # at the end, although the small view is the first
    return torch.stack(views), torch.stack(shares), tiling


def call(processor, text, data):
    items, own = [prepare(image) for image in data.get("image", ())], processor.words.convert_tokens_to_ids
    tokens = ["<eos>"]
    for *_, tiling in items:
        for tall, wide in ((POOLED, POOLED), ((count * STEP + 2 * MARGIN) // 2 for count in tiling)):
            tokens += ["<im_start>", *(["<im_patch>"] * wide + ["<im_col>"]) * tall, "<im_end>"]
    ids = own(tokens) + processor.words(" " + text.replace("<|image|>", ""))["input_ids"]
    views, masks, tilings = zip(*items, strict=True) if items else ((), (), ())
    return {"input_ids": torch.tensor([ids]), "views": views, "masks": masks, "tilings": tilings}


def tensors(inputs, features):
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    for feature, views, masks in zip(ordered, inputs["views"], inputs["masks"], strict=True):
        patches = views.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH)).permute(0, 2, 4, 1, 3, 5)
        yield "pixel_values", feature.kwargs["pixel_values"].data, patches.reshape(-1, 3 * PATCH**2)
        kinds = torch.where(masks == 0, 1, torch.where(masks < 1, 2, 0))
        yield "padding", feature.kwargs["padding"].data, kinds.flatten()


def refuses(modality, size):
    """Say whether nothing is left of the shorter side in the small view."""
    return min(size) * PATCH * SIDE // max(size) < 1


UNUSED, KEYS = "the tower's last layer is not read", "a key bias adds the same to all scores of a query"
MOLMO = Family(
    "molmo",
    build,
    placeholders={"image": "<|image|>"},
    sizes={"image": [(90, 130), (60, 60), (40, 150), (131, 33)]},
    grid={"image": IMAGE_SIZES},
    refuses=refuses,
    prompt=lambda placeholders, seed: "".join(placeholders) + f"User: def f{seed}(x): return it" + " + x" * (seed % 5),
    call=call,
    tensors=tensors,
    load=load,
    silent={
        "tower.encoder.layers.3.": UNUSED,
        "tower.post_layernorm.": UNUSED,
        f"{BACKBONE}image_vit.transformer.resblocks.3.": UNUSED,
        "k_proj.bias": KEYS,
        f"{BACKBONE}image_pooling_2d.wk.bias": KEYS,
        **{f"tower.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
        **{f"{BACKBONE}image_vit.transformer.resblocks.{i}.attention.wk.bias": KEYS for i in range(3)},
    },
    fullest={"image": [(332, 432)]},
    fullest_items=2,
    variants={"olmo": {"olmo": True}},
)
MOLMOE = replace(MOLMO, name="molmoe", build=partial(build, experts=True), variants={})
FAMILIES = [MOLMO, MOLMOE]
