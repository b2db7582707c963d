"""LLaVA-OneVision-2 in the parity suite. The oracle is composed anew: transformers has no class for it.

Sources: the publisher's classes and processors (EvolvingLMMs-Lab/LLaVA-OneVision-2 on GitHub).
"""

import json

import torch
from composed import ComposedModel, ComposedProcessor, load_composed, run_composed
from family import FPS, IMAGE_SIZES, VIDEO_SIZES, Family, as_sampled, is_sliver
from oracle import SPECIALS, ensure_torchvision, fast_tokenizer, randomise, text_config
from torch import nn
from torch.nn import functional as F

PATCH, MERGE, LEAST, MOST = 14, 2, 28 * 56, 140 * 140
PAD = "<|image_pad|>"
VISION = {
    "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_channels": 3,
    "patch_size": PATCH, "spatial_merge_size": MERGE, "layer_norm_eps": 1e-6, "layer_norm_type": "layer_norm",
    "hidden_act": "gelu", "rope_theta": 10000.0, "use_head": False, "frame_windows_size": 4,
}  # fmt: skip


def norm(c):
    return (nn.LayerNorm if c["layer_norm_type"] == "layer_norm" else nn.RMSNorm)(c["hidden_size"], c["layer_norm_eps"])


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, self.heads = c["hidden_size"], c["num_attention_heads"]
        self.layer_norm1, self.layer_norm2 = norm(c), norm(c)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.qkv, self.self_attn.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(width, c["intermediate_size"]), nn.Linear(c["intermediate_size"], width)

    def forward(self, x, angles, frames):
        q, k, v = self.self_attn.qkv(self.layer_norm1(x)).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)

        def turned(y):
            crossed = torch.stack((-y[..., 1::2], y[..., ::2]), -1).flatten(-2)
            return y * angles.cos() + crossed * angles.sin()

        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, frames[:, None] == frames)
        x = x + self.self_attn.proj(mixed.transpose(0, 1).flatten(1))
        return x + self.mlp.fc2(F.gelu(self.mlp.fc1(self.layer_norm2(x))))


class Tower(nn.Module):
    def __init__(self, c, out):
        super().__init__()
        width, wide = c["hidden_size"], c["hidden_size"] * MERGE**2
        self.embeddings, self.encoder, self.merger, self.c = nn.Module(), nn.Module(), nn.Module(), c
        self.embeddings.patch_embedding = nn.Conv2d(3, width, PATCH, PATCH, bias=False)
        self.layernorm_pre = norm(c)
        self.encoder.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        if c["use_head"]:
            self.layernorm_post = norm(c)
        self.merger.ln_q = nn.LayerNorm(width, c["layer_norm_eps"])
        self.merger.mlp = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, out))

    def forward(self, patches, positions):
        """`patches` of an item in squares; `positions [patches, 3]`: number of the frame, row and column."""
        half = self.c["hidden_size"] // self.c["num_attention_heads"] // 2
        sizes = half // 4, half * 3 // 8, half * 3 // 8
        parts = [axis[:, None] * 1e4 ** -(torch.arange(n) / n) for axis, n in zip(positions.float().T, sizes, strict=True)]
        angles, frames = torch.cat(parts, 1).repeat(1, 2), positions[:, 0]
        x = self.layernorm_pre(self.embeddings.patch_embedding(patches.view(-1, 3, PATCH, PATCH)).flatten(1))
        for layer in self.encoder.layers:
            x = layer(x, angles, frames)
        if self.c["use_head"]:
            x = self.layernorm_post(x)
        return self.merger.mlp(self.merger.ln_q(x).view(-1, self.merger.mlp[0].in_features))


class Oracle(ComposedModel):
    def __init__(self, config):
        super().__init__(config)
        ensure_torchvision()
        import transformers as tf

        text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
        moe = config["text_config"]["model_type"] == "qwen3_moe"
        kind, settings = (tf.Qwen3MoeForCausalLM, tf.Qwen3MoeConfig) if moe else (tf.Qwen3ForCausalLM, tf.Qwen3Config)
        decoder = kind(settings(**text, attn_implementation="eager")).eval()
        self.model = nn.Module()
        self.model.visual = Tower(config["vision_config"], text["hidden_size"])
        self.model.language_model, self.lm_head = decoder.model, decoder.lm_head
        self.decoders = [decoder]  # not a submodule

    def forward(self, input_ids, items=(), past_key_values=None):
        embeds = self.model.language_model.embed_tokens(input_ids)
        if items:
            rows = [self.model.visual(*item) for item in items]
            embeds[input_ids == self.config["image_token_id"]] = torch.cat(rows)
        return self.decoders[0](inputs_embeds=embeds, past_key_values=past_key_values, use_cache=True)


