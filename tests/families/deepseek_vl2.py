"""DeepSeek-VL2 in the parity suite, composed of transformers' decoder and the publisher's tower in plain torch."""

import json
import math
from types import SimpleNamespace

import torch
from family import IMAGE_SIZES, Family
from oracle import fast_tokenizer, randomise, text_config
from PIL import ImageOps
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

TILE, PATCH, WIDTH = 40, 8, 48  # five patches along a side, which are padded to six
SIZES = [[40, 40], [40, 80], [80, 40], [80, 80], [40, 120], [120, 40], [120, 80]]  # width, height


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.attn.qkv(self.norm1(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.attn.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp.fc2(F.gelu(self.mlp.fc1(self.norm2(x)), approximate="tanh"))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.pos_embed = nn.Parameter(torch.empty(1, (TILE // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)

    def forward(self, pixels):
        return self.norm(self.blocks(self.patch_embed.proj(pixels).flatten(2).transpose(1, 2) + self.pos_embed))


class Composed(nn.Module):
    def __init__(self, config):
        super().__init__()
        import transformers as tf

        self.config, hidden = config, config["language_config"]["hidden_size"]
        self.vision, self.projector = Tower(), nn.Module()
        self.projector.layers = nn.Sequential(nn.Linear(4 * WIDTH, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.image_newline, self.view_seperator = (nn.Parameter(torch.empty(hidden)) for _ in range(2))
        text = tf.DeepseekV2Config(**config["language_config"])
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.language = tf.AutoModelForCausalLM.from_config(text, **plain)

    def encode(self, pixels, grids):
        side = TILE // PATCH
        planes = self.vision(pixels).view(-1, side, side, WIDTH).permute(0, 3, 1, 2)
        groups = F.unfold(F.pad(planes, (0, side % 2, 0, side % 2)), 2, stride=2).transpose(1, 2)
        rows, out = self.projector.layers(groups).unflatten(1, (-(-side // 2), -1)), []
        for item, (_, wide) in zip(rows.split([1 + t * w for t, w in grids]), grids, strict=True):
            bands = [torch.cat(list(band), 1) for band in item[1:].split(wide)]
            whole, cut = (
                torch.cat([plane, self.image_newline.expand(len(plane), 1, -1)], 1).flatten(0, 1)
                for plane in (item[0], torch.cat(bands))
            )
            out += [whole, self.view_seperator[None], cut]
        return torch.cat(out)

    def forward(self, input_ids, pixel_values=None, grids=(), past_key_values=None, use_cache=True):
        embeds = self.language.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            embeds[input_ids == self.config["image_token_id"]] = self.encode(pixel_values, grids)
        return self.language(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=use_cache)

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, folder / "model.safetensors")


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)


def build(seed, **text):
    words = fast_tokenizer(["<image>", "<eos>"], eos_token="<eos>", pad_token="<eos>")
    latent = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 48}
    decoder = text_config(words, num_key_value_heads=4, first_k_dense_replace=1, topk_method="greedy", **latent, **experts)
    config = {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "candidate_resolutions": SIZES,
        "global_view_pos": "head",
        "tile_tag": "2D",
        "language_config": decoder | text,
        "projector_config": {"model_type": "mlp_projector", "n_embed": decoder["hidden_size"], "input_dim": WIDTH},
        "vision_config": {
            "model_type": "vision", "width": WIDTH, "layers": 3, "heads": 4, "mlp_ratio": 2, "image_size": TILE,
            "patch_size": PATCH,
        },
        "image_token_id": words.convert_tokens_to_ids("<image>"),
    }  # fmt: skip
    model = Composed(config).eval()
    randomise(model, seed)
    return model, Processor(tokenizer=words)


def load(folder):
    import transformers as tf

    model = Composed(json.loads((folder / "config.json").read_text()))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval(), Processor(tokenizer=tf.PreTrainedTokenizerFast.from_pretrained(folder))


def best(image):
    """Return the best size: that which keeps the most pixels, then wastes the least."""
    found = []
    for width, height in SIZES:
        scale = min(width / image.width, height / image.height)
        kept = min(int(image.width * scale) * int(image.height * scale), image.width * image.height)
        found.append((kept, kept - width * height, (width, height)))
    return max(found, key=lambda one: one[:2])[2]


def call(processor, text, data):
    """Do what the published processor does: pad the whole image and the image at its best size, and cut the latter."""
    from torchvision.transforms.functional import normalize, to_tensor

    images, pixels, grids = data.get("image", ()), [], []
    for image in images:
        wide, tall = best(image) if len(images) <= 2 else (TILE, TILE)
        views = [ImageOps.pad(image, (TILE, TILE), color=(127,) * 3)]
        local = ImageOps.pad(image, (wide, tall), color=(127,) * 3)
        boxes = [(j, i, j + TILE, i + TILE) for i in range(0, tall, TILE) for j in range(0, wide, TILE)]
        pixels += [normalize(to_tensor(one), [0.5] * 3, [0.5] * 3) for one in (*views, *(local.crop(box) for box in boxes))]
        grids.append((tall // TILE, wide // TILE))
        side = math.ceil(TILE // PATCH / 2)
        rows = side * (side + 1) + 1 + grids[-1][0] * side * (grids[-1][1] * side + 1)
        text = text.replace("<image>", "<row>" * rows, 1)
    ids = processor.tokenizer(text.replace("<row>", "<image>"), return_tensors="pt")["input_ids"]
    return {"input_ids": ids} | ({"pixel_values": torch.stack(pixels), "grids": grids} if pixels else {})


def tensors(inputs, features):
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    yield "tiles", torch.stack([one.kwargs["tiles"].data for one in ordered]), torch.tensor(inputs["grids"])
    side = TILE // PATCH
    patches = torch.cat([one.kwargs["pixel_values"].data for one in ordered]).view(-1, side, side, 3, PATCH, PATCH)
    yield "pixel_values", patches.permute(0, 3, 1, 4, 2, 5).reshape(inputs["pixel_values"].shape), inputs["pixel_values"]


FAMILY = Family(
    "deepseek_vl2",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(90, 130), (60, 60), (140, 40), (30, 200)]},
    grid={"image": IMAGE_SIZES},
    refuses=lambda modality, size: TILE * min(size) / max(size) <= 0.5,
    call=call,
    tensors=tensors,
    load=load,
    half=(0.1, 0.04),
    fullest={"image": [(40, 120), (40, 120)]},
    fullest_items=2,
)
