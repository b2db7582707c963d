"""Phi-3-vision in the parity suite, composed of transformers' CLIP and Phi-3.

How tiles are cut and joined follows the publisher's image_processing_phi3_v.py and modeling_phi3_v.py, and vLLM's phi3v.py.
"""

import json
import math
from types import SimpleNamespace

import numpy as np
import torch
from family import IMAGE_SIZES, Family
from oracle import fast_tokenizer, randomise, sharpen, text_config
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

TILE, PATCH, WIDTH, CROPS = 32, 8, 32, 16
SIDE = TILE // PATCH // 2
VISION = {
    "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": TILE,
    "patch_size": PATCH, "hidden_act": "quick_gelu", "projection_dim": 16,
}  # fmt: skip
EMBED = "model.vision_embed_tokens."


class Composed(nn.Module):
    def __init__(self, config):
        super().__init__()
        import transformers as tf

        self.config, hidden = config, config["hidden_size"]
        plain = {"attn_implementation": "eager"}
        self.tower = tf.CLIPVisionModel._from_config(tf.CLIPVisionConfig(**VISION), **plain)
        self.img_projection = nn.Sequential(nn.Linear(4 * WIDTH, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.glb_GN, self.sub_GN = nn.Parameter(torch.empty(1, 1, 4 * WIDTH)), nn.Parameter(torch.empty(1, 1, 1, 4 * WIDTH))
        text = {key: value for key, value in config.items() if key not in OWN}
        self.language = tf.AutoModelForCausalLM.from_config(tf.Phi3Config(**text), **plain)

    def encode(self, pixels, sizes):
        out = []
        for item, (tall, wide) in zip(pixels, sizes, strict=True):
            state = self.tower(item, output_hidden_states=True).hidden_states[-2][:, 1:]
            planes = state.view(len(item), SIDE, 2, SIDE, 2, WIDTH).permute(0, 1, 3, 2, 4, 5).reshape(len(item), SIDE, SIDE, -1)
            cut = planes[1:].view(tall, wide, SIDE, SIDE, -1).transpose(1, 2).reshape(tall * SIDE, wide * SIDE, -1)
            lines = [torch.cat([one, self.sub_GN[0].expand(len(one), 1, -1)], 1).flatten(0, 1) for one in (cut, planes[0])]
            out.append(self.img_projection(torch.cat([lines[0], self.glb_GN[0], lines[1]])))
        return torch.cat(out)

    def forward(self, input_ids, pixels=(), sizes=(), past_key_values=None, use_cache=True):
        embeds = self.language.get_input_embeddings()(input_ids)
        if len(pixels):
            embeds[input_ids == self.config["image_token_id"]] = self.encode(pixels, sizes)
        return self.language(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=use_cache)

    def state_dict(self, *args, **kwargs):
        made = {}
        for name, value in super().state_dict(*args, **kwargs).items():
            name = name.removeprefix("language.")
            if name.startswith("tower."):
                name = f"{EMBED}img_processor.vision_model.{name.removeprefix('tower.').removeprefix('vision_model.')}"
            elif name.startswith(("img_projection.", "glb_GN", "sub_GN")):
                name = EMBED + name
            made[name] = value
        return made

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: tensor.contiguous().clone() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.words.save_pretrained(folder)
        made = {"image_processor_type": "Phi3VImageProcessor", "num_crops": CROPS, "num_img_tokens": 144}
        made |= {"image_mean": MEAN, "image_std": STD}
        (folder / "preprocessor_config.json").write_text(json.dumps(made))


OWN = ("architectures", "model_type", "img_processor", "embd_layer", "vision_config", "image_token_id")
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def build(seed, **text):
    words = fast_tokenizer(["<|image|>", "<|end|>"], eos_token="<|end|>", pad_token="<|end|>")
    config = {
        **text_config(words, num_key_value_heads=4, **text),
        "architectures": ["Phi3VForCausalLM"],
        "model_type": "phi3_v",
        "embd_layer": {
            "embedding_cls": "image", "hd_transform_order": "sub_glb", "projection_cls": "mlp", "use_hd_transform": True,
            "with_learnable_separator": True,
        },
        "img_processor": {"image_dim_out": WIDTH, "name": "clip_vision_model", "num_img_tokens": 144},
        "vision_config": VISION,  # published checkpoints have the sizes of CLIP ViT-L/14 for 336 pixels
        "image_token_id": words.convert_tokens_to_ids("<|image|>"),
    }  # fmt: skip
    model = Composed(config).eval()
    randomise(model, seed)
    sharpen(model.tower)
    return model, Processor(words=words)


def load(folder):
    import transformers as tf

    model = Composed(json.loads((folder / "config.json").read_text()))
    stored = load_file(folder / "model.safetensors")
    names = dict(zip(model.state_dict(), nn.Module.state_dict(model), strict=True))
    nn.Module.load_state_dict(model, {names[name]: tensor for name, tensor in stored.items()})
    return model.eval(), Processor(words=tf.PreTrainedTokenizerFast.from_pretrained(folder))


def transform(image):
    """Resize and pad an image as the publisher does."""
    upright = image.width < image.height
    image = image.transpose(Image.Transpose.TRANSPOSE) if upright else image
    ratio, scale = image.width / image.height, 1
    while scale * math.ceil(scale / ratio) <= CROPS:
        scale += 1
    wide = (scale - 1) * TILE
    image = image.resize((wide, int(wide / ratio)), Image.Resampling.BILINEAR)
    tall = math.ceil(image.height / TILE) * TILE
    canvas = Image.new("RGB", (wide, tall), (255, 255, 255))
    canvas.paste(image, (0, int((tall - image.height) / 2)))
    return canvas.transpose(Image.Transpose.TRANSPOSE) if upright else canvas


def call(processor, text, data):
    pixels, sizes = [], []
    for image in data.get("image", ()):
        values = torch.from_numpy(np.array(transform(image))).permute(2, 0, 1).float() / 255
        values = ((values - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None])[None]
        whole = F.interpolate(values, size=(TILE, TILE), mode="bicubic")
        tall, wide = (side // TILE for side in values.shape[2:])
        cut = values.view(1, 3, tall, TILE, wide, TILE).permute(0, 2, 4, 1, 3, 5).reshape(-1, 3, TILE, TILE)
        pixels.append(torch.cat([whole, cut]))
        sizes.append((tall, wide))
        rows = tall * SIDE * (wide * SIDE + 1) + 1 + SIDE * (SIDE + 1)
        text = text.replace("<|image_1|>", "<|image|>" * rows, 1)
    return {"input_ids": processor.words(text, return_tensors="pt")["input_ids"], "pixels": pixels, "sizes": sizes}


def tensors(inputs, features):
    for feature, theirs in zip(features, inputs["pixels"], strict=True):
        patches = theirs.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH)).permute(0, 2, 4, 1, 3, 5)
        yield "pixel_values", feature.kwargs["pixel_values"].data, patches.reshape(-1, 3 * PATCH**2)


FAMILY = Family(
    "phi3_vision",
    build,
    placeholders={"image": "<|image_1|>"},
    sizes={"image": [(100, 57), (30, 150), (64, 64)]},
    grid={"image": IMAGE_SIZES},
    call=call,
    tensors=tensors,
    load=load,
    silent={
        "tower.encoder.layers.2.": "the rows are those of the layer before",
        "tower.post_layernorm.": "is after the layer that is read",
        **{f"tower.encoder.layers.{i}.self_attn.k_proj.bias": "adds the same to all scores of a row" for i in range(2)},
    },
    fullest={"image": [(10, 600)]},
)