class Tied(Oracle):
    unsaved = ("lm_head.",)


def load(folder):
    tie = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    return load_composed(Tied if tie else Oracle, folder)


def build(seed, tie=False, experts=False, **vision):
    words = fast_tokenizer(SPECIALS, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    text = {"model_type": "qwen3_moe" if experts else "qwen3", **text_config(words, tie, head_dim=16)}
    if experts:
        text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    named = {"architectures": ["LlavaOnevision2ForConditionalGeneration"], "model_type": "llava_onevision2"}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    marks = words.convert_tokens_to_ids([PAD, "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
    ids = dict(zip(names, marks, strict=True))
    config = {**named, **ids, "text_config": text, "vision_config": {**VISION, **vision}, "tie_word_embeddings": tie}
    model = (Tied if tie else Oracle)(config).eval()
    randomise(model, seed)
    for name, p in model.named_parameters():
        if name.endswith("self_attn.qkv.weight"):
            p.data[:256] *= 3
    sizes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 1, "min_pixels": LEAST, "max_pixels": MOST}
    return model, ComposedProcessor(tokenizer=words, config=config, preprocessor=sizes)


def positions(numbers, h, w):
    """Return the number of the frame, row and column of each patch, in squares, and the order of the patches."""
    places = torch.stack(torch.meshgrid(torch.tensor(numbers), torch.arange(h), torch.arange(w), indexing="ij"), -1)
    return places.view(len(numbers), h // MERGE, MERGE, w // MERGE, MERGE, 3).transpose(2, 3).reshape(-1, 3)


def call(processor, text, data):
    """Expand the prompt and cut images and frames, each by transformers' processor of Qwen2-VL."""
    import transformers as tf

    settings = {key: value for key, value in processor.preprocessor.items() if "pixels" not in key}
    cut = tf.Qwen2VLImageProcessor(**settings, size={"shortest_edge": LEAST, "longest_edge": MOST})
    given = {name: iter(data.get(name, ())) for name in ("image", "video")}
    start, end, items, out = "<|vision_start|>", "<|vision_end|>", [], ""
    while text:
        found = min(((text.find(f"<|{name}_pad|>"), name) for name in given if f"<|{name}_pad|>" in text), default=None)
        if found is None:
            break
        place, name = found
        before, text = text[:place], text[place + len(PAD) :]
        value = next(given[name])
        frames = [value] if name == "image" else [frame.copy() for frame in value]
        made = cut(images=frames, return_tensors="pt")
        _, h, w = made["image_grid_thw"][0].tolist()
        items.append((made["pixel_values"], positions(list(range(len(frames))), h, w)))
        rows = PAD * (h * w // MERGE**2)
        if name == "video":
            before, text = before.removesuffix(start), text.removeprefix(end)
            rows = "".join(f"<{number / FPS:.1f} seconds>{start}{rows}{end}" for number in range(len(frames)))
        out += before + rows
    return {"input_ids": processor.tokenizer(out + text, return_tensors="pt")["input_ids"], "items": items}


def tensors(inputs, features):
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    for feature, (patches, places) in zip(ordered, inputs["items"], strict=True):
        is_video = feature.modality == "video"
        yield "pixels", feature.kwargs["pixel_values_videos" if is_video else "pixel_values"].data, patches
        t, h, w = feature.kwargs["video_grid_thw" if is_video else "image_grid_thw"].data.tolist()
        numbers = feature.kwargs["frame_numbers"].data.tolist() if is_video else [0]
        assert len(numbers) == t
        yield "positions", positions(numbers, h, w), places


FAMILY = Family(
    "llava_onevision2",
    build,
    placeholders={name: f"<|vision_start|><|{name}_pad|><|vision_end|>" for name in ("image", "video")},
    sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(6, 80, 100), (4, 56, 90), (3, 60, 60)]},
    grid={"image": [*IMAGE_SIZES, (2, 500)], "video": VIDEO_SIZES},
    refuses=is_sliver,
    ours=as_sampled,
    call=call,
    run=run_composed,
    tensors=tensors,
    oracle_positions=lambda model, inputs: None,
    load=load,
    variants={
        "tied": {"tie": True},
        "experts": {"experts": True},
        "RMSNorm, a last norm": {"layer_norm_type": "rms_norm", "use_head": True},
    },
)
