"""Ovis 1.6, 2 and 2.5 in their publisher's layout, in the parity suite.

transformers has no class for these, so the oracle is composed here, after the code published with the checkpoints: the
towers' last norm is stored but not applied, crops are padded after they are normalized, and Gemma 2 scales the rows of images.
"""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from family import IMAGE_SIZES, VIDEO_SIZES, Family, as_sampled
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
PADS = {"gemma2": "<unused0>", "llama": "<|reserved_special_token_0|>"}
SIDE, PATCH, STRIDE, MOST, MEAN, STD = 56, 7, 2, 9, (0.48, 0.45, 0.4), (0.26, 0.25, 0.27)
LEAST_PIXELS, MOST_PIXELS, NAVIT_PATCH = 48 * 48, 96 * 128, 8


def attend(qkv, segments, cos=None):
    """Attend within segments. `qkv` `[rows, 3, heads, dim]`."""
    if cos is not None:
        angles = torch.cat([cos, cos], -1)[:, None, None]
        first, second = qkv[:, :2].chunk(2, -1)
        turned = qkv[:, :2] * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
        qkv = torch.cat([turned, qkv[:, 2:]], 1)
    out = []
    for part in qkv.split(segments):
        q, k, v = part.permute(1, 2, 0, 3)
        out.append((q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v)
    return torch.cat([one.transpose(0, 1).flatten(1) for one in out])


class Block(nn.Module):
    """A layer of AIMv2."""

    def __init__(self, c):
        super().__init__()
        width, inner, self.heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
        self.norm_1, self.norm_2 = (nn.RMSNorm(width, c["rms_norm_eps"]) for _ in range(2))
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv = nn.Linear(width, 3 * width, bias=c["qkv_bias"])
        self.attn.proj = nn.Linear(width, width, bias=c["use_bias"])
        self.mlp.fc1, self.mlp.fc3 = (nn.Linear(width, inner, bias=c["use_bias"]) for _ in range(2))
        self.mlp.fc2 = nn.Linear(inner, width, bias=c["use_bias"])

    def forward(self, x):
        qkv = self.attn.qkv(self.norm_1(x)).unflatten(1, (3, self.heads, -1))
        x = x + self.attn.proj(attend(qkv, [len(x)]))
        y = self.norm_2(x)
        return x + self.mlp.fc2(F.silu(self.mlp.fc1(y)) * self.mlp.fc3(y))


class Aimv2(nn.Module):
    def __init__(self, c):
        super().__init__()
        c = {"rms_norm_eps": 1e-5, "qkv_bias": False, "use_bias": False, **c}
        width, patch = c["hidden_size"], c["patch_size"]
        self.preprocessor, self.trunk = nn.Module(), nn.Module()
        self.preprocessor.patchifier = nn.Module()
        self.preprocessor.patchifier.proj = nn.Conv2d(3, width, patch, patch)
        self.preprocessor.patchifier.norm = nn.RMSNorm(width, c["rms_norm_eps"])
        self.preprocessor.pos_embed = nn.Parameter(torch.empty(1, (c["image_size"] // patch) ** 2, width))
        self.trunk.blocks = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.trunk.post_trunk_norm = nn.RMSNorm(width)

    def forward(self, image):
        x = self.preprocessor.patchifier.norm(self.preprocessor.patchifier.proj(image[None]).flatten(2).transpose(1, 2))
        x = (x + self.preprocessor.pos_embed)[0]
        for block in self.trunk.blocks:
            x = block(x)
        return x


class Siglip(nn.Module):
    """SigLIP's or CLIP's encoder, without the last norm and the class token."""

    def __init__(self, c):
        super().__init__()
        import transformers as tf
        from transformers.models.clip.modeling_clip import CLIPEncoder, CLIPVisionEmbeddings
        from transformers.models.siglip.modeling_siglip import SiglipEncoder, SiglipVisionEmbeddings

        own = {key: value for key, value in c.items() if key != "model_type"}
        self.clip = c["model_type"] == "clip_vision_model"
        kind = tf.CLIPVisionConfig if self.clip else tf.SiglipVisionConfig
        config = kind(**own, attn_implementation="eager")
        self.vision_model = nn.Module()
        self.vision_model.embeddings = (CLIPVisionEmbeddings if self.clip else SiglipVisionEmbeddings)(config)
        self.vision_model.encoder = (CLIPEncoder if self.clip else SiglipEncoder)(config)
        if self.clip:
            self.vision_model.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.vision_model.post_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(self, image):
        used = image.shape[-1] // PATCH * PATCH
        x = self.vision_model.embeddings(image[None, :, :used, :used])
        x = self.vision_model.pre_layrnorm(x) if self.clip else x
        return self.vision_model.encoder(inputs_embeds=x).last_hidden_state[0, int(self.clip) :]


class NavitLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, self.heads = c["hidden_size"], c["num_attention_heads"]
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            self.self_attn.add_module(name, nn.Linear(width, width))
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(width, c["intermediate_size"]), nn.Linear(c["intermediate_size"], width)

    def forward(self, x, segments, angles):
        y, own = self.layer_norm1(x), self.self_attn
        qkv = torch.stack([own.q_proj(y), own.k_proj(y), own.v_proj(y)], 1).unflatten(2, (self.heads, -1))
        x = x + own.out_proj(attend(qkv, segments, angles))
        return x + self.mlp.fc2(F.gelu(self.mlp.fc1(self.layer_norm2(x)), approximate="tanh"))


class Navit(nn.Module):
    """SigLIP 2 with rotary positions: one item at a time, patches in squares; windows are segments of reordered squares."""

    def __init__(self, c):
        super().__init__()
        width, self.config, self.side = c["hidden_size"], c, c["image_size"] // c["patch_size"]
        self.vision_model = nn.Module()
        self.vision_model.embeddings, self.vision_model.encoder = nn.Module(), nn.Module()
        self.vision_model.embeddings.patch_embedding = nn.Conv2d(3, width, c["patch_size"], c["patch_size"])
        self.vision_model.embeddings.position_embedding = nn.Embedding(self.side**2, width)
        self.vision_model.encoder.layers = nn.ModuleList(NavitLayer(c) for _ in range(c["num_hidden_layers"]))
        self.vision_model.post_layernorm = nn.LayerNorm(width)

    def in_squares(self, plane):
        """`[h, w, ...]` -> `[squares, 4, ...]`."""
        h, w = plane.shape[:2]
        blocks = plane.reshape(h // STRIDE, STRIDE, w // STRIDE, STRIDE, *plane.shape[2:]).transpose(1, 2)
        return blocks.reshape(h * w // STRIDE**2, STRIDE**2, *plane.shape[2:])

    def forward(self, patches, grid):
        (t, h, w), c, own = grid, self.config, self.vision_model.embeddings
        table = own.position_embedding.weight.T.view(1, -1, self.side, self.side)
        places = F.interpolate(table, (h, w), mode="bicubic", align_corners=False)[0].permute(1, 2, 0)
        x = own.patch_embedding(patches.view(-1, 3, NAVIT_PATCH, NAVIT_PATCH)).flatten(1)
        x = x + self.in_squares(places).flatten(0, 1).repeat(t, 1)
        quarter = c["hidden_size"] // c["num_attention_heads"] // 4
        freq = 10000.0 ** -(torch.arange(quarter) / quarter)
        lines, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        angles = torch.cat([self.in_squares(axis).flatten()[:, None] * freq for axis in (lines, columns)], -1).repeat(t, 1)
        full, window = c.get("fullatt_block_indexes"), c.get("window_size", 112) // STRIDE // NAVIT_PATCH
        squares = torch.arange(h * w // STRIDE**2).view(h // STRIDE, w // STRIDE)
        windows = [piece.flatten() for band in squares.split(window) for piece in band.split(window, 1)]
        one = torch.cat(windows)
        order = torch.cat([one + frame * squares.numel() for frame in range(t)])
        moved = (order[:, None] * STRIDE**2 + torch.arange(STRIDE**2)).flatten()
        x, angles = x[moved], angles[moved]
        for number, layer in enumerate(self.vision_model.encoder.layers):
            whole = full is None or str(number) in full.split("|")
            x = layer(x, [h * w] * t if whole else [STRIDE**2 * len(piece) for piece in windows] * t, angles)
        return x[moved.argsort()]


class Composed(nn.Module):
    """The model. Its tensors have the published names."""

    def __init__(self, config):
        super().__init__()
        import transformers as tf

        self.config = config
        text = tf.CONFIG_MAPPING[config["llm_config"]["model_type"]](**config["llm_config"])
        self.llm = tf.AutoModelForCausalLM.from_config(text, attn_implementation="eager")
        self.visual_tokenizer, marks = nn.Module(), 4 if "vit_config" in config else 5
        if "vit_config" in config:
            words, vision = config["visual_vocab_size"], config["vit_config"]
            self.visual_tokenizer.vit = Navit(vision)
        else:
            words, vision = (config["visual_tokenizer_config"][name] for name in ("vocab_size", "backbone_config"))
            self.visual_tokenizer.backbone = (Aimv2 if vision["model_type"] == "aimv2" else Siglip)(vision)
        inner = vision["hidden_size"] * STRIDE**2
        self.visual_tokenizer.head = nn.Sequential(nn.Linear(inner, words - marks, bias=False), nn.LayerNorm(words - marks))
        self.vte = nn.Embedding(words, text.hidden_size)
        self.scale = text.hidden_size**0.5 if text.model_type == "gemma2" else 1.0

    def rows(self, joined):
        words = self.visual_tokenizer.head(joined).softmax(-1)
        return F.pad(words, (0, self.vte.num_embeddings - words.shape[1])) @ self.vte.weight

    def tile(self, image):
        """Join the rows of a tile in squares, which zeros fill at the right and bottom."""
        x = self.visual_tokenizer.backbone(image)
        side = math.isqrt(len(x))
        plane = F.pad(x.view(side, side, -1), (0, 0, 0, -side % STRIDE, 0, -side % STRIDE))
        squares = plane.unfold(0, STRIDE, STRIDE).unfold(1, STRIDE, STRIDE).permute(0, 1, 3, 4, 2)
        return self.rows(squares.flatten(2).flatten(0, 1))

    def forward(self, input_ids, items=(), past_key_values=None, use_cache=True):
        embeds, rows = self.llm.get_input_embeddings()(input_ids), []
        for kind, parts in items:
            if kind == "tiles":
                for part in parts:
                    rows.append(self.vte.weight[part - 5][None] if isinstance(part, int) else self.tile(part))
            else:
                patches, grid = parts
                marks = self.vte.weight[-4:-2] if kind == "image" else self.vte.weight[-2:]
                rows += [marks[:1], self.rows(self.visual_tokenizer.vit(patches, grid).reshape(-1, STRIDE**2 * 64)), marks[1:]]
        if rows:
            embeds[input_ids == self.config["pad"]] = torch.cat(rows) * self.scale
        return self.llm(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=use_cache)

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tied = self.config["llm_config"]["tie_word_embeddings"]
        tensors = {k: v.contiguous() for k, v in self.state_dict().items() if not (tied and k.endswith("lm_head.weight"))}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)
        options = {"do_resize": True, "do_normalize": True, "image_mean": MEAN, "image_std": STD, "resample": 3}
        options |= {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": self.side}, "do_center_crop": True}
        options |= {"crop_size": {"height": self.side, "width": self.side}}
        if self.navit:
            options |= {"size": {"height": 512, "width": 512}, "min_pixels": LEAST_PIXELS, "max_pixels": MOST_PIXELS}
        (folder / "preprocessor_config.json").write_text(json.dumps(options))


def processor_of(words, config):
    backbone = config.get("visual_tokenizer_config", {}).get("backbone_config", {})
    text = PADS.get(config["llm_config"]["model_type"], "<|image_pad|>")
    return Processor(tokenizer=words, side=backbone.get("image_size", 0), navit="vit_config" in config, pad=text)


def build(tower, text, seed, tie=False, side=SIDE, **vision):
    ensure_torchvision()
    pad = PADS.get(text, "<|image_pad|>")
    words = fast_tokenizer([pad, "<|im_end|>"], eos_token="<|im_end|>", pad_token="<|im_end|>")
    extra = {"head_dim": 16} if text in ("gemma2", "qwen3", "qwen3_moe") else {}
    if text == "qwen3_moe":
        extra |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    decoder = {"model_type": text, **text_config(words, tie, **extra)}
    config = {"llm_config": decoder, "hidden_size": 64, "pad": words.convert_tokens_to_ids(pad)}
    if tower == "siglip2_navit":
        sizes = {"model_type": tower, **SHAPE, "image_size": 40, "patch_size": NAVIT_PATCH, "hidden_stride": STRIDE}
        name = "Ovis2_6_MoeForCausalLM" if text == "qwen3_moe" else "Ovis2_5"
        config |= {"architectures": [name], "model_type": "ovis2_5", "visual_vocab_size": 77, "vit_config": sizes | vision}
    else:
        sizes = {"model_type": tower, **SHAPE, "image_size": side, "patch_size": PATCH, **vision}
        words_config = {"vocab_size": 77, "tokenize_function": "softmax", "hidden_stride": STRIDE, "backbone_config": sizes}
        words_config |= {"drop_cls_token": tower == "clip_vision_model"}
        config |= {"architectures": ["Ovis"], "model_type": "ovis", "visual_tokenizer_config": words_config}
    model = Composed(config).eval()
    randomise(model, seed)
    model.visual_tokenizer.head[1].weight.data.add_(1)
    sharpen(model.visual_tokenizer)
    for name, p in model.visual_tokenizer.named_parameters():
        if name.endswith("attn.qkv.weight"):
            p.data[:128] *= 3
        elif name.endswith("pos_embed"):
            p.data *= 8
    return model, processor_of(words, config)


def load(folder):
    import transformers as tf

    config = json.loads((folder / "config.json").read_text())
    model = Composed(config)
    missing, surplus = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not surplus
    assert set(missing) <= {"llm.lm_head.weight"}
    return model.eval(), processor_of(tf.PreTrainedTokenizerFast.from_pretrained(folder), config)


def normalized(image, size):
    """Resize with Pillow to `(width, height)` and normalize: `[3, height, width]`."""
    pixels = np.asarray(image.resize(size, Image.Resampling.BICUBIC), np.float32) * np.float32(1 / 255)
    return torch.from_numpy((pixels - np.array(MEAN, np.float32)) / np.array(STD, np.float32)).permute(2, 0, 1)


def boxes(size, grid):
    (wide, tall), (rows, columns) = size, grid
    step = wide // columns, tall // rows
    for row in range(rows):
        for column in range(columns):
            right = wide if column == columns - 1 else (column + 1) * step[0]
            yield column * step[0], row * step[1], right, tall if row == rows - 1 else (row + 1) * step[1]


def best_grid(size, side):
    """Return rows and columns: the fewest that cover more than 0.9 of the area, or those that cover most."""

    def covered(left, upper, right, lower):
        long, short = max(right - left, lower - upper), min(right - left, lower - upper)
        return long * short if long <= side else short / long * side * side

    grids = [(i, j) for i in range(1, MOST + 1) for j in range(1, MOST + 1) if i * j <= MOST]
    found = [(grid, sum(covered(*box) for box in boxes(size, grid)) / (size[0] * size[1])) for grid in grids]
    good = [(grid, share) for grid, share in found if share > 0.9]
    if good:
        return min(good, key=lambda one: (one[0][0] * one[0][1], -one[1]))[0]
    return min(found, key=lambda one: (-one[1], one[0][0] * one[0][1]))[0]


def padded(image, side):
    wide, tall = image.size
    size = (side, side)
    if wide > tall:
        size = (side, int(tall / wide * side))
    elif tall > wide:
        size = (int(wide / tall * side), side)
    square = torch.zeros(3, side, side)
    left, upper = (side - size[0]) // 2, (side - size[1]) // 2
    square[:, upper : upper + size[1], left : left + size[0]] = normalized(image, size)
    return square


def tiles_of(image, side):
    """Return the views and, between them, the numbers of the marks: 0 start, 1 prefix, 2 column, 3 row, 4 end."""
    grid = best_grid(image.size, side)
    parts = [0, padded(image, side), 1]
    for number, box in enumerate(boxes(image.size, grid) if grid != (1, 1) else (), 1):
        mark = 2 if number % grid[1] else 3 if number < grid[0] * grid[1] else 4
        parts += [padded(image.crop(box), side), mark]
    return parts if parts[-1] == 4 else [*parts, 4]


def fitted(tall, wide):
    """Return the size at which Ovis2.5 takes an image or a frame."""
    factor = NAVIT_PATCH * STRIDE
    if tall < factor or wide < factor:
        tall, wide = (factor, round(factor / tall * wide)) if tall < wide else (round(factor / wide * tall), factor)
    elif max(tall, wide) / min(tall, wide) > 200:
        tall, wide = (200 * wide, wide) if tall > wide else (tall, 200 * tall)
    h, w = round(tall / factor) * factor, round(wide / factor) * factor
    if h * w > MOST_PIXELS:
        beta = math.sqrt(tall * wide / MOST_PIXELS)
        return math.floor(tall / beta / factor) * factor, math.floor(wide / beta / factor) * factor
    if h * w < LEAST_PIXELS:
        beta = math.sqrt(LEAST_PIXELS / (tall * wide))
        return math.ceil(tall * beta / factor) * factor, math.ceil(wide * beta / factor) * factor
    return h, w


def patches_of(frames):
    h, w = fitted(*frames[0].size[::-1])
    planes = torch.stack([normalized(frame, (w, h)) for frame in frames])
    grid = len(frames), h // NAVIT_PATCH, w // NAVIT_PATCH
    cut = planes.reshape(grid[0], 3, grid[1] // STRIDE, STRIDE, NAVIT_PATCH, grid[2] // STRIDE, STRIDE, NAVIT_PATCH)
    return cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(math.prod(grid), -1), grid


def call(processor, text, data):
    """Tokenize the text between placeholders, and write a token for each row."""
    images, videos = iter(data.get("image", ())), iter(data.get("video", ()))
    ids, items, pad = [], [], processor.tokenizer.convert_tokens_to_ids(processor.pad)
    for number, chunk in enumerate(text.replace("<video>", "<image>v").split("<image>")):
        moving = number and chunk.startswith("v") and data.get("video")
        if number and processor.navit:
            kind = "video" if moving else "image"
            frames = [Image.fromarray(one) for one in next(videos)] if moving else [next(images)]
            items.append((kind, patches_of(frames)))
            ids += [pad] * (math.prod(items[-1][1][1]) // STRIDE**2 + 2)
        elif number:
            items.append(("tiles", tiles_of(next(images), processor.side)))
            rows = (-(-(processor.side // PATCH) // STRIDE)) ** 2
            ids += [pad] * sum(1 if isinstance(part, int) else rows for part in items[-1][1])
        ids += processor.tokenizer(chunk[1:] if moving else chunk, add_special_tokens=False)["input_ids"]
    return {"input_ids": torch.tensor([ids]), "items": items}


def tensors(inputs, features):
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    for feature, (kind, parts) in zip(ordered, inputs["items"], strict=True):
        if kind != "tiles":
            suffix, grid = ("", "image_grid_thw") if kind == "image" else ("_videos", "video_grid_thw")
            yield grid, feature.kwargs[grid].data, torch.tensor(parts[1])
            yield kind, feature.kwargs[f"pixel_values{suffix}"].data, parts[0]
            continue
        views = torch.stack([part for part in parts if not isinstance(part, int)])
        side = views.shape[-1] // PATCH
        cut = views[..., : side * PATCH, : side * PATCH].view(len(views), 3, side, PATCH, side, PATCH).permute(0, 2, 4, 1, 3, 5)
        ours = feature.kwargs["pixel_values"].data.view(len(views), side * side, -1)
        if side % STRIDE == 0:
            cut = cut.unflatten(2, (-1, STRIDE)).unflatten(1, (-1, STRIDE)).transpose(2, 3)
        yield "tiles", ours, cut.reshape(ours.shape)


def refuses(side, modality, size):
    try:
        tiles_of(Image.new("RGB", size[::-1]), side)
    except (ValueError, ZeroDivisionError, SystemError):
        return True
    return False


KEYS = "a key bias adds the same to all scores of a query"
IMAGES = {"sizes": {"image": [(90, 130), (50, 50), (140, 70), (30, 200)]}, "grid": {"image": IMAGE_SIZES}}
NORM = {"visual_tokenizer.backbone.vision_model.post_layernorm": "the published code takes the state before this norm"}
BIASES = {f"visual_tokenizer.backbone.vision_model.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)}
NAVIT_NORM = {"visual_tokenizer.vit.vision_model.post_layernorm": "the published code takes the state before this norm"}
SHARED = {"call": call, "tensors": tensors, "load": load}

OVIS2_5 = Family(
    "ovis2_5",
    partial(build, "siglip2_navit", "qwen3"),
    placeholders={"image": "<image>", "video": "<video>"},
    sizes={"image": [(90, 130), (60, 60), (40, 150)], "video": [(3, 60, 90), (2, 80, 50), (4, 64, 64)]},
    grid={
        "image": [*(size for size in IMAGE_SIZES if min(fitted(*size))), (90, 45), (45, 91), (130, 300), (601, 599)],
        "video": VIDEO_SIZES,
    },  # others of IMAGE_SIZES give an empty image
    cases=["", "i", "v", "ii", "iii"],
    ours=as_sampled,
    **SHARED,
    silent=NAVIT_NORM | {name.replace("backbone", "vit"): why for name, why in BIASES.items()},
    variants={"tied": {"tie": True}, "windows": {"window_size": 32, "fullatt_block_indexes": "1"}},
    fullest={"image": [(96, 128)]},
)
FAMILIES = [
    Family(
        "ovis2_published",
        partial(build, "aimv2", "qwen2"),
        placeholders={"image": "<image>"},
        **IMAGES,
        **SHARED,
        refuses=partial(refuses, SIDE),
        silent={"visual_tokenizer.backbone.trunk.post_trunk_norm": "the published code takes the state before this norm"},
        variants={"tied": {"tie": True}, "biases": {"qkv_bias": True, "use_bias": True}},
        fullest={"image": [(140, 70)]},
    ),
    Family(
        "ovis1_6",
        partial(build, "siglip_vision_model", "gemma2", side=40),
        placeholders={"image": "<image>"},
        **IMAGES,
        **SHARED,
        refuses=partial(refuses, 40),
        silent=NORM | BIASES,
        variants={"tied": {"tie": True}},
        fullest={"image": [(140, 70)]},
    ),
    Family(
        "ovis1_6_clip",
        partial(build, "clip_vision_model", "llama"),
        placeholders={"image": "<image>"},
        **IMAGES,
        **SHARED,
        refuses=partial(refuses, SIDE),
        silent=NORM | BIASES,
        fullest={"image": [(140, 70)]},
    ),
    OVIS2_5,
    replace(OVIS2_5, name="ovis2_6", build=partial(build, "siglip2_navit", "qwen3_moe"), variants={}),
]
