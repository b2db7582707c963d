"""Bee and R-4B in the parity suite.

transformers has no class for them; the oracle is its LLaVA-OneVision with Qwen3 and the projector of the published code.
"""

import functools
import json
from dataclasses import replace
from functools import partial

import torch
from family import IMAGE_SIZES, Family, call_processor
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from torch import nn

TILE, PATCH = 28, 7
GRIDS = [[TILE * rows, TILE * columns] for rows in range(1, 5) for columns in range(1, 5)]
VISION = {
    "model_type": "siglip_vision_model", "vision_use_head": False, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": TILE, "patch_size": PATCH,
}  # fmt: skip
CHOSEN = {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_3"}
SLIVERS = [(2, 100), (3, 200), (3, 100)]  # unpadding leaves nothing of their tiles


class Projector(nn.Module):
    def __init__(self, width, inner, hidden):
        super().__init__()
        self.pre_norm = nn.LayerNorm(width, eps=1e-6)
        self.linear_1, self.linear_2 = nn.Linear(width, inner), nn.Linear(inner, hidden)

    def forward(self, rows):
        return self.linear_2(nn.functional.gelu(self.linear_1(self.pre_norm(rows))))


@functools.cache
def oracle_class(expansion):
    ensure_torchvision()
    import transformers as tf

    class Bee(tf.LlavaOnevisionForConditionalGeneration):
        def __init__(self, config):
            super().__init__(config)
            hidden = config.text_config.hidden_size
            self.model.multi_modal_projector = Projector(config.vision_config.hidden_size, expansion * hidden, hidden)

    return Bee


def build(seed, tie=False, text="qwen3", layer=-1, most=3, expansion=4):
    kind = oracle_class(expansion)
    import transformers as tf

    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
    words = fast_tokenizer(specials, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>")
    config = tf.LlavaOnevisionConfig(
        vision_config=VISION,
        text_config={"model_type": text, **text_config(words, tie), **({"head_dim": 16} if text == "qwen3" else {})},
        image_token_index=words.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=GRIDS,
        tie_word_embeddings=tie,
        vision_aspect_ratio=f"anyres_max_{most}",
        vision_feature_layer=layer,
        vision_feature_select_strategy="full",
    )
    model = kind(config).eval()
    randomise(model, seed)
    sharpen(model.model.vision_tower)
    size = {"height": TILE, "width": TILE}
    images = tf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=GRIDS)
    videos = tf.LlavaOnevisionVideoProcessor(size=size)
    aspect = {"vision_aspect_ratio": f"anyres_max_{most}"}
    return model, tf.LlavaOnevisionProcessor(images, words, videos, num_image_tokens=16, **aspect)


def finish(folder, name="Bee"):
    """Write the architecture, and the options of the processor that transformers reads."""
    config = json.loads((folder / "config.json").read_text())
    named = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": name}
    (folder / "config.json").write_text(json.dumps(config | named))
    chosen = CHOSEN | {"vision_aspect_ratio": config["vision_aspect_ratio"]}
    (folder / "processor_config.json").write_text(json.dumps(chosen))


def load(folder, expansion=4):
    kind = oracle_class(expansion)
    import transformers as tf

    known = json.loads((folder / "config.json").read_text())
    config = tf.LlavaOnevisionConfig.from_dict({**known, "model_type": "llava_onevision"})
    model = kind.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), tf.LlavaOnevisionProcessor.from_pretrained(folder)


def call(processor, text, data):
    """Call the processor with the images of the prompt in a list of their own, as `apply_chat_template` does."""
    return call_processor(processor, text, {"image": [data["image"]]} if data else {})


def tensors(inputs, features):
    for feature, theirs in zip(features, inputs["pixel_values"], strict=True):
        tiles, h, w = feature.kwargs["grid"].data.tolist()
        cut = feature.kwargs["pixel_values"].data.view(tiles, h, w, 3, PATCH, PATCH)
        ours = cut.permute(0, 3, 1, 4, 2, 5).reshape(tiles, 3, h * PATCH, w * PATCH)
        yield "pixel_values", ours, theirs.view(-1, *ours.shape[1:])[:tiles]


BEE = Family(
    "bee",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(90, 130), (60, 60), (40, 170)]},
    grid={"image": IMAGE_SIZES},
    call=call,
    tensors=tensors,
    finish=finish,
    load=load,
    fullest={"image": SLIVERS},
    fullest_items=1,  # several images are not tiled
    silent={
        "model.vision_tower.post_layernorm": "the tower's last hidden states are not used",
        **{
            f"model.vision_tower.encoder.layers.{i}.self_attn.k_proj.bias": "a key bias adds the same to all scores of a query"
            for i in range(4)
        },
    },
    variants={"tied": {"tie": True}, "qwen2 and another layer": {"text": "qwen2", "layer": -2}, "more rows": {"most": 9}},
    layouts={
        "older transformers": [
            ("model.vision_tower.", "vision_tower."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
            ("model.image_newline", "image_newline"),
            ("model.language_model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
        ],
    },
)
R = replace(
    BEE,
    name="r_4b",
    build=partial(build, expansion=1),
    finish=partial(finish, name="R"),
    load=partial(load, expansion=1),
    variants={"tied": {"tie": True}},
)
FAMILIES = [BEE, R]
