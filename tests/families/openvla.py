"""OpenVLA in the parity suite: timm's two towers composed of torch's layers, and transformers' Llama.

Sources: vLLM's openvla.py and its processor; timm's VisionTransformer.
"""

import numpy as np
import torch
from composed import ComposedModel, ComposedProcessor, load_composed, run_composed
from family import Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from PIL import Image
from torch import nn
from torch.nn import functional as F

PATCH, SIDE = 14, 56
MEANS, STDS = [[0.485, 0.456, 0.406], [0.5] * 3], [[0.229, 0.224, 0.225], [0.5] * 3]
DINO = {"embed_dim": 64, "depth": 4, "num_heads": 4, "mlp_ratio": 2, "reg_tokens": 4}
SIGLIP = {"embed_dim": 48, "depth": 3, "num_heads": 4, "mlp_ratio": 1.7362}
NAMES = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.scale_factor


class Block(nn.Module):
    def __init__(self, c, scaled):
        super().__init__()
        width, self.heads = c["embed_dim"], c["num_heads"]
        inner = int(width * c["mlp_ratio"])
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})
        self.ls1, self.ls2 = (Scale(width) if scaled else nn.Identity() for _ in range(2))

    def forward(self, x):
        qkv = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)
        x = x + self.ls1(self.attn["proj"](attended))
        return x + self.ls2(self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x)))))


class Tower(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, self.registers = c["embed_dim"], c.get("reg_tokens", 0)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, PATCH, PATCH)})
        self.pos_embed = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2, width))
        if self.registers:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
            self.reg_token = nn.Parameter(torch.zeros(1, self.registers, width))
        self.blocks = nn.ModuleList(Block(c, bool(self.registers)) for _ in range(c["depth"]))
        self.norm = nn.LayerNorm(width, 1e-6)

    def forward(self, pixels):
        x = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2) + self.pos_embed
        first = []
        if self.registers:
            first = [self.cls_token.expand(len(x), -1, -1), self.reg_token.expand(len(x), -1, -1)]
        x = torch.cat([*first, x], 1)
        for block in self.blocks[:-1]:
            x = block(x)
        return x[:, sum(part.shape[1] for part in first) :]


class Oracle(ComposedModel):
    def __init__(self, config):
        super().__init__(config)
        ensure_torchvision()
        import transformers as tf

        towers = [Tower(args) for args in config["timm_model_args"]]
        self.vision_backbone = nn.ModuleDict(dict(zip(("featurizer", "fused_featurizer"), towers, strict=True)))
        width, hidden = sum(args["embed_dim"] for args in config["timm_model_args"]), config["text_config"]["hidden_size"]
        layers = {"fc1": (width, 4 * width), "fc2": (4 * width, hidden), "fc3": (hidden, hidden)}
        self.projector = nn.ModuleDict({name: nn.Linear(*sizes) for name, sizes in layers.items()})
        text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
        self.language_model = tf.LlamaForCausalLM(tf.LlamaConfig(**text, attn_implementation="eager")).eval()

    def forward(self, input_ids, pixel_values=None, past_key_values=None):
        embeds = self.language_model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            towers = zip(self.vision_backbone.values(), pixel_values.split(3, 1), strict=True)
            rows = torch.cat([tower(pixels) for tower, pixels in towers], -1)
            rows = F.gelu(self.projector["fc2"](F.gelu(self.projector["fc1"](rows))))
            embeds[input_ids == self.config["image_token_index"]] = self.projector["fc3"](rows)[0]
        return self.language_model(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=True)


def load(folder):
    return load_composed(Oracle, folder)


def build(seed, **text):
    words = fast_tokenizer(("<s>", "</s>", "<PAD>"), bos_token="<s>", eos_token="</s>", pad_token="<PAD>")
    config = {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "timm_model_ids": NAMES,
        "timm_model_args": [DINO, SIGLIP],
        "image_sizes": [SIDE, SIDE],
        "image_token_index": words.convert_tokens_to_ids("<PAD>"),
        "text_config": {"model_type": "llama", **text_config(words, **text)},
    }
    model = Oracle(config).eval()
    randomise(model, seed)
    for name, p in model.named_parameters():
        if name.endswith("scale_factor"):
            p.data += 1
        elif name.endswith(("_token", "pos_embed")):
            p.data *= 6
        elif name.startswith("vision_backbone") and "qkv.weight" in name:
            p.data[: len(p) * 2 // 3] *= 3  # queries and keys
    preprocessor = {"means": MEANS, "stds": STDS, "image_resize_strategy": "resize-naive", "use_fused_vision_backbone": True}
    return model, ComposedProcessor(tokenizer=words, config=config, preprocessor=preprocessor)


def call(processor, text, data):
    words, inputs = processor.tokenizer, {}
    ids = words("<s>" + text, return_tensors="pt")["input_ids"]
    for image in data.get("image", ()):
        pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.float32) / 255
        parts = [(pixels - np.float32(mean)) / np.float32(std) for mean, std in zip(MEANS, STDS, strict=True)]
        inputs["pixel_values"] = torch.from_numpy(np.concatenate(parts, -1)).permute(2, 0, 1)[None]
        image_ids = torch.full((1, (SIDE // PATCH) ** 2), processor.config["image_token_index"])
        ids = torch.cat([ids[:, :1], image_ids, ids[:, 1:]], 1)
    return {"input_ids": ids, **inputs}


def tensors(inputs, features):
    (feature,) = features
    names = ("pixel_values", "fused_pixel_values")
    for name, theirs in zip(names, inputs["pixel_values"].split(3, 1), strict=True):
        yield name, feature.kwargs[name].data, F.unfold(theirs, PATCH, stride=PATCH)[0].T


FAMILY = Family(
    "openvla",
    build,
    placeholders={"image": ""},
    sizes={"image": [(90, 130), (60, 60), (200, 160)]},
    cases=("", "i", "i", "i"),
    prompt=lambda placeholders, seed: f"In: def f{seed}(x): return it" + " + x" * (seed % 5) + "\nOut:",
    request=lambda text, data: {"prompt": "<s>" + text, "multi_modal_data": data},
    call=call,
    run=run_composed,
    load=load,
    tensors=tensors,
    oracle_positions=lambda model, inputs: None,
    variants={"one kv head": {"num_key_value_heads": 1}},
    silent={
        "vision_backbone.featurizer.blocks.3.": "the state before the last layer is used",
        "vision_backbone.fused_featurizer.blocks.2.": "the state before the last layer is used",
        "vision_backbone.featurizer.norm.": "the state is not normed",
        "vision_backbone.fused_featurizer.norm.": "the state is not normed",
    },
)
