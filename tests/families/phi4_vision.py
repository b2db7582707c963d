"""Phi-4-reasoning-vision in the parity suite, composed of transformers' SigLIP 2 and Phi-3, with the publisher's own pixels."""

import json
from types import SimpleNamespace

import numpy as np
import torch
from family import Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

PATCH, LEAST, MOST = 8, 12, 60
TOWER = "model.vision_tower.vision_tower.vision_model."
NAMES = ((TOWER, "vision."), ("model.mm_projector.", "projector."), ("lm_head.", "text.lm_head."), ("model.", "text.model."))
KEYS = "a key bias adds the same to all scores of a query"
UNUSED = "the rows are those of the layer before"


class Composed(nn.Module):
    def __init__(self, config):
        super().__init__()
        ensure_torchvision()
        import transformers as tf

        self.config, hidden = config, config["hidden_size"]
        vision = tf.Siglip2VisionConfig(**config["vision_config"])
        self.vision = tf.Siglip2VisionModel._from_config(vision, attn_implementation="eager")
        self.projector = nn.Sequential(nn.Linear(config["mm_hidden_size"], hidden), nn.GELU(), nn.Linear(hidden, hidden))
        text = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "vision_config")}
        self.text = tf.Phi3ForCausalLM._from_config(tf.Phi3Config(**text), attn_implementation="eager")

    def forward(self, input_ids, images=(), past_key_values=None, use_cache=True):
        embeds = self.text.get_input_embeddings()(input_ids)
        if images:
            rows = [self.encode(*image) for image in images]
            embeds[input_ids == self.config["vocab_size"] - 1] = torch.cat(rows)
        return self.text(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=use_cache)

    def encode(self, patches, shape):
        mask = torch.ones(1, len(patches), dtype=torch.int32)
        given = {"pixel_values": patches[None], "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([shape])}
        return self.projector(self.vision(**given, output_hidden_states=True).hidden_states[-2][0])

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.state_dict(), folder / "model.safetensors", {"format": "pt"})

    def state_dict(self, *args, **kwargs):
        """Return the tensors as published."""
        held = super().state_dict(*args, **kwargs)
        if self.config["tie_word_embeddings"]:
            del held["text.lm_head.weight"]
        return {renamed(name, [(new, old) for old, new in NAMES]): one.contiguous() for name, one in held.items()}


def renamed(name, prefixes):
    return next(new + name.removeprefix(old) for old, new in prefixes if name.startswith(old))


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)
        limits = {"patch_size": PATCH, "min_num_patches": LEAST, "max_num_patches": MOST}
        (folder / "preprocessor_config.json").write_text(json.dumps(limits))


def build(seed, tie=False, head=False):
    words = fast_tokenizer(["<eos>"], eos_token="<eos>", pad_token="<eos>")
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = {
        **text_config(words, tie, vocab_size=len(words) + 3),
        "architectures": ["Phi4ForCausalLMV"],
        "model_type": "phi4-siglip",
        "mm_hidden_size": 48,
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_tower": "google/siglip2-so400m-patch16-naflex",
        "vision_config": {**shape, "num_patches": 36, "patch_size": PATCH, "vision_use_head": head},
    }
    model = Composed(config).eval()
    randomise(model, seed)
    sharpen(model.vision)
    return model, Processor(tokenizer=words, config=config)


def load(folder):
    import transformers as tf

    config = json.loads((folder / "config.json").read_text())
    model, tensors = Composed(config), load_file(folder / "model.safetensors")
    missing, unknown = nn.Module.load_state_dict(
        model, {renamed(name, NAMES): one for name, one in tensors.items()}, strict=False
    )
    assert missing == ["text.lm_head.weight"] * config["tie_word_embeddings"]
    assert not unknown
    return model.eval(), Processor(tokenizer=tf.PreTrainedTokenizerFast.from_pretrained(folder), config=config)


def call(processor, text, data):
    from transformers.models.siglip2 import image_processing_siglip2 as siglip2

    images, ids = [], list[int]()
    for image in data.get("image", ()):
        count = min(max(1, (image.width // PATCH) * (image.height // PATCH), LEAST), MOST)
        tall, wide = siglip2.get_image_size_for_max_num_patches(image.height, image.width, PATCH, count)
        pixels = np.array(image.resize((wide, tall), Image.Resampling.BILINEAR))
        planes = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - 0.5) / 0.5
        images.append((siglip2.convert_image_to_patches(planes, PATCH), (tall // PATCH, wide // PATCH)))
    for number, part in enumerate(text.split("<image>")):
        ids += [processor.config["vocab_size"] - 1] * (len(images[number - 1][0]) if number else 0)
        ids += processor.tokenizer(part)["input_ids"]
    return {"input_ids": torch.tensor([ids]), "images": images}


def tensors(inputs, features):
    """Compare patches; the oracle's hold their numbers pixel by pixel, ours channel by channel."""
    for feature, (patches, shape) in zip(sorted(features, key=lambda one: one.range.offset), inputs["images"], strict=True):
        assert feature.kwargs["grid"].data.tolist() == [1, *shape]
        theirs = patches.view(-1, PATCH, PATCH, 3).permute(0, 3, 1, 2).flatten(1)
        yield "pixel_values", feature.kwargs["pixel_values"].data, theirs


FAMILY = Family(
    "phi4_vision",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(70, 90), (20, 33), (40, 160)]},
    call=call,
    tensors=tensors,
    load=load,
    fullest={"image": [(48, 80)]},
    silent={
        **{f"vision.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(2)},
        **dict.fromkeys(("vision.encoder.layers.2.", "vision.post_layernorm."), UNUSED),
    },
    variants={"tied": {"tie": True}, "with a pooling head": {"head": True}},
    layouts={"without a nested name": [(TOWER, "model.vision_tower.vision_tower.")]},
)
