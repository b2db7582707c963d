"""Moondream 3 in the parity suite.

The oracle is composed of torch's layers, as vLLM's class describes the publisher's model, and of Pillow for the processor.
"""

import math
from functools import partial

import numpy as np
import torch
from composed import ComposedModel, ComposedProcessor, load_composed
from family import Family
from oracle import fast_tokenizer, randomise
from PIL import Image
from torch import nn
from torch.nn import functional as F

IMAGE, FIRST = "<image>", "<|endoftext|>"


class Tensors(nn.Module):
    """Tensors of these shapes."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


class VisionBlock(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    def forward(self, x):
        qkv = self.attn["qkv"](self.ln1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)
        x = x + self.attn["proj"](attended)
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.ln2(x)), approximate="tanh"))


class Vision(nn.Module):
    def __init__(self, c, out):
        super().__init__()
        self.c, width, self.side = c, c["enc_dim"], c["crop_size"] // c["enc_patch_size"]
        self.patch_emb = nn.Linear(3 * c["enc_patch_size"] ** 2, width)
        self.pos_emb = nn.Parameter(torch.empty(1, self.side**2, width))
        self.blocks = nn.ModuleList(VisionBlock(width, c["enc_n_heads"], c["enc_ff_dim"]) for _ in range(c["enc_n_layers"]))
        self.post_ln = nn.LayerNorm(width)
        layers = {"fc1": nn.Linear(2 * width, c["proj_inner_dim"]), "fc2": nn.Linear(c["proj_inner_dim"], out)}
        self.proj_mlp = nn.ModuleDict(layers)

    def forward(self, crops, tiling):
        x = F.unfold(crops, self.c["enc_patch_size"], stride=self.c["enc_patch_size"]).transpose(1, 2)
        x = self.patch_emb(x) + self.pos_emb
        for block in self.blocks:
            x = block(x)
        small, *tiles = self.post_ln(x)
        margin, side, (rows, columns) = self.c["overlap_margin"], self.side, tiling
        lines = []
        for row in range(rows):
            line = []
            for column in range(columns):
                tile = tiles[row * columns + column].view(side, side, -1)
                top, bottom = (0 if row == 0 else margin), (side if row == rows - 1 else side - margin)
                left, right = (0 if column == 0 else margin), (side if column == columns - 1 else side - margin)
                line.append(tile[top:bottom, left:right])
            lines.append(torch.cat(line, 1))
        joined = F.adaptive_avg_pool2d(torch.cat(lines).permute(2, 0, 1), (side, side)).permute(1, 2, 0).flatten(0, 1)
        hidden = self.proj_mlp["fc1"](torch.cat([small, joined], 1))
        return self.proj_mlp["fc2"](F.gelu(hidden, approximate="tanh"))


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv, width, self.theta = c["n_heads"], c["n_kv_heads"], c["dim"], c["rope_theta"]
        self.dim = width // self.heads
        outputs = (self.heads + 2 * self.kv) * self.dim
        self.qkv, self.proj = nn.Linear(width, outputs), nn.Linear(width, width)
        self.tau = Tensors(alpha=(self.heads,), wq=(self.heads, outputs), wv=(self.heads, outputs))

    def forward(self, x, mask):
        n, joined = len(x), self.qkv(x)
        q, k, v = joined.unflatten(-1, (-1, self.dim)).split([self.heads, self.kv, self.kv], 1)
        of_position = 1 + ((torch.arange(1, n + 1).float().log()[:, None] * self.tau.alpha).sigmoid() - 0.5)
        of_query, of_value = (torch.tanh(F.gelu(joined) @ w.T) + of_position for w in (self.tau.wq, self.tau.wv))
        q, v = q * of_query[..., None], v * of_value[:, : self.kv, None]
        q, k = self.rotate(q), self.rotate(k)
        q, k, v = q.transpose(0, 1), *(part.transpose(0, 1).repeat_interleave(self.heads // self.kv, 0) for part in (k, v))
        scores = (q @ k.mT * self.dim**-0.5).masked_fill(~mask, -torch.inf)
        return self.proj((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))

    def rotate(self, x):
        size = self.dim // 2
        angles = torch.arange(len(x))[:, None, None] * self.theta ** (-torch.arange(0, size, 2).float() / size)
        a, b, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos(), rest], -1)


class Experts(nn.Module):
    def __init__(self, width, c):
        super().__init__()
        count, inner, self.chosen = c["n_experts"], c["expert_inner_dim"], c["n_experts_per_tok"]
        self.router = nn.Linear(width, count)
        self.fc1, self.fc2 = Tensors(weight=(count, 2 * inner, width)), Tensors(weight=(count, width, inner))

    def forward(self, x):
        scores, chosen = self.router(x).topk(self.chosen)
        weights, out = scores.softmax(-1), []
        for row, numbers, shares in zip(x, chosen, weights, strict=True):
            gate, up = (self.fc1.weight[numbers] @ row).chunk(2, -1)
            out.append((shares[:, None] * torch.einsum("eoi,ei->eo", self.fc2.weight[numbers], F.gelu(gate) * (up + 1))).sum(0))
        return torch.stack(out)


class Mlp(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Layer(nn.Module):
    def __init__(self, c, number):
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(c["dim"]), Attention(c)
        self.mlp = Mlp(c["dim"], c["ff_dim"]) if number < c["moe"]["start_layer"] else Experts(c["dim"], c["moe"])

    def forward(self, x, mask):
        normed = self.ln(x)
        return x + self.attn(normed, mask) + self.mlp(normed)


class Text(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Parameter(torch.empty(c["vocab_size"], c["dim"]))
        self.blocks = nn.ModuleList(Layer(c, number) for number in range(c["n_layers"]))
        self.post_ln, self.lm_head = nn.LayerNorm(c["dim"]), nn.Linear(c["dim"], c["vocab_size"])


class Composed(ComposedModel):
    """The first token and the rows of the image see each other; all others see those before them."""

    def __init__(self, config):
        super().__init__(config)
        text, vision = config["config"]["text"], config["config"]["vision"]
        self.model = nn.ModuleDict({"text": Text(text), "vision": Vision(vision, text["dim"])})

    def forward(self, input_ids, pixel_values=None, tiling=None):
        text, ids = self.model["text"], input_ids[0]
        x, rows = text.wte[ids], 0
        if pixel_values is not None:
            image = self.model["vision"](pixel_values, tiling)
            rows = len(image)
            x = torch.cat([x[:1], image, x[1 + rows :]])
        positions = torch.arange(len(ids))
        mask = (positions <= positions[:, None]) | ((positions <= rows) & (positions[:, None] <= rows) & bool(rows))
        for layer in text.blocks:
            x = layer(x, mask)
        return text.lm_head(text.post_ln(x))


def build(seed, side=5, margin=1, start=1, kv_heads=2, experts=4, crops=6):
    words = fast_tokenizer([FIRST, IMAGE], eos_token=FIRST, pad_token=FIRST)
    first = words.convert_tokens_to_ids(FIRST)
    moe = {"n_experts": experts, "start_layer": start, "n_experts_per_tok": 2, "expert_inner_dim": 48}
    text = {"dim": 128, "ff_dim": 160, "n_layers": 3, "vocab_size": len(words), "max_context": 4096, "n_heads": 2, "moe": moe}
    text |= {"n_kv_heads": kv_heads, "rope_theta": 10_000.0}
    vision = {"enc_dim": 64, "enc_patch_size": 14, "enc_n_layers": side, "enc_ff_dim": 96, "enc_n_heads": 4, "in_channels": 3}
    vision |= {"crop_size": 14 * side, "max_crops": crops, "overlap_margin": margin, "proj_inner_dim": 80}
    config = {
        "architectures": ["HfMoondream"],
        "model_type": "moondream3",
        "config": {"text": text, "vision": vision, "tokenizer": {"bos_id": first, "eos_id": first, "answer_id": None}},
    }
    model = Composed(config).eval()
    randomise(model, seed)
    model.model["text"].lm_head.weight.data *= 5
    for layer in model.model["text"].blocks:
        layer.attn.qkv.weight.data[:256] *= 6  # queries and keys
        layer.attn.tau.wq.data *= 10
        layer.attn.tau.alpha.data *= 2
        if isinstance(layer.mlp, Experts):
            layer.mlp.router.weight.data *= 6
            layer.mlp.router.bias.data *= 5
            layer.mlp.fc1.weight.data *= 4
            layer.mlp.fc2.weight.data *= 6
    model.model["vision"].pos_emb.data *= 6
    model.model["vision"].proj_mlp["fc1"].weight.data *= 2
    for block in model.model["vision"].blocks:
        block.attn["qkv"].weight.data[:128] *= 3
    return model, ComposedProcessor(tokenizer=words, config=config, preprocessor={})


def select(height, width, size, most):
    """Return rows and columns of crops, as published."""
    if height <= size or width <= size:
        return 1, 1
    rows, columns = math.ceil(height / size), math.ceil(width / size)
    if rows * columns > most:
        ratio = math.sqrt(most / (rows * columns))
        return max(1, math.floor(rows * ratio)), max(1, math.floor(columns * ratio))
    tall, wide = math.floor(math.sqrt(most * height / width)), math.floor(math.sqrt(most * width / height))
    tall, wide = max(tall, rows), max(wide, columns)
    if tall * wide > most:
        if wide > tall:
            wide = math.floor(most / tall)
        else:
            tall = math.floor(most / wide)
    return max(1, tall), max(1, wide)


def call(processor, text, data):
    words, vision = processor.tokenizer, processor.config["config"]["vision"]
    size, margin = vision["crop_size"], vision["overlap_margin"] * vision["enc_patch_size"]
    inputs, step = {}, size - 2 * margin
    for image in data.get("image", ()):
        tiling = select(image.height - 2 * margin, image.width - 2 * margin, step, vision["max_crops"])
        rows, columns = tiling
        large = image.resize((columns * step + 2 * margin, rows * step + 2 * margin), Image.Resampling.LANCZOS)
        boxes = [(j * step, i * step, j * step + size, i * step + size) for i in range(rows) for j in range(columns)]
        views = [image.resize((size, size), Image.Resampling.LANCZOS), *map(large.crop, boxes)]
        pixels = torch.from_numpy(np.stack([np.asarray(view) for view in views])).permute(0, 3, 1, 2).float()
        inputs = {"pixel_values": (pixels / 255 - 0.5) / 0.5, "tiling": tiling}
    text = text.replace(IMAGE, IMAGE * (size // vision["enc_patch_size"]) ** 2)
    return {"input_ids": words(FIRST + text, return_tensors="pt")["input_ids"], **inputs}


def run(model, inputs, answer, positions):
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.long)], 1)
    with torch.inference_mode():
        return model(**{**inputs, "input_ids": ids}).float()


def tensors(inputs, features):
    (feature,) = features
    patches = F.unfold(inputs["pixel_values"], 14, stride=14).transpose(1, 2).flatten(0, 1)
    yield "pixel_values", feature.kwargs["pixel_values"].data, patches
    yield "grid", feature.kwargs["grid"].data, torch.tensor(inputs["tiling"])


FAMILY = Family(
    "moondream3",
    build,
    placeholders={"image": IMAGE},
    sizes={"image": [(90, 130), (60, 60), (200, 160)]},
    cases=("", "i", "i", "i"),
    prompt=lambda placeholders, seed: f"{''.join(placeholders)}def f{seed}(x): return it" + " + x" * (seed % 5),
    call=call,
    run=run,
    load=partial(load_composed, Composed),
    tensors=tensors,
    oracle_positions=lambda model, inputs: None,
    prompt_attention="bidirectional_image_and_first_token",
    fullest={"image": [(110, 150)]},  # 2 x 3 crops
    variants={
        "wider overlap": {"side": 7, "margin": 2},
        "experts everywhere": {"start": 0, "experts": 6},
        "grouped keys": {"kv_heads": 1},
    },
)
