"""DeepSeek-OCR (1) in the parity suite. The oracle is composed of transformers' parts; a patch is one pixel."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from family import IMAGE_SIZES, Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

WHOLE, TILE = 64, 40
SAM = {"width": 32, "layers": 3, "heads": 2, "global_attn_indexes": [1], "downsample_channels": [24, 48]}
TINY = {"mlp_dim": 48, "image_size": WHOLE, "patch_size": 1, "output_channels": 16, "window_size": 14}
MIXTURE = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2}
CALLED = [  # the publisher's name, transformers' name
    ("model.sam_model.neck.0.", "model.vision_tower.sam.neck.conv1."),
    ("model.sam_model.neck.1.", "model.vision_tower.sam.neck.layer_norm1."),
    ("model.sam_model.neck.2.", "model.vision_tower.sam.neck.conv2."),
    ("model.sam_model.neck.3.", "model.vision_tower.sam.neck.layer_norm2."),
    ("model.sam_model.net_2.", "model.vision_tower.sam.proj.conv1."),
    ("model.sam_model.net_3.", "model.vision_tower.sam.proj.conv2."),
    ("model.sam_model.patch_embed.proj.", "model.vision_tower.sam.patch_embed.projection."),
    ("model.sam_model.blocks.", "model.vision_tower.sam.layers."),
    ("model.sam_model.", "model.vision_tower.sam."),
    ("model.vision_model.", "model.vision_tower.clip."),
    ("model.projector.layers.", "model.multi_modal_projector."),
    ("model.view_seperator", "model.view_separator"),
    ("model.", "model.language_model."),
]


def published(name):
    found = next((new + name[len(old) :] for new, old in CALLED if name.startswith(old)), name)
    return found.replace(".layer_norm", ".norm") if "sam_model.blocks" in found else found


class Clip(nn.Module):
    """CLIP's layers over the rows of another tower. Position embeddings are resampled if the number of rows differs."""

    def __init__(self, clip):
        super().__init__()
        import transformers as tf
        from transformers.models.clip.modeling_clip import CLIPEncoderLayer

        sizes = {"hidden_size": clip["width"], "intermediate_size": 4 * clip["width"], "num_attention_heads": clip["heads"]}
        config = tf.CLIPVisionConfig(**sizes, attn_implementation="eager")
        self.side = clip["image_size"] // clip["patch_size"]
        self.embeddings = nn.Module()
        self.embeddings.class_embedding = nn.Parameter(torch.empty(clip["width"]))
        self.embeddings.position_embedding = nn.Embedding(self.side**2 + 1, clip["width"])
        self.pre_layrnorm = nn.LayerNorm(clip["width"], eps=1e-5)
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(CLIPEncoderLayer(config) for _ in range(clip["layers"]))

    def forward(self, planes):
        """Map `[n, width, side, side]` to `[n, side * side, width]`."""
        own, *places = self.embeddings.position_embedding.weight.split([1, self.side**2])
        square = places[0].T.reshape(1, -1, self.side, self.side)
        size = planes.shape[-2:]
        if size != square.shape[-2:]:
            square = F.interpolate(square, size, mode="bicubic", antialias=True, align_corners=False)
        first = (self.embeddings.class_embedding + own).expand(len(planes), 1, -1)
        x = self.pre_layrnorm(torch.cat([first, (planes + square).flatten(2).transpose(1, 2)], 1))
        for layer in self.transformer.layers:
            x = layer(x, None)
            x = x[0] if isinstance(x, tuple) else x
        return x[:, 1:]


class Deep(nn.Module):
    def __init__(self, sam, clip):
        super().__init__()
        self.sam, self.clip = sam, Clip(clip)

    def forward(self, pixels):
        """Return `[n, side, side, width]`."""
        planes = self.sam(pixels).last_hidden_state
        rows = torch.cat([self.clip(planes), planes.flatten(2).transpose(1, 2)], -1)
        return rows.unflatten(1, planes.shape[-2:])


