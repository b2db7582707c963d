"""Eagle2.5-VL in the parity suite, composed of transformers' SigLIP and Qwen2, with the pixels of the publisher's processor.

Tiles, texts and layers follow the publisher's code as it is in Isaac GR00T.
"""

import json
import re
from types import SimpleNamespace

import torch
from family import FPS, Family, as_sampled
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

TILE, PATCH, WIDTH = 112, 14, 64
MARKS = ["<IMG_CONTEXT>", "<img>", "</img>", "<|im_end|>"]


KEYS = "a key bias adds the same to all scores of a query"


class Composed(nn.Module):
    def __init__(self, config):
        super().__init__()
        import transformers as tf

        self.config, hidden, wide = config, config["text_config"]["hidden_size"], 4 * WIDTH
        shape = {key: one for key, one in config["vision_config"].items() if key != "model_type"}
        self.vision_model = tf.SiglipVisionModel(tf.SiglipVisionConfig(**shape, attn_implementation="eager"))
        own = [nn.LayerNorm(wide), nn.Linear(wide, hidden), nn.GELU(), nn.Linear(hidden, hidden)]
        self.mlp1 = nn.Sequential(*own if config["mlp_connector_layers"] == 2 else own[1:2])
        text = dict(config["text_config"])
        kind = tf.CONFIG_MAPPING[text.pop("model_type")]
        self.language_model = tf.AutoModelForCausalLM.from_config(kind(**text), attn_implementation="eager")

    def encode(self, tiles):
        layer, side = self.config["select_layer"], TILE // PATCH
        seen = self.vision_model(tiles, output_hidden_states=True)
        rows = seen.last_hidden_state if layer == -1 else seen.hidden_states[layer]
        squares = rows.unflatten(1, (side // 2, 2, side // 2, 2)).transpose(2, 3)
        return self.mlp1(squares.reshape(len(rows) * (side // 2) ** 2, -1))

    def forward(self, input_ids, pixel_values=None, past_key_values=None, use_cache=True):
        embeds = self.language_model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            embeds[input_ids == self.config["image_token_index"]] = self.encode(pixel_values)
        return self.language_model(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=use_cache)

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tied = self.config["text_config"]["tie_word_embeddings"]
        state = {k: one.contiguous() for k, one in self.state_dict().items() if not (tied and k.endswith("lm_head.weight"))}
        save_file({published(name): one for name, one in state.items()}, folder / "model.safetensors", {"format": "pt"})


def published(name):
    """Return the name of older transformers, which the publisher uses."""
    outer, inner = "vision_model.", "vision_model.vision_model."
    return name if not name.startswith(outer) or name.startswith(inner) else inner + name.removeprefix(outer)


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)
        options = {"image_processor_type": "Eagle2_5_VLImageProcessorFast", "size": {"height": TILE, "width": TILE}}
        options |= {"max_dynamic_tiles": 6, "min_dynamic_tiles": 1, "use_thumbnail": True, "pad_during_tiling": False}
        (folder / "preprocessor_config.json").write_text(json.dumps(options))


def build(seed, tie=False, layer=-1, layers=2, text="qwen2"):
    words = fast_tokenizer(MARKS, eos_token="<|im_end|>", pad_token="<|im_end|>")
    config = {
        "architectures": ["Eagle2_5_VLForConditionalGeneration"],
        "model_type": "eagle_2_5_vl",
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "image_token_index": words.convert_tokens_to_ids("<IMG_CONTEXT>"),
        "mlp_connector_layers": layers,
        "select_layer": layer,
        "text_config": {"model_type": text, **text_config(words, tie)},
        "tie_word_embeddings": tie,
        "use_pixel_shuffle": True,
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "image_size": TILE, "patch_size": PATCH,
        },
    }  # fmt: skip
    model = Composed(config).eval()
    randomise(model, seed)
    if layers == 2:
        model.mlp1[0].weight.data.add_(1)
    sharpen(model.vision_model)
    return model, Processor(tokenizer=words)


def load(folder):
    ensure_torchvision()
    import transformers as tf

    model = Composed(json.loads((folder / "config.json").read_text()))
    stored = load_file(folder / "model.safetensors")
    tensors = {name: stored[published(name)] for name in model.state_dict() if published(name) in stored}
    missing, _ = model.load_state_dict(tensors, strict=False)
    assert len(tensors) == len(stored)
    assert set(missing) <= {"language_model.lm_head.weight"}
    return model.eval(), Processor(tokenizer=tf.PreTrainedTokenizerFast.from_pretrained(folder))


CUT = {"mode": "bicubic", "align_corners": False, "antialias": True}


def normalized(pixels):
    return (pixels / 255 - 0.5) / 0.5


def tiles(image):
    """Return the tiles of the arrangement that keeps most of the image's area and shape, and a thumbnail."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
    planes, ratio = pixels.permute(2, 0, 1)[None], image.width / image.height
    every = [(wide, tall) for wide in range(1, 7) for tall in range(1, 7) if wide * tall <= 6]
    best, most = (1, 1), -1.0
    for grid in sorted(every, key=lambda grid: grid[0] * grid[1]):
        own = grid[0] / grid[1]
        factor = min(grid[0] * grid[1] * TILE**2 / (image.width * image.height), 0.6) * min(own / ratio, ratio / own)
        if factor > most:
            best, most = grid, factor
    whole = F.interpolate(planes, (TILE * best[1], TILE * best[0]), **CUT)[0]
    cuts = [whole[:, TILE * i : TILE * (i + 1), TILE * j : TILE * (j + 1)] for i in range(best[1]) for j in range(best[0])]
    thumbnail = [] if len(cuts) == 1 else [F.interpolate(planes, (TILE, TILE), **CUT)[0]]
    return [normalized(one) for one in (*cuts, *thumbnail)]


def call(processor, text, data):
    seen, images, videos = [], list(data.get("image", ())), list(data.get("video", ()))

    def rows(count):
        return f"<img>{'<IMG_CONTEXT>' * count * (TILE // PATCH // 2) ** 2}</img>"

    def told(match):
        if match[1] == "image":
            made = tiles(images[count["image"]])
            line = f"<image {count['image'] + 1}>{rows(len(made))}"
        else:
            planes = torch.from_numpy(videos[count["video"]].copy()).permute(0, 3, 1, 2)
            made = [normalized(F.interpolate(frame[None], (TILE, TILE), **CUT)[0]) for frame in planes]
            line = f"The {('first', 'second', 'third')[count['video']]} video sampled with {FPS:.2f} fps: "
            line += "".join(f"Frame {i + 1} sample at {i / FPS:.2f}s: {rows(1)}" for i in range(len(made)))
        count[match[1]] += 1
        seen.extend(made)
        return line

    count = {"image": 0, "video": 0}
    text = re.sub("<(image|video)-N>", told, text)
    ids = processor.tokenizer(text, return_tensors="pt")["input_ids"]
    return {"input_ids": ids} | ({"pixel_values": torch.stack(seen)} if seen else {})


def request(text, data):
    for name in ("image", "video"):
        for number in range(1, 1 + text.count(f"<{name}-N>")):
            text = text.replace(f"<{name}-N>", f"<{name}-{number}>", 1)
    return {"prompt": text, "multi_modal_data": data}


def tensors(inputs, features):
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    patches, theirs = torch.cat([one.kwargs["pixel_values"].data for one in ordered]), inputs["pixel_values"]
    planes = patches.view(-1, TILE // PATCH // 2, TILE // PATCH // 2, 2, 2, 3, PATCH, PATCH).permute(0, 5, 1, 3, 6, 2, 4, 7)
    yield "pixel_values", planes.reshape(theirs.shape), theirs


FAMILY = Family(
    "eagle2_5_vl",
    build,
    placeholders={"image": "<image-N>", "video": "<video-N>"},
    sizes={"image": [(90, 130), (60, 60), (140, 40)], "video": [(3, 80, 100), (2, 50, 90), (4, 60, 60)]},
    ours=as_sampled,
    call=call,
    request=request,
    tensors=tensors,
    load=load,
    silent={
        **{f"vision_model.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
        "vision_model.head.": "the pooled vector is not used",
    },
    variants={"tied": {"tie": True}, "earlier layer": {"layer": -2}, "one layer": {"layers": 1}, "llama": {"text": "llama"}},
)
