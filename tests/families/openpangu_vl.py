"""openPangu-VL in the parity suite: transformers' tower of Qwen2.5-VL and Llama, with the parts of the published code.

Sources: the publisher's processors, vLLM's openpangu_vl.py.
"""

import json

import torch
from composed import ComposedModel, ComposedProcessor, load_composed
from family import IMAGE_SIZES, VIDEO_SIZES, Family, as_sampled, is_sliver
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from PIL import Image
from torch import nn
from torch.nn import functional as F

START, IMAGE, END, VIDEO = "[unused18]", "[unused19]", "[unused20]", "[unused32]"
VISION = {
    "depth": 5, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "hidden_act": "gelu", "patch_size": 14,
    "out_hidden_size": 48, "window_size": 56, "fullatt_block_indexes": [1, 4], "in_chans": 3, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip
FRAMES = {
    "any_res_min_frame_pixels": 56 * 56, "any_res_max_frame_pixels": 112 * 112, "any_res_min_video_total_pixels": 5 * 70 * 70,
    "any_res_max_video_total_pixels": 6 * 84 * 84, "size": {"height": 448, "width": 448},
}  # fmt: skip
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"])
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"])

    def forward(self, x):
        return self.down_proj(F.gelu(self.up_proj(x)))


class Merger(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = 4 * c["hidden_size"]
        self.ln_q = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, c["out_hidden_size"]))

    def forward(self, x):
        return self.mlp(self.ln_q(x).view(-1, 4 * x.shape[1]))


class Tower(nn.Module):
    """The tower of Qwen2.5-VL with a merger that adds the merged rows of several states."""

    def __init__(self, c, out):
        super().__init__()
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

        config = Qwen2_5_VLVisionConfig(**c, in_channels=3, attn_implementation="eager")
        tower = Qwen2_5_VisionTransformerPretrainedModel(config)
        self.patch_embed, self.blocks = tower.patch_embed, tower.blocks
        if c["hidden_act"] == "gelu":
            for block in self.blocks:
                block.mlp = Mlp(c)
        self.layers = sorted({c["depth"] + number for number in c.get("mm_unit_vision_select_layer", (-1, -3))}, reverse=True)
        self.final_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.merger = nn.ModuleList(Merger(c) for _ in self.layers)
        self.vision_projection = nn.ModuleDict({"fc1": nn.Linear(c["out_hidden_size"], out)})
        self.states = []
        for block in self.blocks:
            block.register_forward_hook(lambda *given: self.states.append(given[2]))
        tower.merger = nn.Identity()
        tower.merger.forward = self.join
        self.whole = (tower,)  # in a tuple: its tensors are named above

    def join(self, last):
        return sum(part(self.final_layernorm(self.states[layer])) for part, layer in zip(self.merger, self.layers, strict=True))

    def forward(self, pixels, grid):
        self.states.clear()
        repeated = pixels.view(len(pixels), 3, 1, -1).expand(-1, -1, 2, -1).flatten(1)
        rows = self.whole[0](repeated, grid_thw=grid).pooler_output
        return self.vision_projection["fc1"](F.silu(rows))


class Turns(nn.Module):
    """Rotary positions whose frequencies belong to time, height and width, as evenly mixed as their numbers allow."""

    def __init__(self, sections, dim, theta):
        super().__init__()
        time, *others = sections
        counts, axes = [time - 1, *others], []
        for _ in range(sum(counts)):
            shares = [(axes.count(axis) / count, axis) for axis, count in enumerate(counts) if axes.count(axis) < count]
            fresh = [share for share in shares if not axes or share[1] != axes[-1]]
            axes.append(min(fresh or shares)[1])
        self.axes, self.dim, self.theta = [*axes, 0], dim, theta

    def forward(self, x, position_ids):
        angles = self.positions[self.axes].T.float() * self.theta ** -(torch.arange(0, self.dim, 2) / self.dim)
        both = torch.cat([angles, angles], -1)[None]
        return both.cos(), both.sin()


class Oracle(ComposedModel):
    def __init__(self, config):
        super().__init__(config)
        ensure_torchvision()
        import transformers as tf

        c = config["text_config"]
        text = tf.LlamaConfig(
            **{name: value for name, value in c.items() if name not in ("rope_scaling", "bias", "model_type")}
        )
        text.attention_bias = c["bias"]
        text._attn_implementation = "eager"
        self.model = nn.ModuleDict({"visual": Tower(config["vision_config"], c["hidden_size"])})
        decoder = tf.LlamaForCausalLM(text).eval()
        decoder.model.rotary_emb = Turns(c["rope_scaling"]["mrope_section"], c["head_dim"], c["rope_theta"])
        self.model["language_model"], self.lm_head, self.decoder = decoder.model, decoder.lm_head, (decoder,)

    def forward(self, input_ids, positions, past_key_values=None, **media):
        decoder = self.decoder[0]
        decoder.model.rotary_emb.positions = positions
        embeds = decoder.get_input_embeddings()(input_ids)
        for name, pixels, grid in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            if pixels in media:
                embeds[input_ids == self.config[f"{name}_token_id"]] = self.model["visual"](media[pixels], media[grid])
        return decoder(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=True)


class Tied(Oracle):
    unsaved = ("lm_head.",)


def oracle(config):
    return Tied if config["text_config"]["tie_word_embeddings"] else Oracle