def compose(config):
    """Build DeepSeek-OCR 2's class with this tower and row ends; it is saved in the publisher's layout."""
    ensure_torchvision()
    import transformers as tf

    sam, clip = config["vision_config"]["width"].values()
    renamed = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
    text = dict(config["language_config"])
    dense = text.pop("first_k_dense_replace")
    text["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(text["num_hidden_layers"])]
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = tf.DeepseekOcr2ForConditionalGeneration(
        tf.DeepseekOcr2Config(
            vision_config={
                "sam_config": {renamed.get(name, name): value for name, value in sam.items()},
                "encoder_config": {**sizes, "num_key_value_heads": 2, "vocab_size": 1},
            },
            text_config=text,
            image_token_id=config["image_token_id"],
            tie_word_embeddings=text["tie_word_embeddings"],
            attn_implementation="eager",
            experts_implementation="eager",
        )
    )
    inner, hidden = model.model, text["hidden_size"]
    inner.vision_tower = Deep(inner.vision_tower.sam_encoder, clip)
    inner.multi_modal_projector = nn.Linear(2 * clip["width"], hidden)
    inner.image_newline = nn.Parameter(torch.empty(hidden))
    inner.get_image_features = lambda *given, **_: SimpleNamespace(pooler_output=laid_out(inner, *given))
    model.save_pretrained = lambda folder, **_: save(model, config, folder)
    model.state_dict = lambda: named(model)
    return model.eval()


def laid_out(inner, pixels, local, grids):
    def lines(plane):
        return torch.cat([plane, inner.image_newline.expand(len(plane), 1, -1)], 1).flatten(0, 1)

    found, start = [], 0
    for whole, (tall, wide) in zip(pixels, grids.tolist(), strict=True):
        rows = [lines(inner.multi_modal_projector(inner.vision_tower(whole[None]))[0]), inner.view_separator[None]]
        if tall * wide:
            seen = inner.multi_modal_projector(inner.vision_tower(local[start : start + tall * wide]))
            bands = [torch.cat(list(band), 1) for band in seen.split(wide)]
            rows.insert(0, lines(torch.cat(bands)))
            start += tall * wide
        found.append(torch.cat(rows))
    return found


def named(model):
    """Return the tensors by the publisher's names: experts split, CLIP's q, k and v joined."""
    state, out = type(model).state_dict(model), {}
    for name, tensor in state.items():
        if ".clip." in name and ".q_proj." in name:
            whole = torch.cat([state[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"])
            out[published(name.replace(".q_proj.", ".qkv_proj."))] = whole
        elif ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
            above, parts = name.rpartition(".")[0], ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for i, own in enumerate(tensor):
                out |= {published(f"{above}.{i}.{p}.weight"): t for p, t in zip(parts, own.chunk(len(parts)), strict=True)}
        elif ".clip." not in name or not (".k_proj." in name or ".v_proj." in name):
            out[published(name)] = tensor
    unused = torch.zeros(model.model.vision_tower.clip.pre_layrnorm.weight.shape[0], 3, 2, 2)
    return out | {"model.vision_model.embeddings.patch_embedding.weight": unused}


def save(model, config, folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tied = config["language_config"]["tie_word_embeddings"]
    tensors = {name: t.contiguous().clone() for name, t in named(model).items() if not (tied and name == "lm_head.weight")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def fill(model, stored):
    """Copy tensors by the publisher's names into the model; the inverse of `named`."""
    for name, tensor in type(model).state_dict(model).items():
        if ".clip." in name and (part := next((p for p in "qkv" if f".{p}_proj." in name), None)):
            whole = stored[published(name.replace(f".{part}_proj.", ".qkv_proj."))]
            tensor.copy_(whole.chunk(3)["qkv".index(part)])
        elif ".experts." in name:
            above, parts = name.rpartition(".")[0], ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for i, own in enumerate(tensor):
                own.copy_(torch.cat([stored[published(f"{above}.{i}.{p}.weight")] for p in parts]))
        elif name != "lm_head.weight" or name in stored:
            tensor.copy_(stored[published(name)])


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)


def processor_of(words):
    import transformers as tf

    size = {"height": WHOLE, "width": WHOLE}
    images = tf.DeepseekOcr2ImageProcessor(size=size, tile_size=TILE, max_patches=9)
    return Processor(tokenizer=words, image_processor=images)


def build(seed, tie=False, places=16, **text):
    words = fast_tokenizer(["<|im_end|>", "<image>"], eos_token="<|im_end|>", pad_token="<|im_end|>")
    decoder = text_config(words, tie, num_key_value_heads=4, first_k_dense_replace=1, **MIXTURE, **text)
    clip = {"width": 48, "layers": 3, "heads": 4, "image_size": places, "patch_size": 1}
    config = {
        "architectures": ["DeepseekOCRForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "language_config": decoder,
        "vision_config": {"width": {"sam_vit_b": SAM | TINY, "clip-l-14-224": clip}},
        "image_token_id": words.convert_tokens_to_ids("<image>"),
    }
    model = compose(config)
    randomise(model, seed)
    for name, p in model.model.vision_tower.named_parameters():
        if "qkv" in name or "rel_pos" in name or "q_proj" in name or "k_proj" in name:
            p.data.mul_(1.5)  # without large scores, attention over thousands of rows is a plain mean
    return model, processor_of(words)


def load(folder):
    import transformers as tf

    model = compose(json.loads((folder / "config.json").read_text()))
    fill(model, load_file(folder / "model.safetensors"))
    model.tie_weights()
    return model, processor_of(tf.PreTrainedTokenizerFast.from_pretrained(folder))


def call(processor, text, data):
    """Cut images with DeepSeek-OCR 2's processor at this model's sizes, and count the rows line by line."""
    from transformers.models.deepseek_ocr2.image_processing_deepseek_ocr2 import get_optimal_tiled_canvas

    images, made, grids = data.get("image", []), {}, []
    if images:
        made = dict(processor.image_processor(images, return_tensors="pt"))
    for image in images:
        wide, tall = get_optimal_tiled_canvas(image.size[::-1], (TILE, TILE), 2, 9) if max(image.size) > TILE else (0, 0)
        grids.append((tall, wide))
        rows = tall * TILE // 4 * (wide * TILE // 4 + 1) + WHOLE // 4 * (WHOLE // 4 + 1) + 1
        text = text.replace("<image>", "<held>" * rows, 1)
    ids = processor.tokenizer(text.replace("<held>", "<image>"), return_tensors="pt")["input_ids"]
    if not images:
        return {"input_ids": ids}
    planes = {name: made[name] for name in ("pixel_values", "pixel_values_local") if name in made}
    return {"input_ids": ids, **planes, "num_local_patches": torch.tensor(grids)}


def second():
    """Load the row of DeepSeek-OCR 2, which shares its prompts and tensors with this one."""
    spec = importlib.util.spec_from_file_location("second", Path(__file__).with_name("deepseek_ocr2.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SECOND = second()


def tensors(inputs, features):
    for name, mine, theirs in SECOND.tensors(inputs, features):
        yield name, mine if mine.numel() else theirs[:0], theirs


FAMILY = Family(
    "deepseek_ocr",
    build,
    placeholders={"image": "<image>"},
    sizes={"image": [(39, 39), (40, 30), (30, 38), (37, 40), (20, 40), (90, 50)]},
    grid={"image": IMAGE_SIZES},
    refuses=SECOND.refuses,
    cases=["", "ii", "", "", "", "i"],
    prompt=SECOND.write_long,
    call=call,
    tensors=tensors,
    load=load,
    silent={
        f"model.vision_tower.clip.transformer.layers.{i}.self_attn.k_proj.bias": "it adds the same to all scores of a query"
        for i in range(3)
    },
    variants={"tied": {"tie": True}, "resampled positions": {"places": 12}},
    fullest={"image": [(40, 30), (30, 38)]},
    options={"max_model_len": 2560},
)
