"""Step3-VL-10B in the parity suite, composed of transformers' Qwen3 and the publisher's encoder; Step3 in torch; Step-3.7.

Source: vLLM's step_vl.py (encoder of Step3-VL-10B), step3_vl.py (Step3's encoder, processing) and step3_text.py, which are the
publisher's.
"""

import functools
import json
from types import SimpleNamespace

import torch
from composed import ComposedModel, ComposedProcessor, load_composed
from family import Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

SPECIALS = ("<im_patch>", "<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>", "<eos>")
SIDE, WINDOW, LONGEST, PATCH = 112, 56, 336, 14
VISION = {
    "model_type": "perception_encoder", "width": 32, "layers": 3, "heads": 2, "mlp_ratio": 2.5, "image_size": SIDE,
    "patch_size": PATCH, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "ls_init_value": 0.1, "use_cls_token": False,
    "use_ln_pre": True, "use_ln_post": False, "use_abs_posemb": True, "use_rope2d": True, "output_dim": None,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, inner = c["width"], int(c["width"] * c["mlp_ratio"])
        self.heads = c["heads"]
        self.ln_1, self.ln_2 = nn.LayerNorm(width, 1e-5), nn.LayerNorm(width, 1e-5)
        self.attn, self.mlp, self.ls_1, self.ls_2 = (nn.Module() for _ in range(4))
        self.attn.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.attn.in_proj_bias, self.attn.out_proj = nn.Parameter(torch.empty(3 * width)), nn.Linear(width, width)
        self.mlp.c_fc, self.mlp.c_proj = nn.Linear(width, inner), nn.Linear(inner, width)
        self.scaled = c["ls_init_value"] is not None
        if self.scaled:
            self.ls_1.gamma, self.ls_2.gamma = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x, angles):
        qkv = F.linear(self.ln_1(x), self.attn.in_proj_weight, self.attn.in_proj_bias)
        q, k, v = qkv.view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)

        def turned(y):
            pairs = torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2)
            return y * angles.cos() + pairs * angles.sin()

        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v).transpose(0, 1).flatten(1)
        first, second = (self.ls_1.gamma, self.ls_2.gamma) if self.scaled else (1, 1)
        x = x + self.attn.out_proj(mixed) * first
        y = self.mlp.c_fc(self.ln_2(x))
        return x + self.mlp.c_proj(y * torch.sigmoid(1.702 * y)) * second


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, self.side = c["width"], c["image_size"] // PATCH
        self.dim, self.token = width // c["heads"], c["use_cls_token"]
        self.conv1 = nn.Conv2d(3, width, PATCH, PATCH, bias=False)
        self.positional_embedding = nn.Parameter(torch.empty(self.side**2 + self.token, width))
        if self.token:
            self.class_embedding = nn.Parameter(torch.empty(width))
        self.ln_pre = nn.LayerNorm(width, 1e-5) if c["use_ln_pre"] else nn.Identity()
        self.ln_post = nn.LayerNorm(width, 1e-5) if c["use_ln_post"] else nn.Identity()
        self.transformer = nn.Module()
        self.transformer.resblocks = nn.ModuleList(Block(c) for _ in range(c["layers"]))
        self.vit_downsampler1 = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.vit_downsampler2 = nn.Conv2d(2 * width, 4 * width, 3, 2, 1)

    def forward(self, pixels):
        """Encode one view `[3, side, side]`."""
        side = pixels.shape[-1] // PATCH
        first, table = self.positional_embedding.split([int(self.token), self.side**2])
        planes = table.T.view(1, -1, self.side, self.side)
        table = F.interpolate(planes, (side, side), mode="bilinear")[0].flatten(1).T
        x = self.conv1(pixels[None])[0].flatten(1).T + table
        places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).flip(-1).view(-1, 2)
        inverse = 1e4 ** -(torch.arange(0, self.dim // 2, 2) / (self.dim // 2))
        angles = ((places + int(self.token))[..., None] * inverse).flatten(1).repeat_interleave(2, 1)
        if self.token:
            x = torch.cat([self.class_embedding + first, x])
            angles = torch.cat([angles.new_zeros(1, self.dim), angles])
        x = self.ln_pre(x)
        for block in self.transformer.resblocks:
            x = block(x, angles)
        x = self.ln_post(x)[int(self.token) :].T.view(1, -1, side, side)
        return self.vit_downsampler2(self.vit_downsampler1(x))[0].flatten(1).T


@functools.cache
def oracle_class():
    import transformers as tf

    class Oracle(tf.Qwen3ForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.vision_model = Encoder(config.vision_config)
            self.vit_large_projector = nn.Linear(4 * config.vision_config["width"], config.hidden_size, config.projector_bias)

        def forward(self, input_ids, views=(), **more):
            rows = self.get_input_embeddings()(input_ids)
            if views:
                encoded = torch.cat([self.vision_model(view) for view in views])
                rows[input_ids == self.config.image_token_id] = self.vit_large_projector(encoded)
            return super().forward(inputs_embeds=rows, **more)

    return Oracle


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)


def build(seed, tie=False, bias=False, **vision):
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<eos>", pad_token="<eos>")
    config = tf.Qwen3Config(**text_config(words, tie, head_dim=16), attn_implementation="eager")
    config.vision_config, config.projector_bias = VISION | vision, bias
    config.image_token_id = words.convert_tokens_to_ids("<im_patch>")
    model = oracle_class()(config).eval()
    randomise(model, seed)
    for name, parameter in model.vision_model.named_parameters():
        if ".gamma" in name or ("ln_" in name and name.endswith("weight")):
            parameter.data.add_(1)
        elif "in_proj_weight" in name:
            parameter.data[: 2 * config.vision_config["width"]].mul_(3)
    return model, Processor(tokenizer=words)


def finish(folder):
    """Write config.json with a text section, as published, and the sizes of the small views."""
    text = json.loads((folder / "config.json").read_text())
    outer = {key: text.pop(key) for key in ("vision_config", "projector_bias", "image_token_id")}
    config = {"architectures": ["StepVLForConditionalGeneration"], "model_type": "step_robotics", "text_config": text, **outer}
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"size": {"height": SIDE, "width": SIDE}, "patch_size": WINDOW, "max_image_size": LONGEST}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))


