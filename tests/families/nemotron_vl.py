"""Nemotron-Nano-VL in the parity suite, composed of transformers' RADIO and decoders, with the publisher's own pixels.

Its embedder is composed of transformers' SigLIP and Llama.

Sizes, tiles and texts follow vLLM's processor and, for dynamic resolution, transformers' of Nemotron-Omni.
"""

import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from embedder import Embedder
from family import FPS, IMAGE_SIZES, VIDEO_SIZES, Family, as_sampled
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from PIL import Image
from radio import ARGS, PATCH, VISION, load_with_radio, make_radio, reset_scales, stored
from safetensors.torch import load_file, save_file
from sensorium.processors.images import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from torch import nn
from torch.nn import functional as F

TILE, INNER, TOWER = 48, 80, "vision_model."
ROWS = (TILE // PATCH // 2) ** 2
LEAST, MOST = 36, 100
HYBRID = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M-*M", "num_hidden_layers": 4, "head_dim": 24, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24,
}  # fmt: skip


KEYS = "a key bias adds the same to all scores of a query"


class SquaredRelu(nn.Module):
    def forward(self, x):
        return F.relu(x) ** 2


class Composed(nn.Module):
    def __init__(self, config):
        super().__init__()
        import transformers as tf

        self.config, text, width = config, dict(config["llm_config"]), 4 * VISION["hidden_size"]
        self.hybrid = text["model_type"] == "nemotron_h"
        self.vision_model, act = make_radio(), SquaredRelu() if self.hybrid else nn.GELU()
        norm = nn.RMSNorm(width, eps=1e-5) if self.hybrid else nn.LayerNorm(width)
        bias, hidden = not self.hybrid, text["hidden_size"]
        self.mlp1 = nn.Sequential(norm, nn.Linear(width, INNER, bias), act, nn.Linear(INNER, hidden, bias))
        kind = tf.CONFIG_MAPPING[text.pop("model_type")]
        self.language_model = tf.AutoModelForCausalLM.from_config(kind(**text), attn_implementation="eager")

    def encode(self, view):
        """Encode `[3, height, width]`; squares of rows are joined as by transformers' class of the next version."""
        from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import NemotronH_Omni_Reasoning_V3 as Omni

        rows = self.vision_model(view[None]).features.view(1, view.shape[1] // PATCH, view.shape[2] // PATCH, -1)
        return self.mlp1(Omni.pixel_shuffle(None, rows).flatten(0, 2))

    def forward(self, input_ids, views=(), frame_texts=(), past_key_values=None, use_cache=True):
        embeds = self.language_model.get_input_embeddings()(input_ids)
        if views:
            parts = [self.encode(view) for view in views]
            for first, texts in frame_texts:
                parts[first : first + len(texts)] = self.prune(parts[first : first + len(texts)], views[first], texts)
            embeds[input_ids == self.config["img_context_token_id"]] = torch.cat(parts)
        return self.language_model(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=use_cache)

    def prune(self, frames, view, texts):
        """Return each frame's text, those of its rows that transformers' rule keeps, and the token after them."""
        from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import compute_retention_mask

        grid = (len(frames), view.shape[1] // (2 * PATCH), view.shape[2] // (2 * PATCH))
        rate = self.config["video_pruning_rate"]
        kept = compute_retention_mask(video_embeds=torch.cat(frames), thw=grid, spatial_merge_size=1, q=rate)
        words = [self.language_model.get_input_embeddings()(torch.tensor(text)) for text in texts]
        masks = kept.split([len(rows) for rows in frames])
        return [torch.cat((text[:-1], rows[mask], text[-1:])) for text, rows, mask in zip(words, frames, masks, strict=True)]

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.state_dict(), folder / "model.safetensors", {"format": "pt"})

    def state_dict(self, *args, **kwargs):
        """Return the tensors as published."""
        tensors = stored(super().state_dict(*args, **kwargs), TOWER)
        if self.hybrid:
            tensors = {name.replace("language_model.model.", "language_model.backbone."): one for name, one in tensors.items()}
        return {name: one.contiguous() for name, one in tensors.items()}


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)
        options = {"image_size": TILE, "max_num_tiles": 4, "norm_mean": OPENAI_CLIP_MEAN, "norm_std": OPENAI_CLIP_STD}
        options |= {"image_processor_type": "NemotronNanoVLV2ImageProcessor", "patch_size": PATCH, "use_thumbnail": True}
        (folder / "preprocessor_config.json").write_text(json.dumps(options))


