"""Kanana-1.5-v in the parity suite: transformers' tower of Qwen2-VL and Llama, with the published abstractor between them.

Sources: the publisher's modelling and processing code, timm's `RegStage`.
"""

import json
import re
from collections import OrderedDict

import numpy as np
import torch
from composed import ComposedModel, ComposedProcessor, load_composed, run_composed
from family import IMAGE_SIZES, Family, is_sliver
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from PIL import Image
from torch import nn
from torch.nn import functional as F

PATCH, MERGE, SIDE, LEAST, MOST = 14, 2, 28, 56 * 56, 140 * 140
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PARTS = re.compile("(<image>|\nAI: |\nHuman: )")
VISION = {
    "depth": 3, "embed_dim": 64, "mlp_ratio": 2, "num_heads": 4, "in_channels": 3, "hidden_size": 64, "patch_size": PATCH,
    "spatial_merge_size": MERGE, "temporal_patch_size": 2, "hidden_act": "quick_gelu",
}  # fmt: skip
PROJECTOR = {
    "depth": 2, "encoder_hidden_size": 64, "feature_layer_index": -1, "hidden_size": 48, "merge_size": MERGE, "mlp_depth": 2,
    "num_eos_tokens": 0, "output_hidden_size": 64, "pos_emb": True, "pos_emb_size": 36, "prenorm": False,
    "projector_type": "dynamic-c-abs",
}  # fmt: skip


