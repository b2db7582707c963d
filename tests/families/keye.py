"""Keye-VL and Keye-VL-1.5 in the parity suite.

transformers has no class for them. The oracle is composed of its Qwen3 decoder and the tower of its PaddleOCR-VL, which was
derived from Keye's. Sources: the publisher's modelling and processing code of Keye-VL-8B-Preview, its `keye_vl_utils`, its
draft of a transformers class for 1.5, and vLLM's keye_vl1_5.py.
"""

import functools
import json
import math
from types import SimpleNamespace

import numpy as np
import torch
from family import FPS, Family
from oracle import SPECIALS, ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from safetensors.torch import load_file
from sensorium.mm.types import Media
from torch import nn
from torch.nn import functional as F

FRAME, FAST, FAST_END = "<|frame|>", "<|fast_start|>", "<|fast_end|>"
PATCH, LEAST, MOST = 14, 56 * 56, 140 * 140
SECTIONS = [2, 3, 3]
VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 70,
    "patch_size": PATCH, "spatial_merge_size": 2, "tokens_per_second": 2, "temporal_patch_size": 2,
}  # fmt: skip


class Rotary(nn.Module):
    """Qwen3's rotary positions, by sections of the frequencies: `positions` is int64 `[3, 1, length]`."""

    def __init__(self, plain):
        super().__init__()
        self.plain, self.positions = plain, None

    def forward(self, x, position_ids):
        axes = torch.repeat_interleave(torch.arange(3), torch.tensor(SECTIONS))
        places = position_ids.expand(3, -1)[axes] if self.positions is None else self.positions[axes, 0]
        angles = (places * self.plain.inv_freq[:, None]).T[None].repeat(1, 1, 2)
        return angles.cos(), angles.sin()