def build(seed, name="NemotronH_Nano_VL_V2", args=None, video=None, pruned=0.0):
    words = fast_tokenizer(["<image>", "<video>", "<img>", "</img>", "<eos>"], eos_token="<eos>", pad_token="<eos>")
    text = HYBRID if name.endswith("V2") else {"model_type": "llama"}
    config = {
        "architectures": [name],
        "model_type": name,
        "downsample_ratio": 0.5,
        "force_image_size": TILE,
        "image_tag_type": "internvl",
        "img_context_token_id": words.convert_tokens_to_ids("<image>"),
        "llm_config": text_config(words, False, **text),
        "max_sequence_length": 4096,
        "patch_size": PATCH,
        "projector_hidden_size": INNER,
        "ps_version": "v2",
        "use_thumbnail": True,
        "vision_config": VISION | {"args": ARGS | (args or {})} | (video or {}),
        "video_pruning_rate": pruned,
        "vit_hidden_size": VISION["hidden_size"],
    }
    model = Composed(config).eval()
    randomise(model, seed)
    model.mlp1[0].weight.data.add_(1)
    reset_scales(model.vision_model)
    if not model.hybrid:  # squared ReLUs amplify the rounding of sharp attention beyond the tolerance, in transformers too
        sharpen(model.vision_model)
    for name, parameter in model.named_parameters():
        if name.endswith(".D"):  # near 0, the norm after it amplifies the rounding of small sums, in transformers too
            parameter.data.add_(1)
    return model, Processor(tokenizer=words, config=config)


def load(folder):
    ensure_torchvision()
    import transformers as tf

    config = json.loads((folder / "config.json").read_text())
    model, tensors = Composed(config), load_file(folder / "model.safetensors")
    own = {name.replace("language_model.backbone.", "language_model.model."): one for name, one in tensors.items()}
    load_with_radio(model, own, TOWER)
    return model.eval(), Processor(tokenizer=tf.PreTrainedTokenizerFast.from_pretrained(folder), config=config)


def resized(pixels, tall, wide):
    """Resize uint8 `[h, w, 3]` to uint8 `[3, tall, wide]`."""
    planes = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None]
    return F.interpolate(planes, size=(tall, wide), mode="bicubic", align_corners=False, antialias=True)[0]


def grids(most=4):
    every = [(wide, tall) for wide in range(1, most + 1) for tall in range(1, most + 1) if wide * tall <= most]
    return sorted(every, key=lambda grid: grid[0] * grid[1])


def nearest(wide, tall):
    best, least = (1, 1), float("inf")
    for grid in grids():
        distance = abs(wide / tall - grid[0] / grid[1])
        if distance < least or (distance == least and wide * tall > 0.5 * TILE * TILE * grid[0] * grid[1]):
            best, least = grid, distance
    return best


def closest(wide, tall):
    best, most = (1, 1), -1.0
    for grid in grids():
        ratio = grid[0] / grid[1]
        factor = min(grid[0] * grid[1] * TILE * TILE / (wide * tall), 0.6) * min(ratio * tall / wide, wide / tall / ratio)
        if factor > most:
            best, most = grid, factor
    return best


def tiles(image, choose, resize):
    columns, lines = choose(*image.size)
    whole = resize(image, TILE * lines, TILE * columns)
    cut = [whole[:, TILE * i : TILE * (i + 1), TILE * j : TILE * (j + 1)] for i in range(lines) for j in range(columns)]
    return cut if len(cut) == 1 else [*cut, resize(image, TILE, TILE)]


def by_pillow(image, tall, wide):
    return torch.from_numpy(np.array(image.resize((wide, tall), Image.Resampling.BICUBIC))).permute(2, 0, 1)


def at_own_size(image):
    from transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni import get_patch_grid_size

    tall, wide = get_patch_grid_size(image.height, image.width, PATCH, 2, LEAST, MOST)
    return [resized(image, tall * PATCH, wide * PATCH)]


def is_too_long(modality, size):
    """Return True for an image that would have no row of patches, for which the published rule divides by zero."""
    counts = [round(side / PATCH + 0.5) for side in size[-2:]]
    return modality == "image" and math.sqrt(MOST / math.prod(counts)) * min(counts) < 1 <= math.prod(counts) / MOST


