"""H2OVL-Mississippi and NVLM-D in the parity suite, in their publishers' layout.

transformers has no class for them; the oracle is its InternVL, which computes the same, under the published names. Tiles are
cut here by the rule of image_process.py, which is published with the checkpoints.
"""

import json
from functools import partial

import numpy as np
import torch
from composed import ComposedProcessor
from family import IMAGE_SIZES, Family, ask_llm, patches_in_squares, run_oracle
from oracle import fast_tokenizer, randomise, sharpen, text_config
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

SIDE, ROWS, MEAN, STD = 56, 4, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CONTEXT = "<IMG_CONTEXT>"
NAMES = {
    "model.vision_tower.": "vision_model.", "model.multi_modal_projector.layer_norm.": "mlp1.0.",
    "model.multi_modal_projector.linear_1.": "mlp1.1.", "model.multi_modal_projector.linear_2.": "mlp1.3.",
    "model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
    "embeddings.cls_token": "embeddings.class_embedding", "embeddings.position_embeddings": "embeddings.position_embedding",
    "embeddings.patch_embeddings.projection.": "embeddings.patch_embedding.", "encoder.layer.": "encoder.layers.",
    "layernorm_before.": "norm1.", "layernorm_after.": "norm2.", "lambda_": "ls", "attention.projection_layer.": "attn.proj.",
    "attention.q_norm.": "attn.q_norm.", "attention.k_norm.": "attn.k_norm.",
}  # fmt: skip
PARTS = [f"attention.{kind}_proj." for kind in "qkv"]


class Oracle(nn.Module):
    """InternVL of transformers; `state_dict` and files have the published names, and q, k and v in one matrix."""

    def __init__(self, config):
        super().__init__()
        import transformers as tf

        vision, self.config = config["vision_config"], config
        own = {"use_qk_norm": vision["qk_normalization"], "attention_bias": vision["qkv_bias"]}
        sides = {"image_size": [SIDE, SIDE], "patch_size": [14, 14]}
        self.hub = tf.InternVLForConditionalGeneration._from_config(
            tf.InternVLConfig(
                vision_config={**vision, **own, **sides, "model_type": "internvl_vision"},
                text_config=config["llm_config"],
                image_token_id=config["image_token_id"],
                image_seq_length=ROWS,
                tie_word_embeddings=config["llm_config"]["tie_word_embeddings"],
                vision_feature_layer=config.get("select_layer", -4),
            ),
            attn_implementation="eager",
        )

        if config["architectures"] == ["NVLM_D"]:
            width, inner = 4 * vision["hidden_size"], config["llm_config"]["intermediate_size"]
            projector = self.hub.model.multi_modal_projector
            projector.linear_1 = nn.Linear(width, inner, bias=False)
            projector.linear_2 = nn.Linear(inner, config["llm_config"]["hidden_size"], bias=False)

    def published_names(self):
        """Yield each published name with the names in transformers of the tensors that it joins."""
        for name in self.hub.state_dict():
            joined = [name]
            if name.startswith("model.vision_tower.") and any(part in name for part in PARTS):
                if PARTS[0] not in name:
                    continue
                joined = [name.replace(PARTS[0], part) for part in PARTS]
                name = name.replace(PARTS[0], "attn.qkv.")
            for old, new in NAMES.items():
                name = name.replace(old, new)
            yield name, joined

    def state_dict(self, **options):
        state = self.hub.state_dict()
        return {name: torch.cat([state[one] for one in joined]) for name, joined in self.published_names()}

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tied = self.config["llm_config"]["tie_word_embeddings"]
        stored = {name: tensor for name, tensor in self.state_dict().items() if not (tied and "lm_head" in name)}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})


def build(seed, tie=False, text="llama", config=None, **vision):
    words = fast_tokenizer(["<|end|>", "<img>", "</img>", CONTEXT], eos_token="<|end|>", pad_token="<|end|>")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    bare = {"norm_type": "layer_norm", "qk_normalization": False, "qkv_bias": True, "layer_norm_eps": 1e-6}
    model = Oracle(
        {
            "architectures": ["H2OVLChatModel"],
            "downsample_ratio": 0.5,
            "dynamic_image_size": True,
            "force_image_size": SIDE,
            "image_token_id": words.convert_tokens_to_ids(CONTEXT),
            "llm_config": {"model_type": text, **text_config(words, tie)},
            "max_dynamic_patch": 6,
            "model_type": "h2ovl_chat",
            "ps_version": "v2",
            "select_layer": -1,
            "template": "h2ogpt2",
            "use_msac": True,
            "use_thumbnail": True,
            "vision_config": {**shape, **bare, "image_size": SIDE, "patch_size": 14, **vision},
            **(config or {}),
        }
    ).eval()
    randomise(model.hub, seed)
    sharpen(model.hub.model.vision_tower)
    return model, ComposedProcessor(tokenizer=words, config=model.config, preprocessor={"size": SIDE})


def load(folder):
    import transformers as tf

    config = json.loads((folder / "config.json").read_text())
    model, stored = Oracle(config), load_file(folder / "model.safetensors")
    state = {}
    for name, joined in model.published_names():
        if name in stored:
            state |= dict(zip(joined, stored[name].chunk(len(joined)), strict=True))
    missing, surplus = model.hub.load_state_dict(state, strict=False)
    assert not surplus
    assert config["llm_config"]["tie_word_embeddings"] or not missing
    words = tf.PreTrainedTokenizerFast.from_pretrained(folder)
    return model.eval(), ComposedProcessor(tokenizer=words, config=config, preprocessor={"size": SIDE})


