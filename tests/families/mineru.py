"""MinerU 2.0 in the parity suite, composed of transformers' SigLIP and Qwen2 as in the publisher's modelling code."""

import json
import math
from types import SimpleNamespace

import torch
from family import IMAGE_SIZES, Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

TILE, PATCH, MOST = 32, 7, 3
SIDE = TILE // PATCH
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>")
KEYS = "a key bias adds the same to all scores of a query"


class Tower(nn.Module):
    """SigLIP without its last layer, under the publisher's two names."""

    def __init__(self, config):
        super().__init__()
        import transformers as tf

        shape = {key: one for key, one in config.items() if key != "model_type"} | {"vision_use_head": False}
        shape["num_hidden_layers"] -= 1
        self.vision_tower = tf.SiglipVisionModel(tf.SiglipVisionConfig(**shape, attn_implementation="eager"))

    def forward(self, tiles):
        return self.vision_tower(tiles, output_hidden_states=True).hidden_states[-1]


class Composed(nn.Module):
    def __init__(self, config):
        super().__init__()
        import transformers as tf

        self.config, width = config, config["hidden_size"]
        known = {key: one for key, one in config.items() if key not in ("model_type", "vision_config", "architectures")}
        whole = tf.Qwen2ForCausalLM._from_config(tf.Qwen2Config(**known), attn_implementation="eager")
        self.decoder, self.tied = whole, config["tie_word_embeddings"]
        whole.model.vision_tower = Tower(config["vision_config"])
        whole.model.mm_projector = nn.Sequential(nn.Linear(config["mm_hidden_size"], width), nn.GELU(), nn.Linear(width, width))
        whole.model.image_newline = nn.Parameter(torch.zeros(width))

    def state_dict(self, *args, **kwargs):
        """Return the tensors under the published names."""
        return {name.removeprefix("decoder."): one for name, one in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, tensors, strict=True, assign=False):
        return super().load_state_dict({f"decoder.{name}": one for name, one in tensors.items()}, strict, assign)

    def encode(self, tiles, grid):
        """Return the rows of the small image, then those of the tiles line by line; `grid`: tiles down and across."""
        rows = self.decoder.model.mm_projector(self.decoder.model.vision_tower(tiles))
        plane = rows[1:].view(*grid, SIDE, SIDE, -1).permute(4, 0, 2, 1, 3).flatten(1, 2).flatten(2, 3)
        _, tall, wide = plane.shape
        match = self.config["image_aspect_ratio"].rpartition("max_")[2]
        times = math.sqrt(tall * wide / (int(match) * SIDE**2)) if match.isdecimal() else 0.0
        if times > 1.1:
            plane = F.interpolate(plane[None], [int(tall // times), int(wide // times)], mode="bilinear")[0]
        ends = self.decoder.model.image_newline[:, None, None].expand(-1, plane.shape[1], 1)
        return torch.cat((rows[0], torch.cat((plane, ends), -1).flatten(1, 2).T))

    def forward(self, input_ids, images=(), past_key_values=None, use_cache=True):
        embeds = self.decoder.get_input_embeddings()(input_ids)
        if images:
            rows = torch.cat([self.encode(*one) for one in images])
            embeds[input_ids == self.config["image_token_index"]] = rows
        return self.decoder(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=use_cache)

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        state = {name: one.contiguous() for name, one in self.state_dict().items()}
        if self.tied:
            del state["lm_head.weight"]
        save_file({published(name): one for name, one in state.items()}, folder / "model.safetensors", {"format": "pt"})


def published(name):
    """Return the name of older transformers, which the publisher uses."""
    outer = "model.vision_tower.vision_tower."
    inner = f"{outer}vision_model."
    return name if not name.startswith(outer) or name.startswith(inner) else inner + name.removeprefix(outer)


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)


def build(seed, tie=False, aspect=f"square_anyres_max_{MOST}", pinpoints="(1x1),...,(4x4)"):
    ensure_torchvision()
    words = fast_tokenizer(SPECIALS, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    config = {
        **text_config(words, tie),
        "architectures": ["Mineru2QwenForCausalLM"],
        "model_type": "mineru2_qwen",
        "image_aspect_ratio": aspect,
        "image_grid_pinpoints": pinpoints,
        "image_token_index": words.convert_tokens_to_ids("<image>"),
        "mm_hidden_size": 48,
        "mm_patch_merge_type": "spatial_unpad",
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": -2,
        "mm_vision_tower": "siglip-so400m-patch14-384",
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
            "num_attention_heads": 4, "image_size": TILE, "patch_size": PATCH,
        },
    }  # fmt: skip
    model = Composed(config).eval()
    randomise(model, seed)
    sharpen(model.decoder.model.vision_tower)
    return model, Processor(tokenizer=words, config=config)


def load(folder):
    ensure_torchvision()
    import transformers as tf

    config = json.loads((folder / "config.json").read_text())
    model, stored = Composed(config), load_file(folder / "model.safetensors")
    names = {name: published(name) for name in model.state_dict()}
    tensors = {name: stored[old] for name, old in names.items() if old in stored}
    missing, _ = model.load_state_dict(tensors, strict=False)
    assert len(tensors) == len(stored)
    assert set(missing) <= {"decoder.lm_head.weight"}
    return model.eval(), Processor(tokenizer=tf.PreTrainedTokenizerFast.from_pretrained(folder), config=config)


def grid_of(image, config):
    """Return the tiles down and across: the size that keeps most pixels, then wastes the fewest."""
    sizes = config["image_grid_pinpoints"]
    if isinstance(sizes, str):
        sizes = [[TILE * wide, TILE * tall] for wide in range(1, 5) for tall in range(1, 5)]

    def score(size):
        scale = min(size[0] / image.width, size[1] / image.height)
        kept = min(int(image.width * scale) * int(image.height * scale), image.width * image.height)
        return kept, kept - size[0] * size[1]

    wide, tall = max(sizes, key=score)
    return tall // TILE, wide // TILE


def pixels_of(image):
    planes = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8).view(TILE, TILE, 3)
    return (planes.permute(2, 0, 1) / 255 - 0.5) / 0.5


def call(processor, text, data):
    images = []
    for image in data.get("image", ()):
        tall, wide = grid_of(image, processor.config)
        whole = image.resize((TILE * wide, TILE * tall))
        cuts = [whole.crop((TILE * j, TILE * i, TILE * (j + 1), TILE * (i + 1))) for i in range(tall) for j in range(wide)]
        images.append((torch.stack([pixels_of(one) for one in (image.resize((TILE, TILE)), *cuts)]), (tall, wide)))
        lines = [SIDE * tall, SIDE * wide]
        most = processor.config["image_aspect_ratio"].rpartition("max_")[2]
        times = math.sqrt(lines[0] * lines[1] / (int(most) * SIDE**2)) if most.isdecimal() else 0.0
        if times > 1.1:
            lines = [int(one // times) for one in lines]
        text = text.replace("<image>", "<held>" * (SIDE**2 + lines[0] * (lines[1] + 1)), 1)
    ids = processor.tokenizer(text.replace("<held>", "<image>"), return_tensors="pt")["input_ids"]
    return {"input_ids": ids} | ({"images": images} if images else {})


def tensors(inputs, features):
    for (theirs, _), feature in zip(inputs.get("images", ()), features, strict=True):
        patches = feature.kwargs["pixel_values"].data.view(-1, SIDE, SIDE, 3, PATCH, PATCH)
        planes = patches.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
        yield "images", planes, theirs[:, :, : SIDE * PATCH, : SIDE * PATCH]


PAIRS = [[2 * TILE, TILE], [TILE, 2 * TILE], [3 * TILE, 2 * TILE]]  # width, height
FAMILY = Family(
    "mineru2",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(90, 130), (60, 60), (40, 170)]},
    grid={"image": IMAGE_SIZES},
    cases=("", "i", "ii", "iii"),
    fullest={"image": [(200, 200), (210, 210)]},
    call=call,
    load=load,
    tensors=tensors,
    silent={
        **{f"decoder.model.vision_tower.vision_tower.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
        "decoder.model.vision_tower.vision_tower.post_layernorm": "the tower's last hidden states are not normalised",
    },
    variants={"tied": {"tie": True}, "no limit": {"aspect": "anyres"}, "a list of sizes": {"pinpoints": PAIRS}},
    layouts={"transformers 5": [("model.vision_tower.vision_tower.vision_model.", "model.vision_tower.vision_tower.")]},
)