def frame_size(height, width):
    from transformers.models.nemotron_h_omni import video_processing_nemotron_h_omni as omni

    asked = SimpleNamespace(video_target_num_patches=MOST, _downsample_factor=2, video_maintain_aspect_ratio=True)
    rule = omni.NemotronH_Omni_Reasoning_V3VideoProcessor._compute_target_patches
    wide, tall = rule(asked, height, width)
    return tall * PATCH, wide * PATCH


def call(processor, text, data):
    vision, views, frame_texts = processor.config["vision_config"], [], []
    rate, words = processor.config["video_pruning_rate"], processor.tokenizer
    cut = partial(tiles, choose=nearest, resize=resized)
    if "min_num_patches" in vision["args"]:
        cut = at_own_size
    elif not processor.config["architectures"][0].endswith("V2"):
        cut = partial(tiles, choose=closest, resize=by_pillow)
    images, videos = iter(data.get("image", ())), iter(data.get("video", ()))
    parts = text.replace("<video>", "<image>\0").split("<image>")
    for number, part in enumerate(parts[1:], 1):
        if part.startswith("\0"):
            frames = next(videos)
            tall, wide = frame_size(*frames.shape[1:3]) if "video_target_num_patches" in vision else (TILE, TILE)
            made = [resized(frame, tall, wide) for frame in frames]
            step = int(1000 / FPS)
            texts = [f"Frame {i + 1} sampled at {i * step / 1000:.2f} seconds: " for i in range(len(frames))]
        else:
            made, texts = cut(next(images)), [""]
        views += made
        if rate and part.startswith("\0"):
            texts = [words("\n" * (i > 0) + one + "<img></img>")["input_ids"] for i, one in enumerate(texts)]
            frame_texts.append((len(views) - len(made), texts))
            each = made[0].shape[1] * made[0].shape[2] // (2 * PATCH) ** 2
            count = sum(map(len, texts)) + max(each, int(each * len(made) * (1 - rate)))
            parts[number] = "<image>" * count + part.removeprefix("\0")
            continue
        rows = sum(view.shape[1] * view.shape[2] // (2 * PATCH) ** 2 for view in made) // len(texts)
        parts[number] = "\n".join(f"{one}<img>{'<image>' * rows}</img>" for one in texts) + part.removeprefix("\0")
    pieces = "".join(parts).split("<img>")
    ids = [processor.tokenizer(piece)["input_ids"] for piece in pieces]
    start = processor.tokenizer.convert_tokens_to_ids("<img>")
    joined = ids[0] + [token for piece in ids[1:] for token in (start, *piece)]
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    views = [(view / 255 - mean) / std for view in views]
    return {"input_ids": torch.tensor([joined]), "views": views, "frame_texts": frame_texts}


def tensors(inputs, features):
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    cut = []
    for view in inputs["views"]:
        squares = view.unflatten(2, (-1, 2, PATCH)).unflatten(1, (-1, 2, PATCH))  # [3, lines, 2, PATCH, columns, 2, PATCH]
        cut.append(squares.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * PATCH**2))
    if cut:
        yield "pixel_values", torch.cat([one.kwargs["pixel_values"].data for one in ordered]), torch.cat(cut)


def row(name, build, sizes=None, **more):
    both = {
        "placeholders": {"image": "<image>", "video": "<video>"},
        "sizes": {"image": [(90, 130), (60, 60), (140, 40)], "video": [(3, 80, 100), (2, 50, 90), (4, 60, 60)]},
        "grid": {"image": IMAGE_SIZES, "video": VIDEO_SIZES},
    }
    return Family(
        name,
        build,
        **both | more,
        ours=as_sampled,
        call=call,
        tensors=tensors,
        load=load,
        silent={f"{TOWER}encoder.layer.{i}.attention.k_proj.bias": KEYS for i in range(3)},
    )


SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "image_size": TILE, "patch_size": 12, "vision_use_head": False,
}  # fmt: skip