def load(folder):
    import transformers as tf

    said = json.loads((folder / "config.json").read_text())
    config = tf.Qwen3Config(**said["text_config"], attn_implementation="eager")
    config.vision_config, config.projector_bias = said["vision_config"], said["projector_bias"]
    config.image_token_id = said["image_token_id"]
    model = oracle_class()(config).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    model.tie_weights()
    return model, Processor(tokenizer=tf.PreTrainedTokenizerFast.from_pretrained(folder))


def whole_windows(side, window):
    ratio = side / window
    if ratio < 1:
        return side
    return window * (int(ratio) + 1 if ratio - side // window > 0.2 else int(ratio))


def cut(image, side=SIDE, size=WINDOW):
    """Return the windows and the whole image, and the windows per line, as the published patcher does."""
    long, short = max(image.size), min(image.size)
    if short < 32 and long / short > 4:
        square = Image.new("RGB", (long, long))
        square.paste(image)
        image = square
    if max(image.size) > LONGEST:
        scale = LONGEST / max(image.size)
        image = image.resize([int(side * scale) for side in image.size], Image.Resampling.BILINEAR)
    long, short = max(image.size), min(image.size)
    window = min(short, size) if long / short > 4 else size
    if long < side:
        window = short if long / short > 1.5 else 0
    if not window:
        return [image], 0
    wide, tall = (whole_windows(side, window) for side in image.size)
    resized, columns = image.resize((wide, tall), Image.Resampling.BILINEAR), max(1, wide // window)
    corners = [(x, y) for y in range(0, max(tall, 1), window) for x in range(0, columns * window, window)]
    return [*(resized.crop((x, y, x + window, y + window)) for x, y in corners), image], columns


def call(processor, text, data, whole=SIDE, window=WINDOW):
    ensure_torchvision()
    from torchvision.transforms.functional import InterpolationMode, normalize, resize, to_tensor

    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    all_views = []
    for image in data.get("image", ()):
        views, columns = cut(image, whole, window)
        line = ""
        for number, view in enumerate(views, 1):
            last = number == len(views)
            side = whole if last else window
            pixels = normalize(to_tensor(view), mean, std)
            all_views.append(resize(pixels, [side, side], InterpolationMode.BILINEAR, antialias=True))
            held = "<held>" * (side // PATCH // 4) ** 2
            if last:
                line += f"<im_start>{held}<im_end>"
            else:
                line += f"<patch_start>{held}<patch_end>"
                line += "<patch_newline>" if number % columns == 0 and number < len(views) - 1 else ""
        text = text.replace("<im_patch>", line, 1)
    ids = processor.tokenizer(text.replace("<held>", "<im_patch>"), return_tensors="pt")["input_ids"]
    return {"input_ids": ids} | ({"views": all_views} if all_views else {})


def tensors(inputs, features):
    ordered = sorted(features, key=lambda feature: feature.range.offset)
    patches, start = torch.cat([feature.kwargs["pixel_values"].data for feature in ordered]), 0
    for view in inputs["views"]:
        side = view.shape[-1] // PATCH
        mine = patches[start : start + side**2].view(side, side, 3, PATCH, PATCH).permute(2, 0, 3, 1, 4)
        yield "pixel_values", mine.reshape(view.shape), view
        start += side**2
    assert start == len(patches)


STEP3_SIDE, STEP3_WINDOW = 168, 112
STEP3_VISION = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48, "output_hidden_size": 40,
    "image_size": STEP3_SIDE, "patch_size": PATCH, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
STEP3_TEXT = {
    "model_type": "step3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_attention_groups": 1, "head_dim": 16, "share_q_dim": 24, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "moe_num_experts": 6, "moe_top_k": 2, "moe_intermediate_size": 40, "share_expert_dim": 48, "moe_layers_enum": "1,2",
    "max_position_embedding": 4096,
}  # fmt: skip


class Module(nn.Module):
    """A module of these parts."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def gated(x, mlp):
    return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def linear(inner, outer):
    return nn.Linear(inner, outer, bias=False)


def gated_parts(width, inner):
    return {"gate_proj": linear(width, inner), "up_proj": linear(width, inner), "down_proj": linear(inner, width)}


def stacked(count, *shape):
    return Module(weight=nn.Parameter(torch.empty(count, *shape)))


class Step3Layer(nn.Module):
    def __init__(self, c, number):
        super().__init__()
        width, dim, latent = c["hidden_size"], c["head_dim"], c["share_q_dim"] or c["head_dim"]
        self.c, heads, inner = c, c["num_attention_heads"], c["moe_intermediate_size"]
        norm = functools.partial(nn.RMSNorm, eps=c["rms_norm_eps"])
        self.input_layernorm, self.post_attention_layernorm = norm(width), norm(width)
        queries = {"q_proj": linear(width, latent), "inter_norm": norm(latent), "wq": linear(latent, heads * dim)}
        keys = {"k_proj": linear(width, dim), "v_proj": linear(width, dim)}
        self.self_attn = Module(**queries, **keys, o_proj=linear(heads * dim, width))
        listed = c["moe_layers_enum"]
        self.sparse = number > 0 if listed is None else str(number) in listed.split(",")
        if self.sparse:
            count = c["moe_num_experts"]
            first = {name: stacked(count, inner, width) for name in ("gate_proj", "up_proj")}
            self.moe = Module(gate=linear(width, count), **first, down_proj=stacked(count, width, inner))
            self.share_expert = Module(**gated_parts(width, c["share_expert_dim"]))
        else:
            self.mlp = Module(**gated_parts(width, c["intermediate_size"]))

    def forward(self, x):
        x = x + self.attend(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + (self.mix(y) + gated(y, self.share_expert) if self.sparse else gated(y, self.mlp))

    def attend(self, x):
        a, dim, length = self.self_attn, self.c["head_dim"], len(x)
        q = a.wq(a.inter_norm(a.q_proj(x))).view(length, -1, dim).transpose(0, 1)
        k, v = a.k_proj(x)[None], a.v_proj(x)[None]
        inverse = self.c["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        angles = (torch.arange(length)[:, None] * inverse).repeat(1, 2)

        def turned(y):
            half = torch.cat((-y[..., dim // 2 :], y[..., : dim // 2]), -1)
            return y * angles.cos() + half * angles.sin()

        every = [one.expand(len(q), -1, -1) for one in (turned(k), v)]
        mixed = F.scaled_dot_product_attention(turned(q), *every, is_causal=True)
        return a.o_proj(mixed.transpose(0, 1).flatten(1))

    def mix(self, x):
        shares = self.moe.gate(x).softmax(-1)
        shares, chosen = shares.topk(self.c["moe_top_k"], -1)
        if self.c.get("norm_expert_weight"):
            shares = shares / shares.sum(-1, keepdim=True)
        gates, ups, downs = (self.moe.get_submodule(f"{name}_proj").weight[chosen] for name in ("gate", "up", "down"))
        inner = F.silu(gates @ x[:, None, :, None]) * (ups @ x[:, None, :, None])
        return ((downs @ inner)[..., 0] * shares[..., None]).sum(1)


class Step3Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = c["hidden_size"]
        self.heads = c["num_attention_heads"]
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(width, c["layer_norm_eps"]) for _ in range(2))
        self.self_attn = Module(qkv_proj=nn.Linear(width, 3 * width), out_proj=nn.Linear(width, width))
        self.mlp = Module(fc1=nn.Linear(width, c["intermediate_size"]), fc2=nn.Linear(c["intermediate_size"], width))

    def forward(self, x):
        q, k, v = self.self_attn.qkv_proj(x).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x = x + self.layer_norm1(self.self_attn.out_proj(mixed))
        y = self.mlp.fc1(x)
        return x + self.layer_norm2(self.mlp.fc2(y * torch.sigmoid(1.702 * y)))


class Step3(ComposedModel):
    """The whole model without a cache."""

    def __init__(self, config):
        super().__init__(config)
        text, vision = config["text_config"], config["vision_config"]
        width, tower, out = text["hidden_size"], vision["hidden_size"], vision["output_hidden_size"]
        layers = nn.ModuleList(Step3Layer(text, number) for number in range(text["num_hidden_layers"]))
        norm = nn.RMSNorm(width, text["rms_norm_eps"])
        self.model = Module(embed_tokens=nn.Embedding(text["vocab_size"], width), layers=layers, norm=norm)
        self.lm_head = linear(width, text["vocab_size"])
        embeddings = Module(
            class_embedding=nn.Parameter(torch.empty(1, tower)),
            patch_embedding=nn.Conv2d(3, tower, PATCH, PATCH),
            position_embedding=nn.Embedding((STEP3_SIDE // PATCH) ** 2 + 1, tower),
        )
        blocks = nn.ModuleList(Step3Block(vision) for _ in range(vision["num_hidden_layers"]))
        self.vision_model = Module(embeddings=embeddings, transformer=Module(layers=blocks))
        self.vit_downsampler, self.vit_downsampler2 = nn.Conv2d(tower, out, 2, 2), nn.Conv2d(out, 2 * out, 3, 2, 1)
        self.vit_large_projector = nn.Linear(2 * out, width, config["projector_bias"])

    def encode(self, pixels):
        """Encode one view `[3, side, side]`."""
        parts, side = self.vision_model.embeddings, pixels.shape[-1] // PATCH
        first, table = parts.position_embedding.weight.split([1, (STEP3_SIDE // PATCH) ** 2])
        planes = table.T.view(1, -1, STEP3_SIDE // PATCH, STEP3_SIDE // PATCH)
        if side != STEP3_SIDE // PATCH:
            planes = F.interpolate(planes, (side, side), mode="bicubic", antialias=True)
        x = parts.patch_embedding(pixels[None])[0].flatten(1).T + planes[0].flatten(1).T
        x = torch.cat([(parts.class_embedding + first).expand(4, -1), x])
        for block in self.vision_model.transformer.layers:
            x = block(x)
        plane = self.vit_downsampler2(self.vit_downsampler(x[4:].T.view(1, -1, side, side)))
        return self.vit_large_projector(plane[0].flatten(1).T)

    def forward(self, input_ids, views=()):
        x = self.model.embed_tokens(input_ids[0])
        if views:
            rows = torch.cat([self.encode(view) for view in views])
            places = (input_ids[0] == self.config["image_token_id"]).nonzero().flatten()
            x[places[: len(rows)]] = rows  # an answer may hold the token as text
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def build_step3(seed, bias=True, **text):
    words = fast_tokenizer(SPECIALS, eos_token="<eos>", pad_token="<eos>")
    config = {
        "architectures": ["Step3VLForConditionalGeneration"],
        "model_type": "step3_vl",
        "text_config": STEP3_TEXT | {"vocab_size": len(words)} | text,
        "vision_config": STEP3_VISION,
        "understand_projector_stride": 2,
        "projector_bias": bias,
        "image_token_id": words.convert_tokens_to_ids("<im_patch>"),
        "eos_token_id": words.eos_token_id,
    }
    model = Step3(config).eval()
    randomise(model, seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:  # one tensor holds all experts
            parameter.data.mul_(parameter.shape[1] ** 0.5)
        elif "qkv_proj.weight" in name:
            parameter.data[: 2 * STEP3_VISION["hidden_size"]].mul_(2)
    sizes = {"size": {"height": STEP3_SIDE, "width": STEP3_SIDE}, "patch_size": STEP3_WINDOW, "max_image_size": LONGEST}
    return model, ComposedProcessor(tokenizer=words, config=config, preprocessor=sizes)


def run_whole(model, inputs, answer, positions):
    ids = torch.cat((inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.long)), 1)
    with torch.inference_mode():
        return model(ids, inputs.get("views", ()))


def build_step37(seed, bias=False, limits=True, tie=False):
    import transformers as tf

    words = fast_tokenizer(SPECIALS, eos_token="<eos>", pad_token="<eos>")
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    clamps = {"swiglu_limits": [0.0, 0.0, 0.7, 0.5], "swiglu_limits_shared": [0.6, 0.0, 0.9, 0.0]} if limits else {}
    decoder = {
        "num_hidden_layers": 4, "head_dim": 16, "layer_types": kinds, "sliding_window": 20, "moe_layers_enum": "2,3",
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6, "head_dim": 16},
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "share_expert_dim": 40,
        "moe_router_scaling_factor": 1.5, "rope_theta": [1e4, 5e3, 5e3, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    }  # fmt: skip
    shape = {key: VISION[key] for key in ("width", "layers", "heads", "mlp_ratio", "image_size", "patch_size")}
    config = tf.Step3p7Config(
        text_config={**text_config(words), **decoder, **clamps},
        vision_config=shape,
        tie_word_embeddings=tie,
        projector_bias=bias,
        image_token_id=words.convert_tokens_to_ids("<im_patch>"),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = tf.Step3p7ForConditionalGeneration(config).eval()
    randomise(model, seed)
    for name, parameter in model.named_parameters():
        if "language_model" in name and "norm" in name:
            parameter.data.sub_(1)  # stored around 0
        elif "lambda" in name:
            parameter.data.add_(1)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)
    sharpen(model.model.vision_model)
    return model, Processor(tokenizer=words)


PUBLISHED_TEXT = {
    "n_routed_experts": "moe_num_experts", "num_experts_per_tok": "moe_top_k", "num_key_value_heads": "num_attention_groups",
}  # fmt: skip
PUBLISHED_VISION = {
    "hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads",
    "layer_scale_init_value": "ls_init_value",
}  # fmt: skip


def publish(config):
    """Return config.json with the publisher's keys in place of transformers'."""
    text = {PUBLISHED_TEXT.get(key, key): value for key, value in config["text_config"].items()}
    vision = {PUBLISHED_VISION.get(key, key): value for key, value in config["vision_config"].items()}
    ropes, kinds, heads = text.pop("rope_parameters"), text["layer_types"], text.pop("num_sliding_attention_heads")
    text["rope_theta"] = [ropes[kind]["rope_theta"] for kind in kinds]
    text["partial_rotary_factors"] = [ropes[kind]["partial_rotary_factor"] for kind in kinds]
    other = {"attention_type": "sliding_attention", "num_attention_heads": heads, "head_dim": text["head_dim"]}
    text["attention_other_setting"] = other | {"num_attention_groups": text["num_attention_groups"]}
    sparse = [str(layer) for layer, kind in enumerate(text.pop("mlp_layer_types")) if kind == "sparse"]
    text |= {"moe_layers_enum": ",".join(sparse), "use_head_wise_attn_gate": True, "use_moe_router_bias": True}
    del text["per_layer_config"], vision["intermediate_size"], vision["rope_parameters"]
    return config | {"text_config": text, "vision_config": vision}


def finish_step37(folder):
    (folder / "config.json").write_text(json.dumps(publish(json.loads((folder / "config.json").read_text()))))
    sizes = {"size": {"height": SIDE, "width": SIDE}, "patch_size": WINDOW, "max_image_size": LONGEST}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))


def load_step37(folder):
    import transformers as tf

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = tf.Step3p7ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, **plain).eval()
    return model, Processor(tokenizer=tf.PreTrainedTokenizerFast.from_pretrained(folder))


def call_step37(processor, text, data):
    """Return transformers' inputs with the publisher's views; transformers' processor resizes whole numbers."""
    inputs = call(processor, text, data)
    views = inputs.get("views", [])
    if views:
        whole = [number for number, view in enumerate(views) if view.shape[-1] == SIDE]
        counts = [last - first - 1 for first, last in zip([-1, *whole], whole, strict=False)]
        windows = [view for view in views if view.shape[-1] != SIDE]
        inputs |= {"pixel_values": torch.stack([views[number] for number in whole]), "num_local_patches": counts}
        inputs |= {"pixel_values_local": torch.stack(windows)} if windows else {}
    return inputs


FAMILIES = [
    Family(
        "step3_vl",
        build,
        placeholders={"image": "<im_patch>"},
        sizes={"image": [(90, 131), (60, 60), (40, 100), (20, 130)]},
        call=call,
        tensors=tensors,
        finish=finish,
        load=load,
        variants={
            "tied": {"tie": True},
            "projector with a bias": {"bias": True},
            "class token": {"use_cls_token": True},
            "other norms": {"use_ln_pre": False, "use_ln_post": True},
            "no layer scale": {"ls_init_value": None},
        },
    ),
    Family(
        "step3p7",
        build_step37,
        placeholders={"image": "<im_patch>"},
        sizes={"image": [(90, 131), (60, 60), (40, 100), (20, 130)]},
        call=call_step37,
        tensors=tensors,
        finish=finish_step37,
        load=load_step37,
        variants={"projector with a bias": {"bias": True}, "no limits": {"limits": False}, "tied": {"tie": True}},
    ),
    Family(
        "step3",
        build_step3,
        placeholders={"image": "<im_patch>"},
        sizes={"image": [(150, 200), (60, 60), (40, 100), (20, 130)]},
        call=functools.partial(call, whole=STEP3_SIDE, window=STEP3_WINDOW),
        run=run_whole,
        tensors=tensors,
        load=functools.partial(load_composed, Step3),
        variants={
            "projector without a bias": {"bias": False},
            "normalised experts": {"norm_expert_weight": True},
            "narrow queries, all layers but the first sparse": {"share_q_dim": None, "moe_layers_enum": None},
        },
    ),
]
