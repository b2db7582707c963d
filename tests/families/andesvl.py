"""AndesVL in the parity suite. The oracle is composed anew: transformers has no class for it.

Sources: modeling_andesvl.py of the checkpoints (sizes, projector), the publisher's evaluation code (the tower).
"""

import json
import math

import numpy as np
import torch
from composed import ComposedModel, ComposedProcessor, load_composed, run_composed
from family import IMAGE_SIZES, Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from PIL import Image
from torch import nn
from torch.nn import functional as F

PATCH, BASE, LARGEST = 14, 28, 4172
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_channels": 3,
    "image_size": 56, "patch_size": PATCH, "rms_norm_eps": 1e-5, "qkv_bias": False, "use_bias": False, "hidden_stride": 2,
    "temporal_patch_size": 1, "window_size": 56, "preserve_original_pe": True, "fullatt_block_indexes": None,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, inner, bias = c["hidden_size"], c["intermediate_size"], c["use_bias"]
        self.heads = c["num_attention_heads"]
        self.norm_1, self.norm_2 = (nn.RMSNorm(width, c["rms_norm_eps"]) for _ in range(2))
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(width, 3 * width, c["qkv_bias"]), nn.Linear(width, width, bias)
        self.mlp.fc1, self.mlp.fc3 = nn.Linear(width, inner, bias), nn.Linear(width, inner, bias)
        self.mlp.fc2 = nn.Linear(inner, width, bias)

    def forward(self, x, angles, windows):
        q, k, v = self.attn.qkv(self.norm_1(x)).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)

        def turned(y):
            first, second = y.chunk(2, -1)
            return y if angles is None else y * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

        sees = None if windows is None else windows[:, None] == windows
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, sees)
        x = x + self.attn.proj(mixed.transpose(0, 1).flatten(1))
        y = self.norm_2(x)
        return x + self.mlp.fc2(F.silu(self.mlp.fc1(y)) * self.mlp.fc3(y))


