"""dots.ocr in the parity suite. The oracle is composed anew: transformers has no class for it. Source: vLLM's dots_ocr.py."""

import functools
import json
from types import SimpleNamespace

import torch
from family import Family, is_sliver
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

SPECIALS = ("<|endoftext|>", "<|img|>", "<|imgpad|>", "<|endofimg|>")
VISION = {
    "embed_dim": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 1, "rms_norm_eps": 1e-5, "use_bias": False,
    "post_norm": True,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, width, inner, heads, bias, eps):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.mlp.fc1, self.mlp.fc3 = nn.Linear(width, inner, bias), nn.Linear(width, inner, bias)
        self.mlp.fc2 = nn.Linear(inner, width, bias)

    def forward(self, x, angles):
        q, k, v = self.attn.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)

        def turned(y):
            first, second = y.chunk(2, -1)
            return y * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v)
        x = x + self.attn.proj(mixed.transpose(0, 1).flatten(1))
        y = self.norm2(x)
        return x + self.mlp.fc2(F.silu(self.mlp.fc1(y)) * self.mlp.fc3(y))


class Tower(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, eps = c["embed_dim"], c["rms_norm_eps"]
        self.patch, self.merge, self.dim = c["patch_size"], c["spatial_merge_size"], width // c["num_attention_heads"]
        self.patch_embed = nn.Module()
        self.patch_embed.patchifier = nn.Module()
        self.patch_embed.patchifier.proj = nn.Conv2d(3, width, self.patch, self.patch)
        self.patch_embed.patchifier.norm = nn.RMSNorm(width, eps)
        sizes = (width, c["intermediate_size"], c["num_attention_heads"], c["use_bias"], eps)
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(c["num_hidden_layers"]))
        if c["post_norm"]:
            self.post_trunk_norm = nn.RMSNorm(width, eps)
        wide = width * self.merge**2
        self.merger = nn.Module()
        self.merger.ln_q = nn.LayerNorm(width, 1e-6)
        self.merger.mlp = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, c["hidden_size"]))

    def angles(self, h, w):
        """Return the angles of the patches of one image, square by square."""
        places = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1)
        places = places.view(h // self.merge, self.merge, w // self.merge, self.merge, 2).transpose(1, 2).reshape(-1, 2)
        inverse = 1e4 ** -(torch.arange(0, self.dim // 2, 2) / (self.dim // 2))
        return (places[..., None] * inverse).flatten(1).repeat(1, 2)

    def forward(self, pixels, grids):
        rows = []
        for part, (_, h, w) in zip(pixels.split(grids.prod(-1).tolist()), grids.tolist(), strict=True):
            x = self.patch_embed.patchifier.proj(part.view(-1, 3, self.patch, self.patch)).flatten(1)
            x = self.patch_embed.patchifier.norm(x)
            for block in self.blocks:
                x = block(x, self.angles(h, w))
            x = self.post_trunk_norm(x) if hasattr(self, "post_trunk_norm") else x
            rows.append(self.merger.mlp(self.merger.ln_q(x).view(-1, x.shape[1] * self.merge**2)))
        return torch.cat(rows)


@functools.cache
def oracle_class():
    ensure_torchvision()
    import transformers as tf

    class Oracle(tf.Qwen2ForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.vision_tower = Tower(config.vision_config)

        def forward(self, input_ids, pixel_values=None, image_grid_thw=None, **more):
            rows = self.get_input_embeddings()(input_ids)
            if pixel_values is not None:
                rows[input_ids == self.config.image_token_id] = self.vision_tower(pixel_values, image_grid_thw)
            return super().forward(inputs_embeds=rows, **more)

    return Oracle


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)


def build(seed, tie=False, **vision):
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    config = tf.Qwen2Config(**text_config(words, tie), attn_implementation="eager")
    config.vision_config, config.image_token_id = VISION | vision, words.convert_tokens_to_ids("<|imgpad|>")
    model = oracle_class()(config).eval()
    randomise(model, seed)
    sharpen(model.vision_tower)
    size = {"shortest_edge": 56 * 56, "longest_edge": 140 * 140}
    images = tf.Qwen2VLImageProcessor(size=size, patch_size=14, merge_size=2, temporal_patch_size=1)
    return model, Processor(tokenizer=words, image_processor=images)


def finish(folder):
    """Write the publisher's class and model type."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["DotsOCRForCausalLM"], "model_type": "dots_ocr"}
    (folder / "config.json").write_text(json.dumps(config))


def load(folder):
    import transformers as tf

    said = json.loads((folder / "config.json").read_text())
    config = tf.Qwen2Config(**{**said, "model_type": "qwen2"}, attn_implementation="eager")
    model = oracle_class()(config).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    model.tie_weights()
    words, images = tf.PreTrainedTokenizerFast.from_pretrained(folder), tf.Qwen2VLImageProcessor.from_pretrained(folder)
    return model, Processor(tokenizer=words, image_processor=images)


def call(processor, text, data):
    """Expand the placeholders; transformers' processor would need those of videos, too."""
    made = {}
    if "image" in data:
        made = dict(processor.image_processor(data["image"], return_tensors="pt"))
        for count in made["image_grid_thw"].prod(-1).tolist():
            text = text.replace("<|imgpad|>", "<held>" * (count // 4), 1)
    return {"input_ids": processor.tokenizer(text.replace("<held>", "<|imgpad|>"), return_tensors="pt")["input_ids"], **made}


FAMILY = Family(
    "dots_ocr",
    build,
    placeholders={"image": "<|img|><|imgpad|><|endofimg|>"},
    sizes={"image": [(90, 130), (60, 60), (140, 70)]},
    refuses=is_sliver,
    call=call,
    load=load,
    finish=finish,
    variants={"tied": {"tie": True}, "biases": {"use_bias": True}, "no last norm": {"post_norm": False}},
)