def grid_of(image, least, most, first=None):
    """Return columns and rows of the grid that is nearest to the image's aspect ratio.

    `first`: columns and rows of the first grid; those of the second one must not divide them.
    """
    best, best_distance = (1, 1), float("inf")
    grids = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if least <= c * r <= most]
    for columns, rows in sorted(grids, key=lambda grid: (grid[0] * grid[1], grid[0])):
        if first and (first[0] % columns == 0 or first[1] % rows == 0):
            continue
        distance = abs(image.width / image.height - columns / rows)
        is_large = image.width * image.height > 0.5 * SIDE * SIDE * columns * rows
        if distance < best_distance or (distance == best_distance and is_large):
            best, best_distance = (columns, rows), distance
    return best


def cut(image, grid):
    """Return the tiles of a grid row by row; none if the grid has one tile."""
    columns, rows = grid
    if columns * rows == 1:
        return []
    whole = image.resize((columns * SIDE, rows * SIDE), Image.Resampling.BICUBIC)
    corners = [(column * SIDE, row * SIDE) for row in range(rows) for column in range(columns)]
    return [whole.crop((x, y, x + SIDE, y + SIDE)) for x, y in corners]


def tiles_of(image, most, two_scales):
    first = grid_of(image, 1, most)
    second = cut(image, grid_of(image, 3, most, first)) if two_scales else []
    return [*second, *cut(image, first), image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)]


def normalised(tiles):
    pixels = torch.from_numpy(np.stack([np.asarray(tile) for tile in tiles])).permute(0, 3, 1, 2).float() / 255
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def call(processor, text, data, always=False):
    """Cut an image that is alone in the prompt at two scales, as published, or every image if `always`."""
    images = data.get("image", [])
    two_scales = processor.config["use_msac"] and (always or len(images) == 1)
    cuts = [tiles_of(image, processor.config["max_dynamic_patch"], two_scales) for image in images]
    for tiles in cuts:
        text = text.replace(CONTEXT, f"<img>{'<row>' * ROWS * len(tiles)}</img>", 1)
    ids = processor.tokenizer(text.replace("<row>", CONTEXT), return_tensors="pt")["input_ids"]
    return {"input_ids": ids} | ({"pixel_values": torch.cat([normalised(tiles) for tiles in cuts])} if cuts else {})


NVLM = {"architectures": ["NVLM_D"], "model_type": "NVLM_D", "template": "chatml", "use_msac": False}


def build_nvlm(seed, tie=False, text="qwen2", **vision):
    words = fast_tokenizer(["<|end|>", "<|vision_pad|>"], eos_token="<|end|>", pad_token="<|end|>")
    token = {"image_token_id": words.convert_tokens_to_ids("<|vision_pad|>")}
    model, processor = build(
        seed, tie, text, {**NVLM, **token, "llm_config": {"model_type": text, **text_config(words, tie)}}, **vision
    )
    return model, ComposedProcessor(tokenizer=words, config=model.config, preprocessor=processor.preprocessor)


def call_nvlm(processor, text, data):
    cuts = [tiles_of(image, processor.config["max_dynamic_patch"], False) for image in data.get("image", [])]
    for tiles in cuts:
        names = [*(f"<tile_{number}>" for number in range(1, len(tiles))), "<tile_global_thumbnail>"]
        rows = "".join(name + "<|vision_pad|>" * ROWS for name in names)
        text = text.replace("<image>", f"<Image>{rows}</Image>", 1)
    ids = processor.tokenizer(text, return_tensors="pt")["input_ids"]
    return {"input_ids": ids} | ({"pixel_values": torch.cat([normalised(tiles) for tiles in cuts])} if cuts else {})


def run(model, *args):
    return run_oracle(model.hub, *args)


def ask_always(text, data):
    return ask_llm(text, data) | {"mm_processor_kwargs": {"use_msac": True} if data else {}}


def row(name, build=build, placeholder=CONTEXT, **more):
    return Family(
        name,
        build,
        placeholders={"image": placeholder},
        sizes={"image": [(90, 130), (60, 60), (140, 70)]},
        grid={"image": IMAGE_SIZES},
        tensors=patches_in_squares(2, 14),
        run=run,
        load=load,
        silent={
            f"hub.model.vision_tower.encoder.layer.{i}.attention.k_proj.bias": "a key bias adds the same to all scores"
            for i in range(3)
        },
        **more,
    )


FAMILIES = [
    row(
        "h2ovl",
        call=call,
        variants={
            "tied": {"tie": True},
            "mistral": {"text": "mistral"},
            "one scale": {"config": {"use_msac": False}},
            "few tiles": {"config": {"max_dynamic_patch": 2}},
            "root mean square": {"norm_type": "rms_norm", "qk_normalization": True, "qkv_bias": False},
        },
    ),
    row("h2ovl_always_msac", call=partial(call, always=True), request=ask_always),
    row(
        "nvlm_d",
        build=build_nvlm,
        placeholder="<image>",
        call=call_nvlm,
        variants={
            "tied": {"tie": True},
            "root mean square": {"norm_type": "rms_norm", "qk_normalization": True, "qkv_bias": False},
        },
    ),
]