class Tower(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, self.c = c["hidden_size"], c
        self.preprocessor, self.trunk = nn.Module(), nn.Module()
        self.preprocessor.patchifier = nn.Module()
        self.preprocessor.patchifier.proj = nn.Conv2d(3, width, PATCH, PATCH)
        self.preprocessor.patchifier.norm = nn.RMSNorm(width, c["rms_norm_eps"])
        if c["preserve_original_pe"]:
            self.preprocessor.pos_embed = nn.Parameter(torch.zeros(1, (c["image_size"] // PATCH) ** 2, width))
        self.trunk.blocks = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.trunk.post_trunk_norm = nn.RMSNorm(width, c["rms_norm_eps"])

    def forward(self, patches, h, w):
        c, part = self.c, self.preprocessor
        x = part.patchifier.norm(part.patchifier.proj(patches.view(-1, 3, PATCH, PATCH)).flatten(1))
        if c["preserve_original_pe"]:
            side = c["image_size"] // PATCH
            table = part.pos_embed.view(1, side, side, -1).permute(0, 3, 1, 2)
            x = x + in_squares(F.interpolate(table, (h, w), mode="bicubic", align_corners=False)[0].permute(1, 2, 0))
        places = in_squares(torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1))
        quarter = c["hidden_size"] // c["num_attention_heads"] // 2
        inverse = 1e4 ** -(torch.arange(0, quarter, 2) / quarter)
        angles = None if c.get("disable_rope") else (places[..., None] * inverse).flatten(1).repeat(1, 2)
        size, full = c["window_size"] // PATCH, c["fullatt_block_indexes"]
        windows = places[:, 0] // size * 1000 + places[:, 1] // size
        for number, block in enumerate(self.trunk.blocks):
            x = block(x, angles, None if full is None or number in full else windows)
        return self.trunk.post_trunk_norm(x)


def in_squares(plane):
    """`[h, w, n]` -> `[h * w, n]`, square by square of 2 x 2 patches."""
    h, w, n = plane.shape
    return plane.reshape(h // 2, 2, w // 2, 2, n).transpose(1, 2).reshape(-1, n)


class Oracle(ComposedModel):
    def __init__(self, config):
        super().__init__(config)
        ensure_torchvision()
        import transformers as tf

        text, width = (
            tf.Qwen3Config(**config["text_config"], attn_implementation="eager"),
            config["vision_config"]["hidden_size"],
        )
        self.vision_encoder, self.language_model = Tower(config["vision_config"]), tf.Qwen3ForCausalLM(text).eval()
        self.mlp = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, text.hidden_size))

    def forward(self, input_ids, images=(), past_key_values=None):
        embeds = self.language_model.get_input_embeddings()(input_ids)
        if images:
            rows = [self.mlp(self.vision_encoder(*item).view(-1, self.mlp[0].in_features)) for item in images]
            embeds[input_ids == self.config["pad"]] = torch.cat(rows)
        return self.language_model(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=True)


class Tied(Oracle):
    unsaved = ("language_model.lm_head.",)


def load(folder):
    tie = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    return load_composed(Tied if tie else Oracle, folder)


def build(seed, tie=False, **vision):
    words = fast_tokenizer(("<|vision_pad|>", "<img>", "</img>", "<|im_end|>"), eos_token="<|im_end|>", pad_token="<|im_end|>")
    text = {"model_type": "qwen3", **text_config(words, tie, head_dim=16)}
    named = {"architectures": ["AndesVLForConditionalGeneration"], "model_type": "andesvl-aimv2-qwen3"}
    pad = words.convert_tokens_to_ids("<|vision_pad|>")
    config = {**named, "text_config": text, "vision_config": {**VISION, **vision}, "pad": pad, "tie_word_embeddings": tie}
    model = (Tied if tie else Oracle)(config).eval()
    randomise(model, seed)
    for name, p in model.named_parameters():
        if name.endswith("attn.qkv.weight"):
            p.data[:128] *= 3
        elif name.endswith("pos_embed"):
            p.data *= 8
    return model, ComposedProcessor(tokenizer=words, config=config, preprocessor={"image_mean": MEAN, "image_std": STD})


def near_area(w, h, area):
    wide, tall = math.floor(math.sqrt(area * (w / h))), math.floor(math.sqrt(area / (w / h)))
    wide, tall = (max(min(side, LARGEST), BASE) for side in (wide, tall))
    wide, tall = (min(side + (BASE - side % BASE), LARGEST) for side in (wide, tall))
    scale = min(wide / w, tall / h)
    return (round(w * scale), round(h * scale)), (wide, tall)


def padded(image):
    """Return the canvas with the image, as the published code makes it."""
    w, h = image.size
    if max(w, h) > LARGEST:
        scale = LARGEST / max(w, h)
        w, h = int(w * scale), int(h * scale)
        image = image.resize((w, h))
    if w * h > 733**2:
        size, canvas = near_area(w, h, 733**2)
    elif w * h < BASE * BASE * 4:
        size, canvas = near_area(w, h, (2 * BASE) ** 2)
    else:
        canvas = w + BASE - w % BASE, h + BASE - h % BASE
        scale = min(canvas[0] / w, canvas[1] / h)
        size = int(w * scale), int(h * scale)
    page = Image.new("RGB", canvas, tuple(int(255 * mean) for mean in MEAN))
    page.paste(image.resize(size), ((canvas[0] - size[0]) // 2, (canvas[1] - size[1]) // 2))
    return page


def call(processor, text, data):
    images = []
    for image in data.get("image", ()):
        pixels = (torch.from_numpy(np.array(padded(image))).permute(2, 0, 1) / 255 - plane(MEAN)) / plane(STD)
        _, h, w = pixels.shape
        cut = pixels.view(3, h // PATCH, PATCH, w // PATCH, PATCH).permute(1, 3, 0, 2, 4).flatten(2)
        images.append((in_squares(cut), h // PATCH, w // PATCH))
        text = text.replace("<image>", f"<img>{'<|vision_pad|>' * (len(images[-1][0]) // 4)}</img>", 1)
    return {"input_ids": processor.tokenizer(text, return_tensors="pt")["input_ids"], "images": images}


def plane(values):
    return torch.tensor(values).view(3, 1, 1)


def tensors(inputs, features):
    for feature, (patches, h, w) in zip(sorted(features, key=lambda one: one.range.offset), inputs["images"], strict=True):
        yield "grid", feature.kwargs["grid"].data, torch.tensor([1, h, w])
        yield "pixel_values", feature.kwargs["pixel_values"].data, patches


def refuses(modality, size):
    try:
        padded(Image.new("RGB", size[::-1]))
    except (ValueError, ZeroDivisionError):
        return True
    return False


FAMILY = Family(
    "andesvl",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(90, 130), (60, 60), (140, 70)]},
    grid={"image": [*IMAGE_SIZES, (900, 700), (5000, 40)]},
    refuses=refuses,
    call=call,
    run=run_composed,
    tensors=tensors,
    oracle_positions=lambda model, inputs: None,
    load=load,
    variants={
        "tied": {"tie": True},
        "windows, biases": {"fullatt_block_indexes": [1], "qkv_bias": True, "use_bias": True},
        "rotary positions alone": {"preserve_original_pe": False},
    },
)