def load(folder):
    return load_composed(oracle(json.loads((folder / "config.json").read_text())), folder)


def build(seed, tie=False, act="gelu", chosen=(-1, -3), sections=(4, 2, 2)):
    words = fast_tokenizer(("<s>", "</s>", START, IMAGE, END, VIDEO), bos_token="<s>", eos_token="</s>", pad_token="</s>")
    rope = {"type": "default", "mrope_section": list(sections), "mrope_interleaved": True}
    text = text_config(words, tie, head_dim=16, bias=True, rope_theta=10000.0, rope_scaling=rope, rms_norm_eps=1e-5)
    named = {"architectures": ["OpenPanguVLForConditionalGeneration"], "model_type": "openpangu_vl"}
    ids = {f"{name}_token_id": words.convert_tokens_to_ids(token) for name, token in (("image", IMAGE), ("video", VIDEO))}
    vision = VISION | {"hidden_act": act, "mm_unit_vision_select_layer": list(chosen)}
    config = {**named, **ids, "tie_word_embeddings": tie, "text_config": text, "vision_config": vision}
    model = oracle(config)(config).eval()
    randomise(model, seed)
    for name, p in model.named_parameters():
        if name.startswith("model.visual") and "qkv.weight" in name:
            p.data[:128] *= 3  # queries and keys
    return model, ComposedProcessor(tokenizer=words, config=config, preprocessor={"size": SIZE})


def finish(folder):
    (folder / "video_preprocessor_config.json").write_text(json.dumps(FRAMES))


def enlarge(height, width):
    """Return the size of an image before the rule of Qwen2-VL."""
    if min(height, width) > 28:
        return height, width
    if width >= height:
        return 56, int(56 * 1.0 / height * width)
    return int(56 * 1.0 / width * height), 56


def call(processor, text, data):
    import transformers as tf

    image_processor = tf.Qwen2VLImageProcessor(temporal_patch_size=1)
    words, inputs = processor.tokenizer, {}
    for name, token, pixels, grid in (
        ("image", IMAGE, "pixel_values", "image_grid_thw"),
        ("video", VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        parts, grids = [], []
        for media in data.get(name, ()):
            if name == "image":
                height, width = enlarge(media.height, media.width)
                frames, size = [media if (width, height) == media.size else media.resize((width, height))], SIZE
            else:
                frames = [Image.fromarray(frame) for frame in media]
                least, most = (
                    max(min(FRAMES[f"any_res_{bound}_video_total_pixels"] // len(frames), 112 * 112), 56 * 56)
                    for bound in ("min", "max")
                )
                size = {"shortest_edge": least, "longest_edge": most}
            for frame in frames:
                one = image_processor(frame, size=size, return_tensors="pt")
                parts.append(one["pixel_values"])
            _, h, w = one["image_grid_thw"][0].tolist()
            grids.append((len(frames), h, w))
            rows = "#" * (h * w // 4)
            text = text.replace(token, (END + START).join([rows] * len(frames)), 1)
        if grids:
            text = text.replace("#", token)
            inputs |= {pixels: torch.cat(parts), grid: torch.tensor(grids)}
    return {"input_ids": words(text, return_tensors="pt")["input_ids"], **inputs}


def positions(model, inputs):
    """Return positions `[3, prompt]`: a frame starts after the text before it, and ends with its longer side."""
    ids, config = inputs["input_ids"][0].tolist(), model.config
    frames = {
        config[f"{name}_token_id"]: [(h // 2, w // 2) for t, h, w in inputs.get(f"{name}_grid_thw", []) for _ in range(t)]
        for name in ("image", "video")
    }
    columns, now = [], 0
    while len(columns) < len(ids):
        if waiting := frames.get(ids[len(columns)]):
            h, w = (int(side) for side in waiting.pop(0))
            columns += [(now, now + i, now + j) for i in range(h) for j in range(w)]
            now += max(h, w)
        else:
            columns.append((now, now, now))
            now += 1
    return torch.tensor(columns).T


def run(model, inputs, answer, places):
    count = inputs["input_ids"].shape[1]
    with torch.inference_mode():
        first = model(**inputs, positions=places[:, :count])
        if len(answer) < 2:
            return first.logits[0].float()
        tail = places[:, count : count + len(answer) - 1]
        rest = model(torch.tensor([answer[:-1]]), tail, past_key_values=first.past_key_values)
    return torch.cat([first.logits[0], rest.logits[0]]).float()


FAMILY = Family(
    "openpangu_vl",
    build,
    placeholders={"image": START + IMAGE + END, "video": START + VIDEO + END},
    sizes={"image": [(90, 130), (60, 60), (140, 70)], "video": [(6, 80, 100), (4, 56, 90), (3, 60, 60)]},
    grid={"image": [*IMAGE_SIZES, (2, 500), (20, 27), (28, 31)], "video": VIDEO_SIZES},
    refuses=lambda modality, size: is_sliver(modality, enlarge(*size) if modality == "image" else size),
    ours=as_sampled,
    call=call,
    run=run,
    finish=finish,
    load=load,
    oracle_positions=positions,
    variants={
        "tied": {"tie": True},
        "gated, one state before the last layer": {"act": "silu", "chosen": (-2,)},
        "three states, other sections": {"chosen": (-4, -2, -1), "sections": (3, 3, 2)},
    },
)