class EmbedderOracle(nn.Module):
    """SigLIP, squares of rows, two layers, and a Llama whose tokens all see each other, under the publisher's names."""

    def __init__(self, config):
        super().__init__()
        ensure_torchvision()
        import transformers as tf

        self.config, text = config, {**config["llm_config"], "model_type": "llama"}
        vision, wide = tf.SiglipVisionConfig(**config["vision_config"]), 4 * SIGLIP["hidden_size"]
        self.vision_model = tf.SiglipVisionModel._from_config(vision, attn_implementation="eager")
        hidden = text["hidden_size"]
        self.mlp1 = nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.language_model = tf.LlamaModel._from_config(tf.LlamaConfig(**text), attn_implementation="eager")

    def forward(self, input_ids, pixel_values=None):
        from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import NemotronH_Omni_Reasoning_V3 as Omni

        embeds = self.language_model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            rows, side = self.vision_model(pixel_values).last_hidden_state, TILE // 12
            squares = Omni.pixel_shuffle(None, rows.unflatten(1, (side, side)))
            embeds[input_ids == self.config["img_context_token_id"]] = self.mlp1(squares.flatten(0, 2))
        seen = torch.zeros(1, 1, *(2 * [input_ids.shape[1]]))
        hidden = self.language_model(inputs_embeds=embeds, attention_mask=seen).last_hidden_state[0]
        return F.normalize(hidden.mean(0), dim=-1)

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: one.contiguous() for name, one in self.state_dict().items()}, folder / "model.safetensors")


class TokenizerAlone(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)


def build_embedder(seed):
    words = fast_tokenizer(["<IMG_CONTEXT>", "<img>", "</img>", "<eos>"], eos_token="<eos>", pad_token="<eos>")
    config = {
        "architectures": ["LlamaNemotronVLModel"],
        "model_type": "llama_nemotron_vl",
        "downsample_ratio": 0.5,
        "force_image_size": TILE,
        "img_context_token_id": words.convert_tokens_to_ids("<IMG_CONTEXT>"),
        "llm_config": {**text_config(words, False), "model_type": "llama_bidirec", "pooling": "avg"},
        "max_dynamic_patch": 4,
        "vision_config": SIGLIP,
    }
    model = EmbedderOracle(config).eval()
    randomise(model, seed)
    sharpen(model.vision_model)
    return model, TokenizerAlone(tokenizer=words)


def load_embedder(folder):
    import transformers as tf

    model = EmbedderOracle(json.loads((folder / "config.json").read_text()))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval(), TokenizerAlone(tokenizer=tf.PreTrainedTokenizerFast.from_pretrained(folder))


def embedder_inputs(processor, item):
    if isinstance(item, str):
        return {"input_ids": processor.tokenizer(item, return_tensors="pt")["input_ids"]}
    views = torch.stack(tiles(item, closest, by_pillow)) / 255
    prompt = f"<img>{'<IMG_CONTEXT>' * (len(views) * (TILE // 24) ** 2)}</img>"
    return {"input_ids": processor.tokenizer(prompt, return_tensors="pt")["input_ids"], "pixel_values": (views - 0.5) / 0.5}


def embedder_tensors(given, features):
    squares = features[0].kwargs["pixel_values"].data.view(-1, 2, 2, 2, 2, 3, 12, 12).permute(0, 5, 1, 3, 6, 2, 4, 7)
    yield "pixel_values", squares.reshape(given["pixel_values"].shape), given["pixel_values"]


def count_rows(processor, given):
    return int((given["input_ids"] == processor.tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")).sum())


EMBEDDERS = [
    Embedder(
        "nemotron_embed",
        build_embedder,
        inputs=embedder_inputs,
        run=lambda model, given: model(**given),
        tensors=embedder_tensors,
        count=count_rows,
        score=lambda model, query, document: query @ document,
        load=load_embedder,
        layouts={
            "SigLIP's nested names": (
                lambda name: name.replace("vision_model.", "vision_model.vision_model."),
                lambda config: config,
            ),
        },
    )
]
DYNAMIC = {"args": {"min_num_patches": LEAST, "max_num_patches": MOST}, "video": {
    "video_target_num_patches": MOST, "video_maintain_aspect_ratio": True,
}}  # fmt: skip
FAMILIES = [
    row("nemotron_vl", build, fullest={"image": [(48, 48)]}, variants={"pruned": {"pruned": 0.6}}),
    row("nemotron_vl_dynamic", partial(build, **DYNAMIC), refuses=is_too_long, fullest={"image": [(40, 40)]}),
    row(
        "llama_nemotron_vl",
        partial(build, name="Llama_Nemotron_Nano_VL"),
        placeholders={"image": "<image>"},
        sizes={"image": [(90, 130), (60, 60), (140, 40)]},
        grid={"image": IMAGE_SIZES},
    ),
]