class Normed(nn.Module):
    def __init__(self, inner, outer, kernel=1, act=True):
        super().__init__()
        groups = outer if kernel > 1 else 1
        self.conv = nn.Conv2d(inner, outer, kernel, padding=kernel // 2, groups=groups, bias=False)
        self.bn, self.act = nn.LayerNorm(outer), act

    def forward(self, x):
        x = self.bn(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return F.silu(x) if self.act else x


class Block(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = Normed(inner, outer), Normed(outer, outer, 3), Normed(outer, outer, act=False)
        self.se = nn.Module()
        self.se.fc1 = nn.Conv2d(outer, round(inner * 0.25), 1)
        self.se.fc2 = nn.Conv2d(round(inner * 0.25), outer, 1)
        self.downsample = nn.Identity() if inner == outer else Normed(inner, outer, act=False)

    def forward(self, x):
        y = self.conv2(self.conv1(x))
        y = y * self.se.fc2(F.silu(self.se.fc1(y.mean((2, 3), keepdim=True)))).sigmoid()
        return F.silu(self.conv3(y) + self.downsample(x))


def stage(inner, c):
    widths = [inner, *[c["hidden_size"]] * (c["depth"] - 1)]
    return nn.Sequential(OrderedDict((f"b{i}", Block(width, c["hidden_size"])) for i, width in enumerate(widths, 1)))


class Abstractor(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c, width, out = c, c["hidden_size"], c["output_hidden_size"]
        if c["pos_emb"]:
            self.pos_emb = nn.Parameter(torch.zeros(1, c["pos_emb_size"], c["encoder_hidden_size"]))
        if c["prenorm"]:
            self.prenorm = nn.LayerNorm(c["encoder_hidden_size"], 1e-6)
        squares = nn.PixelUnshuffle(MERGE)  # by channel, then row and column of the square
        self.net = nn.ModuleList([stage(c["encoder_hidden_size"], c), squares, stage(4 * width, c)])
        layers = [nn.Linear(width, out)]
        for _ in range(c["mlp_depth"] - 1):
            layers += [nn.SiLU(), nn.Linear(out, out)]
        self.readout = nn.Sequential(*layers)

    def forward(self, rows, h, w):
        c = self.c
        x = rows.view(1, h, w, -1)
        if c["prenorm"]:
            x = self.prenorm(x)
        x = x.permute(0, 3, 1, 2)
        if c["pos_emb"]:
            side = int(c["pos_emb_size"] ** 0.5)
            table = self.pos_emb.view(1, side, side, -1).permute(0, 3, 1, 2)
            same = (h, w) == (side, side)
            x = x + (table if same else F.interpolate(table, (h, w), mode="bicubic", antialias=True))
        for part in self.net:
            x = part(x)
        return self.readout(x[0].flatten(1).T)


class Oracle(ComposedModel):
    def __init__(self, config):
        super().__init__(config)
        ensure_torchvision()
        import transformers as tf
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        vision = Qwen2VLVisionConfig(**config["vision_config"], attn_implementation="eager")
        self.vision_model = Qwen2VisionTransformerPretrainedModel(vision)
        self.vision_model.merger = nn.Identity()
        self.abstractor = Abstractor(config["projector_config"])
        text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
        self.language_model = tf.LlamaForCausalLM(tf.LlamaConfig(**text, attn_implementation="eager")).eval()

    def encode(self, patches, h, w):
        grid, layer = torch.tensor([[1, h, w]]), self.config["projector_config"]["feature_layer_index"]
        states = []
        hooks = [block.register_forward_hook(lambda *given: states.append(given[2])) for block in self.vision_model.blocks]
        self.vision_model(patches, grid_thw=grid)
        for hook in hooks:
            hook.remove()
        return self.abstractor(states[layer], h, w)

    def forward(self, input_ids, images=(), past_key_values=None):
        embeds = self.language_model.get_input_embeddings()(input_ids)
        if images:
            image = self.config["text_config"]["eos_token_id"] + 1
            embeds[input_ids == image] = torch.cat([self.encode(*one) for one in images])
        return self.language_model(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=True)


class Tied(Oracle):
    unsaved = ("language_model.lm_head.",)


def load(folder):
    tie = json.loads((folder / "config.json").read_text())["text_config"]["tie_word_embeddings"]
    return load_composed(Tied if tie else Oracle, folder)


def build(seed, tie=False, **projector):
    words = fast_tokenizer(("<begin>", "<end>", "<reserved>"), bos_token="<begin>", eos_token="<end>", pad_token="<end>")
    text = {"model_type": "kanana-1.5-3b-instruct", **text_config(words, tie, head_dim=16)}
    named = {"architectures": ["KananaVForConditionalGeneration"], "model_type": "kanana-1.5-v"}
    config = {**named, "text_config": text, "vision_config": VISION, "projector_config": {**PROJECTOR, **projector}}
    model = (Tied if tie else Oracle)(config).eval()
    randomise(model, seed)
    for name, p in model.named_parameters():
        if name.endswith("bn.weight"):
            p.data += 1
        elif ".se." in name or name.endswith("pos_emb"):
            p.data *= 8
        elif name.startswith("vision_model") and name.endswith("bias"):
            p.data *= 4
    sizes = {"patch_size": PATCH, "min_pixels": LEAST, "max_pixels": MOST}
    return model, ComposedProcessor(tokenizer=words, config=config, preprocessor=sizes)


def fitted(height, width):
    """Return (height, width) of the published smart_resize."""
    tall, wide = round(height / SIDE) * SIDE, round(width / SIDE) * SIDE
    if tall * wide > MOST:
        shrink = (height * width / MOST) ** 0.5
        return tuple(max(SIDE, int(side / shrink / SIDE) * SIDE) for side in (height, width))
    if tall * wide < LEAST:
        grow = (LEAST / (height * width)) ** 0.5
        return tuple(-int(-(side * grow) // SIDE) * SIDE for side in (height, width))
    return tall, wide


def cut(image):
    width, height = image.size
    if min(image.size) < SIDE:
        scale = SIDE / min(image.size)
        width, height = int(width * scale), int(height * scale)
        image = image.resize((width, height), Image.BICUBIC)
    tall, wide = fitted(height, width)
    pixels = torch.from_numpy(np.array(image.resize((wide, tall), Image.BICUBIC))).permute(2, 0, 1) / 255
    pixels = (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    h, w = tall // PATCH, wide // PATCH
    patches = pixels.view(3, 1, h // 2, 2, PATCH, w // 2, 2, PATCH).expand(-1, 2, -1, -1, -1, -1, -1, -1)
    return patches.permute(2, 5, 3, 6, 0, 1, 4, 7).reshape(h * w, -1), h, w


def call(processor, text, data):
    images, ids = [cut(image) for image in data.get("image", ())], []
    encode, waiting = processor.tokenizer.encode, iter(images)
    for part in PARTS.split(text):
        if part != "<image>":
            ids += encode(part, add_special_tokens=False)
            continue
        _, h, w = next(waiting)
        line = encode("\n", add_special_tokens=False)
        for _ in range(h // 2):
            ids += [*line, *[processor.config["text_config"]["eos_token_id"] + 1] * (w // 2)]
    return {"input_ids": torch.tensor([ids]), "images": images}


def tensors(inputs, features):
    for feature, (patches, h, w) in zip(sorted(features, key=lambda one: one.range.offset), inputs["images"], strict=True):
        yield "grid", feature.kwargs["image_grid_thw"].data, torch.tensor([1, h, w])
        yield "pixel_values", feature.kwargs["pixel_values"].data, patches


def prompt(placeholders, seed):
    return f"def f{seed}(x)\nHuman: " + "\nHuman: ".join(placeholders) + f"\n\nHuman: return it{' + x' * (seed % 5)}\nAI: "


FAMILY = Family(
    "kanana_v",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(90, 130), (60, 60), (140, 70)]},
    grid={"image": [*IMAGE_SIZES, (2, 500)]},
    prompt=prompt,
    refuses=is_sliver,
    call=call,
    run=run_composed,
    tensors=tensors,
    oracle_positions=lambda model, inputs: None,
    load=load,
    variants={
        "tied": {"tie": True},
        "a norm, no positions, an earlier layer": {"prenorm": True, "pos_emb": False, "feature_layer_index": -2},
        "one block, one layer, equal widths": {"depth": 1, "mlp_depth": 1, "hidden_size": 64},
    },
)