@functools.cache
def oracle_class():
    ensure_torchvision()
    import transformers as tf
    from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRVisionModel

    class Oracle(tf.Qwen3ForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.rotary_emb = Rotary(self.model.rotary_emb)
            self.newer = config.architectures == ["KeyeVL1_5ForConditionalGeneration"]
            vision = {key: value for key, value in config.vision_config.items() if key in VISION}
            self.visual = PaddleOCRVisionModel(tf.PaddleOCRVisionConfig(**vision, attn_implementation="eager"))
            wide = 4 * vision["hidden_size"]
            self.mlp_AR = nn.Module()
            self.mlp_AR.pre_norm = nn.LayerNorm(wide if self.newer else vision["hidden_size"], 1e-5)
            self.mlp_AR.linear_1, self.mlp_AR.linear_2 = nn.Linear(wide, wide), nn.Linear(wide, config.hidden_size)

        def encode(self, pixels, grids):
            tower, rows = self.visual.vision_model, []
            for part, grid in zip(pixels.split(grids.prod(-1).tolist()), grids, strict=True):
                t, h, w = grid.tolist()
                x = tower.embeddings(part[None], grid_thw=grid[None])
                places = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), -1)
                turn = tower.encoder.rotary_pos_emb(x, places.view(-1, 2).repeat(t, 1))
                for layer in tower.encoder.layers:
                    x = layer(x, cu_seqlens=torch.tensor([0, len(x)], dtype=torch.int32), position_embeddings=turn)
                x = tower.post_layernorm(x).view(t, h // 2, 2, w // 2, 2, -1).transpose(2, 3).reshape(t * h * w // 4, 4, -1)
                norm = self.mlp_AR.pre_norm
                x = norm(x.flatten(1)) if self.newer else norm(x).flatten(1)
                rows.append(self.mlp_AR.linear_2(F.gelu(self.mlp_AR.linear_1(x))))
            return torch.cat(rows)

        def forward(
            self, input_ids, position_ids=None, pixel_values=None, image_grid_thw=None, pixel_values_videos=None,
            video_grid_thw=None, **more,
        ):  # fmt: skip
            rows = self.get_input_embeddings()(input_ids)
            if pixel_values is not None:
                rows[input_ids == self.config.image_token_id] = self.encode(pixel_values, image_grid_thw)
            if pixel_values_videos is not None:
                rows[input_ids == self.config.video_token_id] = self.encode(pixel_values_videos, video_grid_thw)
            self.model.rotary_emb.positions = position_ids
            return super().forward(inputs_embeds=rows, **more)

    return Oracle


def rope_index(model, inputs):
    """Return the published positions: each image, video (Keye-VL) or frame (1.5) is a grid at the end of the text before it."""
    ids, c = inputs["input_ids"][0].tolist(), model.config
    grids = {
        c.image_token_id: iter(inputs.get("image_grid_thw", torch.empty(0, 3)).tolist()),
        c.video_token_id: iter(inputs.get("video_grid_thw", torch.empty(0, 3)).tolist()),
    }
    parts, token, start = [], 0, 0
    while token < len(ids):
        if ids[token] not in grids:
            parts.append(torch.full((3, 1), start))
            token, start = token + 1, start + 1
            continue
        t, h, w = next(grids[ids[token]])
        step = c.vision_config["tokens_per_second"] / FPS
        axes = torch.meshgrid((torch.arange(t) * step).long(), torch.arange(h // 2), torch.arange(w // 2), indexing="ij")
        parts.append(torch.stack(axes).flatten(1) + start)
        token, start = token + parts[-1].shape[1], int(parts[-1].max()) + 1
    return torch.cat(parts, 1)


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)


def build(seed, newer=False, tie=False):
    import transformers as tf

    words = fast_tokenizer((*SPECIALS, FRAME, FAST, FAST_END), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    config = tf.Qwen3Config(**text_config(words, tie, head_dim=16), attn_implementation="eager")
    config.vision_config = VISION
    config.image_token_id, config.video_token_id = words.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    config.architectures = ["KeyeVL1_5ForConditionalGeneration" if newer else "KeyeForConditionalGeneration"]
    model = oracle_class()(config).eval()
    randomise(model, seed)
    sharpen(model.visual)
    return model, Processor(tokenizer=words, newer=newer)


def finish(newer, folder):
    """Write config.json and preprocessor_config.json as they are published."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters")
    config |= {"architectures": ["KeyeVL1_5ForConditionalGeneration" if newer else "KeyeForConditionalGeneration"]}
    config |= {"model_type": "KeyeVL1_5" if newer else "Keye", "rope_theta": 1e4}
    config["rope_scaling"] = {"type": "mrope", "mrope_section": SECTIONS}
    (folder / "config.json").write_text(json.dumps(config))
    pixels = {"min_pixels": LEAST, "max_pixels": MOST, "patch_size": PATCH, "temporal_patch_size": 1, "merge_size": 2}
    values = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels | values))


def load(newer, folder):
    import transformers as tf

    said = json.loads((folder / "config.json").read_text())
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": said["rope_theta"]}, "rope_scaling": None}
    config = tf.Qwen3Config(**{**said, "model_type": "qwen3", **rope}, attn_implementation="eager")
    model = oracle_class()(config).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    model.tie_weights()
    return model, Processor(tokenizer=tf.PreTrainedTokenizerFast.from_pretrained(folder), newer=newer)


def patches(frames):
    """Return normalised patches `[patches, 3, 14, 14]` of uint8 `[frames, 3, h, w]`, row by row, and their grid."""
    t, _, h, w = frames.shape
    x = ((frames.float() / 255 - 0.5) / 0.5).unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))
    return x.permute(0, 2, 4, 1, 3, 5).flatten(0, 2), (t, h // PATCH, w // PATCH)


def image_patches(image, newer):
    from PIL import Image
    from transformers.models.paddleocr_vl.image_processing_paddleocr_vl import smart_resize

    tall, wide = smart_resize(image.height, image.width, 28, LEAST, MOST)
    resized = image.resize((wide, tall), Image.Resampling.BILINEAR if newer else Image.Resampling.BICUBIC)
    return patches(torch.from_numpy(np.array(resized)).permute(2, 0, 1)[None])


def resized(frames, most, mode):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    size = smart_resize(*frames.shape[2:], 28, LEAST, most)
    return F.interpolate(frames, size, mode=mode, antialias=True)


def types(count):
    return [0, 1, 1, 0, 1, 0, 0][:count] + [1] * max(0, count - 7)


def expand(processor, text, clips):
    """Return the text of 1.5 with the rows of each frame, and the patches and grids of all frames."""
    pixels, grids = [], []
    for clip in clips:
        frames, line = torch.from_numpy(clip).permute(0, 3, 1, 2), ""
        slow = resized(frames, MOST, "bilinear")
        rows = int(math.prod(slow.shape[2:]) / 784 * 0.3)
        fast = resized(frames, max(rows * 784, LEAST), "bilinear")
        for i, kind in enumerate(types(len(clip))):
            part, grid = patches((fast if kind else slow)[i : i + 1])
            pixels.append(part)
            grids.append(grid)
            held = "<held>" * (math.prod(grid) // 4)
            line += f"{FRAME}{np.float32(i / FPS):.1f}" + (f"{FAST}{held}{FAST_END}" if kind else held)
        text = text.replace("<|video_pad|>", line, 1)
    return text.replace("<held>", "<|video_pad|>"), pixels, grids


def call(processor, text, data):
    made = {}
    images = [image_patches(image, processor.newer) for image in data.get("image", ())]
    for _, grid in images:
        text = text.replace("<|image_pad|>", "<held>" * (math.prod(grid) // 4), 1)
    text = text.replace("<held>", "<|image_pad|>")
    if images:
        made["pixel_values"] = torch.cat([part for part, _ in images])
        made["image_grid_thw"] = torch.tensor([grid for _, grid in images])
    if "video" in data and processor.newer:
        text, pixels, grids = expand(processor, text, data["video"])
    elif "video" in data:
        clips = [resized(torch.from_numpy(clip).permute(0, 3, 1, 2), MOST, "bicubic") for clip in data["video"]]
        pixels, grids = zip(*(patches(clip) for clip in clips), strict=True)
        for grid in grids:
            text = text.replace("<|video_pad|>", "<held>" * (math.prod(grid) // 4), 1)
        text = text.replace("<held>", "<|video_pad|>")
    if "video" in data:
        made["pixel_values_videos"], made["video_grid_thw"] = torch.cat(list(pixels)), torch.tensor(grids)
    return {"input_ids": processor.tokenizer(text, return_tensors="pt")["input_ids"], **made}


def tensors(inputs, features):
    """Reorder the oracle's patches from rows into the squares that are merged, like ours."""
    for modality, suffix in (("image", ""), ("video", "_videos")):
        name, grid = f"pixel_values{suffix}", f"{modality}_grid_thw"
        items = sorted((one for one in features if one.modality == modality), key=lambda one: one.range.offset)
        if not items:
            continue
        mine = torch.cat([torch.as_tensor(one.kwargs[grid].data).view(-1, 3) for one in items])
        yield grid, mine, inputs[grid]
        squares = []
        for part, (t, h, w) in zip(inputs[name].split(mine.prod(-1).tolist()), mine.tolist(), strict=True):
            squares.append(part.view(t, h // 2, 2, w // 2, 2, -1).transpose(2, 3).reshape(t * h * w, -1))
        yield name, torch.cat([one.kwargs[name].data for one in items]), torch.cat(squares)


def ours(newer, modality, media):
    """Return a video with lower bounds than the published ones, of which the small oracle would need many rows."""
    if modality == "image":
        return media
    clip = (media, {"fps": FPS, "do_sample_frames": False})
    return Media(clip, min_pixels=LEAST, max_pixels=MOST, **({"frame_types": types(len(media))} if newer else {}))


def row(name, newer):
    return Family(
        name,
        functools.partial(build, newer=newer),
        placeholders={
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
            "video": "<|vision_start|><|video_pad|><|vision_end|>",
        },
        sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(2, 80, 100), (3, 150, 90), (5, 60, 60)]},
        refuses=lambda modality, size: max(size) > 200 * min(size) and min(size) >= 28,
        ours=functools.partial(ours, newer),
        call=call,
        tensors=tensors,
        oracle_positions=rope_index,
        finish=functools.partial(finish, newer),
        load=functools.partial(load, newer),
        variants={"tied": {"tie": True}},
    )


FAMILIES = [row("keye", False), row("keye_vl1_5", True)]
