"""Isaac in the parity suite.

transformers has no class for it, so the oracle is composed of its SigLIP encoder and its Qwen3 with other rotary positions,
after the code published with the checkpoints.
"""

import json
import math
from types import SimpleNamespace

import numpy as np
import torch
from family import IMAGE_SIZES, Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

PATCH, STRIDE, SIDE, LEAST, MOST, PAD = 8, 2, 5, 16, 100, "<|image_pad|>"


class Tower(nn.Module):
    """SigLIP 2's encoder for one image `[h, w, patch * patch * 3]` of patches, whose channels come last."""

    def __init__(self, c):
        super().__init__()
        import transformers as tf
        from transformers.models.siglip.modeling_siglip import SiglipEncoder

        shape = {key: c[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
        width = c["hidden_size"]
        self.embeddings = nn.Module()
        self.embeddings.patch_embedding = nn.Linear(3 * PATCH**2, width)
        self.embeddings.position_embedding = nn.Embedding(SIDE**2, width)
        self.encoder = SiglipEncoder(tf.SiglipVisionConfig(**shape, attn_implementation="eager"))
        self.post_layernorm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, patches):
        h, w, _ = patches.shape
        table = self.embeddings.position_embedding.weight.T.view(1, -1, SIDE, SIDE)
        places = F.interpolate(table, (h, w), mode="bilinear", align_corners=False, antialias=True)
        x = self.embeddings.patch_embedding(patches).flatten(0, 1) + places[0].flatten(1).T
        x = self.post_layernorm(self.encoder(inputs_embeds=x[None]).last_hidden_state)[0]
        return x.view(h // STRIDE, STRIDE, w // STRIDE, STRIDE, -1).transpose(1, 2).reshape(h * w // STRIDE**2, -1)


class Rotary(nn.Module):
    """Half of the frequencies turn by time, a quarter each by line and by column. `places`: `[3, tokens]`."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.places = dim, None

    def forward(self, x, position_ids):
        frequency = 10000.0 ** -(torch.arange(0, self.dim, 2) / self.dim)
        axis = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([self.dim // 4, self.dim // 8, self.dim // 8]))
        angles = self.places[axis].T.float() * frequency
        angles = torch.cat([angles, angles], -1)[None]
        return angles.cos(), angles.sin()


class Composed(nn.Module):
    def __init__(self, config):
        super().__init__()
        import transformers as tf

        self.config, self.tied = config, config["tie_word_embeddings"]
        text = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "vision_config")}
        llm = tf.AutoModelForCausalLM.from_config(tf.Qwen3Config(**text), attn_implementation="eager")
        self.model, self.lm_head = llm.model, llm.lm_head
        self.model.rotary_emb = Rotary(config["head_dim"])
        width = config["vision_config"]["hidden_size"] * STRIDE**2
        first, last = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, config["hidden_size"], bias=False)
        self.model.vision_embedding = nn.Sequential(Tower(config["vision_config"]), first, nn.SiLU(), last)

    def forward(self, input_ids, images=(), position_ids=None, past_key_values=None, use_cache=True):
        embeds = self.model.get_input_embeddings()(input_ids)
        if images:
            embeds[input_ids == self.config["pad"]] = torch.cat([self.model.vision_embedding(image) for image in images])
        self.model.rotary_emb.places = position_ids[:, 0]
        out = self.model(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=use_cache)
        return SimpleLogits(logits=self.lm_head(out.last_hidden_state), past_key_values=out.past_key_values)

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {k: v.contiguous() for k, v in self.state_dict().items() if not (self.tied and k == "lm_head.weight")}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class SimpleLogits(SimpleNamespace):
    def __getitem__(self, name):
        return getattr(self, name)


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)


def build(seed, tie=False):
    ensure_torchvision()
    words = fast_tokenizer([PAD, "<|im_end|>"], eos_token="<|im_end|>", pad_token="<|im_end|>")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    vision = {**shape, "num_patches": SIDE**2, "patch_size": PATCH, "pixel_shuffle_scale_factor": STRIDE}
    config = {
        "architectures": ["IsaacForConditionalGeneration"],
        "model_type": "isaac",
        **text_config(words, tie, head_dim=16),
        "rope_theta": 10000.0,
        "rope_scaling": {"mrope_section": None, "rope_type": "default"},
        "vision_config": vision | {"model_type": "pixel_shuffle_siglip2"},
        "video_patch_size": PATCH,
        "vision_max_num_patches": MOST,
        "vision_min_num_patches": LEAST,
        "pixel_shuffle_scale": STRIDE,
        "vision_token": "<image>",
        "pad": words.convert_tokens_to_ids(PAD),
    }
    model = Composed(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_embedding)
    return model, Processor(tokenizer=words)


def load(folder):
    import transformers as tf

    config = json.loads((folder / "config.json").read_text())
    model = Composed(config)
    missing, surplus = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not surplus
    assert set(missing) <= {"lm_head.weight"}
    return model.eval(), Processor(tokenizer=tf.PreTrainedTokenizerFast.from_pretrained(folder))


def fitted(size):
    """Return `(height, width)` after scaling to LEAST to MOST patches, by bisection."""
    unit = PATCH * STRIDE

    def scaled(scale):
        return [max(unit, math.ceil(side * scale / unit) * unit) for side in size]

    def count(scale):
        return math.prod(scaled(scale)) // PATCH**2

    low, high, least = 1.0, 100.0, count(1.0) < LEAST
    if not least and count(1.0) <= MOST:
        return scaled(1.0)
    low, high = (1.0, 100.0) if least else (1e-6, 1.0)
    while high - low >= 1e-5:
        middle = (low + high) / 2
        enough = count(middle) >= LEAST if least else count(middle) > MOST
        low, high = (low, middle) if enough else (middle, high)
    return scaled(high if least else low)


def patches_of(image):
    pixels = torch.from_numpy(np.asarray(image).copy())[None].permute(0, 3, 1, 2)
    resized = F.interpolate(pixels, size=fitted(pixels.shape[2:]), mode="bilinear", align_corners=False)
    planes = (resized.permute(0, 2, 3, 1).float() * (1 / 255) - 0.5) / 0.5
    cut = planes[0].unflatten(1, (-1, PATCH)).unflatten(0, (-1, PATCH))
    return cut.transpose(1, 2).flatten(2)


def call(processor, text, data):
    images = [patches_of(image) for image in data.get("image", ())]
    ids, pad = [], processor.tokenizer.convert_tokens_to_ids(PAD)
    for number, chunk in enumerate(text.split("<image>")):
        ids += [pad] * (images[number - 1][..., 0].numel() // STRIDE**2) if number else []
        ids += processor.tokenizer(chunk, add_special_tokens=False)["input_ids"]
    return {"input_ids": torch.tensor([ids]), "images": images}


def published_positions(model, inputs):
    """A text token advances time by 1, and so does an image as a whole; its lines and columns start at 0."""
    places, time, images, ids = [], 0, iter(inputs["images"]), inputs["input_ids"][0].tolist()
    while len(places) < len(ids):
        if ids[len(places)] == model.config["pad"]:
            h, w, _ = next(images).shape
            places += [(time, row, column) for row in range(h // STRIDE) for column in range(w // STRIDE)]
        else:
            places.append((time, time, time))
        time += 1
    return torch.tensor(places).T


def tensors(inputs, features):
    for feature, image in zip(sorted(features, key=lambda one: one.range.offset), inputs["images"], strict=True):
        h, w, _ = image.shape
        squares = image.view(h // STRIDE, STRIDE, w // STRIDE, STRIDE, PATCH, PATCH, 3).permute(0, 2, 1, 3, 6, 4, 5)
        yield "pixel_values", feature.kwargs["pixel_values"].data, squares.reshape(h * w, -1)
        yield "grid", feature.kwargs["grid"].data, torch.tensor([1, h, w])


KEYS = "a key bias adds the same to all scores of a query"
FAMILY = Family(
    "isaac",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(90, 130), (60, 60), (40, 150), (20, 20)]},
    grid={"image": IMAGE_SIZES},
    call=call,
    tensors=tensors,
    oracle_positions=published_positions,
    load=load,
    silent={f"model.vision_embedding.0.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
    variants={"tied": {"tie": True}},
    layouts={"nested": [("model.vision_embedding.", "model.vision_embedding."), ("model.", "model.text_model.")]},
    fullest={"image": [(80, 80)]},
)
