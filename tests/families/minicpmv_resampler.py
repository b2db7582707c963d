"""MiniCPM-V 2.6, 4 and 4.5 and MiniCPM-o in the parity suite. The oracle is composed; images are cut with Pillow."""

import json
import math
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from family import RATE, Family, as_sampled, give
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

PATCH, SIDE, QUERIES, WIDTH, MELS, SECONDS = 14, 112, 5, 256, 24, 4
TAGS = ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<unk>", "<|im_end|>"]
TAGS += ["<|audio_start|>", "<|audio_end|>"]
MARKS = {"image": "(<image>./</image>)", "video": "(<video>./</video>)"}
HEARD = "(<audio>./</audio>)"
DECODERS = {2.6: "qwen2", 4.0: "llama", 4.5: "qwen3"}
FPS = 4.0


def waves(positions, width):
    freq = 1.0 / 10000 ** (np.arange(width // 2, dtype=np.float32) / (width / 2.0))
    angles = np.einsum("m,d->md", np.asarray(positions, np.float32), freq.astype(np.float32))
    return torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], 1))


class Tower(nn.Module):
    """SigLIP's encoder for one view of any size."""

    def __init__(self, config):
        super().__init__()
        import transformers as tf
        from transformers.models.siglip.modeling_siglip import SiglipEncoder

        own = {key: value for key, value in config.items() if key != "model_type"}
        shape = tf.SiglipVisionConfig(**own, attn_implementation="eager")
        self.side = shape.image_size // PATCH
        self.embeddings = nn.Module()
        self.embeddings.patch_embedding = nn.Conv2d(3, shape.hidden_size, PATCH, PATCH)
        self.embeddings.position_embedding = nn.Embedding(self.side**2, shape.hidden_size)
        self.encoder = SiglipEncoder(shape)
        self.post_layernorm = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)

    def forward(self, pixels):
        x = self.embeddings.patch_embedding(pixels[None])
        bounds = torch.arange(1 / self.side, 1.0, 1 / self.side)
        rows, columns = (
            torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / torch.tensor(n)), bounds, right=True) for n in x.shape[-2:]
        )
        places = self.embeddings.position_embedding((rows[:, None] * self.side + columns).flatten())
        return self.post_layernorm(self.encoder(inputs_embeds=x.flatten(2).transpose(1, 2) + places).last_hidden_state)[0]


class Resampler(nn.Module):
    def __init__(self, inner, width, queries):
        super().__init__()
        self.query = nn.Parameter(torch.empty(queries, width))
        self.kv_proj = nn.Linear(inner, width, bias=False)
        self.attn = nn.MultiheadAttention(width, width // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.empty(width, width))

    def forward(self, rows, sizes, times):
        values, half, places = self.ln_kv(self.kv_proj(rows)), self.query.shape[1] // 2, []
        for (h, w), time in zip(sizes, times, strict=True):
            columns, lines = waves(range(w), half), waves(range(h), half)
            table = torch.cat([columns.repeat(h, 1), lines.repeat_interleave(w, 0)], 1)
            places.append(table if time < 0 else table + waves([time], 2 * half))
        out = self.attn(self.ln_q(self.query), values + torch.cat(places), values, need_weights=False)[0]
        return self.ln_post(out) @ self.proj


class Composed(nn.Module):
    def __init__(self, config):
        super().__init__()
        import transformers as tf

        self.config = config
        text = tf.CONFIG_MAPPING[DECODERS[config["version"]]](**config["text"])
        self.llm = tf.AutoModelForCausalLM.from_config(text, attn_implementation="eager")
        self.vpm = Tower(config["vision_config"])
        self.resampler = Resampler(config["vision_config"]["hidden_size"], text.hidden_size, config["query_num"])
        if "audio_config" in config:
            from transformers.models.whisper.modeling_whisper import WhisperEncoder

            self.apm = WhisperEncoder(tf.WhisperConfig(**config["audio_config"], attn_implementation="eager"))
            self.audio_projection_layer = nn.Module()
            self.audio_projection_layer.linear1 = nn.Linear(config["audio_config"]["d_model"], text.hidden_size)
            self.audio_projection_layer.linear2 = nn.Linear(text.hidden_size, text.hidden_size)

    def hear(self, features):
        """Encode `[mels, frames]`: a row attends to all rows up to the end of its second."""
        tower, layers = self.apm, self.audio_projection_layer
        x = F.gelu(tower.conv2(F.gelu(tower.conv1(features[None])))).transpose(1, 2)
        x = x + tower.embed_positions.weight[: x.shape[1]]
        second = torch.arange(x.shape[1]) // int(50 * self.config["audio_chunk_length"])
        mask = torch.where(second <= second[:, None], 0.0, -torch.inf)[None, None]
        for layer in tower.layers:
            x = layer(x, mask)
            x = x[0] if isinstance(x, tuple) else x
        x = layers.linear2(F.relu(layers.linear1(tower.layer_norm(x))))
        return F.avg_pool1d(x.transpose(1, 2), self.config["audio_pool_step"])[0].T

    def forward(self, input_ids, packs=(), past_key_values=None, use_cache=True):
        embeds = self.llm.get_input_embeddings()(input_ids)
        rows = []
        for views, times in packs:
            if times is None:
                rows.append(self.hear(views))
                continue
            seen = torch.cat([self.vpm(view) for view in views])
            sizes = [(view.shape[1] // PATCH, view.shape[2] // PATCH) for view in views]
            rows.append(self.resampler(seen, sizes, times))
        if rows:
            embeds[input_ids == self.config["unk"]] = torch.cat(rows)
        return self.llm(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=use_cache)

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**self.config, **self.config["text"]}))
        tied = self.config["text"]["tie_word_embeddings"]
        tensors = {k: v.contiguous() for k, v in self.state_dict().items() if not (tied and k.endswith("lm_head.weight"))}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def nearest(length, step):
    return max(round(length / step) * step, step)


def fitted(wide, tall, enlarge):
    if wide * tall > SIDE * SIDE or enlarge:
        ratio = wide / tall
        tall = int(SIDE / math.sqrt(ratio))
        wide = int(tall * ratio)
    return nearest(wide, PATCH), nearest(tall, PATCH)


def grid_of(wide, tall, most):
    count = min(math.ceil(wide * tall / SIDE**2), most)
    found, least = None, math.inf
    for slices in (count - 1, count, count + 1) if count > 1 else ():
        for columns in range(1, slices + 1):
            if slices != 1 and slices <= most and slices % columns == 0:
                distance = abs(math.log(wide / tall) - math.log(columns / (slices // columns)))
                if distance < least:
                    found, least = (columns, slices // columns), distance
    return found


def views_of(image, most):
    """Return the grid `(columns, rows)` or None, and the normalised views of an image."""
    wide, tall = image.size
    grid = grid_of(wide, tall, most)
    views = [image.resize(fitted(wide, tall, grid is None), Image.Resampling.BICUBIC)]
    if grid is not None:
        size = fitted(nearest(wide, grid[0]) / grid[0], nearest(tall, grid[1]) / grid[1], True)
        whole = image.resize((size[0] * grid[0], size[1] * grid[1]), Image.Resampling.BICUBIC)
        boxes = [(x * size[0], y * size[1]) for y in range(grid[1]) for x in range(grid[0])]
        views += [whole.crop((x, y, x + size[0], y + size[1])) for x, y in boxes]
    return grid, [torch.from_numpy((np.asarray(view, np.float32) / 255 - 0.5) / 0.5).permute(2, 0, 1) for view in views]


def tagged(grid):
    rows = "<unk>" * QUERIES
    columns, lines = grid or (0, 0)
    return f"<image>{rows}</image>" + "\n".join(f"<slice>{rows}</slice>" * columns for _ in range(lines))


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)
        options = {"image_processor_type": "MiniCPMVImageProcessor", "max_slice_nums": 6, "scale_resolution": SIDE}
        options |= {"patch_size": PATCH, "use_image_id": True, "slice_mode": True, "image_feature_size": QUERIES}
        options |= {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3, "version": self.version}
        if self.extractor is not None:
            self.extractor.save_pretrained(folder)
            options |= json.loads((folder / "preprocessor_config.json").read_text())
        (folder / "preprocessor_config.json").write_text(json.dumps(options))


def processor_of(words, config):
    import transformers as tf

    own = {} if "audio_config" not in config else {"feature_size": MELS, "chunk_length": SECONDS}
    extractor = tf.WhisperFeatureExtractor(**own) if own else None
    pool = config.get("audio_pool_step")
    return Processor(tokenizer=words, version=config["version"], extractor=extractor, pool=pool)


def build(version, seed, tie=False, other=None, pool=None, **text):
    version = other or version
    words = fast_tokenizer(TAGS, eos_token="<|im_end|>", pad_token="<|im_end|>")
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = {
        "architectures": ["MiniCPMV"],
        "model_type": "minicpmv",
        "version": version,
        "query_num": QUERIES,
        "image_size": SIDE,
        "drop_vision_last_layer": False,
        "vision_config": {**shape, "image_size": 70, "patch_size": PATCH, "model_type": "siglip"},
        "unk": words.convert_tokens_to_ids("<unk>"),
        "text": text_config(words, tie, hidden_size=WIDTH, **text),
    }
    if pool is not None:
        audio = {"d_model": 64, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "num_mel_bins": MELS}
        config |= {"architectures": ["MiniCPMO"], "audio_config": {**audio, "max_source_positions": 50 * SECONDS}}
        config |= {"audio_pool_step": pool, "audio_chunk_length": 1.0}
    model = Composed(config).eval()
    randomise(model, seed)
    for norm in (model.resampler.ln_kv, model.resampler.ln_post):
        norm.weight.data.add_(1)
    sharpen(model.vpm)
    if pool is not None:
        sharpen(model.apm)
    return model, processor_of(words, config)


def load(folder):
    ensure_torchvision()
    import transformers as tf

    config = json.loads((folder / "config.json").read_text())
    model = Composed(config)
    missing, surplus = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not surplus
    assert set(missing) <= {"llm.lm_head.weight"}
    words = tf.PreTrainedTokenizerFast.from_pretrained(folder)
    return model.eval(), processor_of(words, config)


def call(pack, processor, text, data):
    """Number the images, join the frames of a video with newlines, and read `pack` frames together."""
    packs, images, videos, audio = (
        [],
        iter(enumerate(data.get("image", ()))),
        iter(data.get("video", ())),
        iter(data.get("audio", ())),
    )
    while found := re.search(r"\(<(image|video|audio)>\./</\1>\)", text):
        if found[1] == "image":
            number, image = next(images)
            grid, views = views_of(image, 6)
            packs += [([view], [-1]) for view in views]
            made = f"<image_id>{number}</image_id>{tagged(grid)}"
        elif found[1] == "audio":
            samples = next(audio)
            for start in range(0, len(samples), SECONDS * RATE):
                window = samples[start : start + SECONDS * RATE]
                features = processor.extractor(window, sampling_rate=RATE, return_tensors="pt")["input_features"][0]
                packs.append((features[:, : -(-len(window) // 160)], None))
            frames, each = -(-len(samples) // 160), 50 // processor.pool
            rows = (frames + 1) // 2 // processor.pool
            parts = ["<unk>" * min(each, rows - first) for first in range(0, rows, each)]
            made = "".join(f"<|audio_start|>{part}<|audio_end|>" for part in parts)
        else:
            frames = next(videos)
            times = [round(number / FPS * 10) if processor.version == 4.5 else -1 for number in range(len(frames))]
            views = [views_of(Image.fromarray(frame), 1)[1][0] for frame in frames]
            starts = range(0, len(frames), pack)
            packs += [(views[i : i + pack], times[i : i + pack]) for i in starts]
            made = "\n".join(tagged(None) for _ in starts)
        text = text.replace(found[0], made.replace("<image>", "<held>"), 1)
    text = text.replace("<held>", "<image>")
    return {"input_ids": processor.tokenizer(text, return_tensors="pt")["input_ids"], "packs": packs}


def tensors(inputs, features):
    """Cut the oracle's views into patches."""
    kwargs = [feature.kwargs for feature in sorted(features, key=lambda feature: feature.range.offset)]
    heard = [one["input_features"].data for one in kwargs if "input_features" in one]
    if heard:
        yield "input_features", torch.cat(heard), torch.cat([seen.T for seen, times in inputs["packs"] if times is None])
    kwargs = [one for one in kwargs if "pixel_values" in one]
    packs, cut = [pack for pack in inputs["packs"] if pack[1] is not None], []
    for views, _ in packs:
        patches = [view.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).permute(1, 3, 0, 2, 4) for view in views]
        cut += [one.flatten(2).flatten(0, 1) for one in patches]
    if not cut:
        return
    yield "pixel_values", torch.cat([one["pixel_values"].data for one in kwargs]), torch.cat(cut)
    yield "packs", torch.cat([one["packs"].data for one in kwargs]), torch.tensor([len(views) for views, _ in packs])
    times = torch.tensor([time for _, several in packs for time in several])
    yield "times", torch.cat([one["times"].data for one in kwargs]), times


def refuses(modality, size):
    """Return True if a view has more than 5/4 of the patches of a square."""
    if modality == "audio":
        return (-(-size[0] // 160) + 1) // 2 < 5
    image = Image.new("RGB", (size[-1], size[-2]))
    return any(view.shape[1] * view.shape[2] > SIDE**2 * 5 // 4 for view in views_of(image, 6 if modality == "image" else 1)[1])


def in_pairs(text, data):
    return {"prompt": text, "multi_modal_data": data, "mm_processor_kwargs": {"force_packing": 2}}


SIZES = {"image": [(90, 131), (60, 60), (240, 170), (224, 224)], "video": [(3, 80, 100), (2, 150, 90), (1, 60, 60)]}
KEYS = "a key bias adds the same to all scores of a query"


def ours(modality, media):
    return give(modality, media) if modality == "audio" else as_sampled(modality, media)


def row(name, version, pack=1, **more):
    return Family(
        name,
        partial(build, version, pool=5 if name == "minicpmo" else None),
        **{"placeholders": MARKS, "sizes": SIZES} | more,
        ours=ours,
        call=partial(call, pack),
        tensors=tensors,
        refuses=refuses,
        load=load,
        silent={f"vpm.encoder.layers.{i}.self_attn.k_proj.bias": KEYS for i in range(3)},
        fullest={"image": [(1, 100)], "video": [(6, 1, 100)], "audio": [(71_337,)]},
        unfilled={} if version == 2.6 else {"video": f"three frames can be packed into the rows of one, here {pack}"},
    )


FAMILIES = [
    row("minicpmv2_6", 2.6, variants={"tied": {"tie": True}, "version 4": {"other": 4.0}}),
    row("minicpmv4_5", 4.5, pack=2, request=in_pairs),
    row(
        "minicpmo",
        4.5,
        placeholders={**MARKS, "audio": HEARD},
        sizes={**SIZES, "audio": [(16_000,), (71_337,), (24_001,)]},
        variants={"2.6": {"other": 2.6}},
    ),
]
