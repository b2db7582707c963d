"""Phi-4-multimodal in the parity suite, with tiles of 8 x 8 patches: plain, and in the publisher's layout with adapters."""

import functools
import json
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from family import AUDIO_SIZES, IMAGE_SIZES, RATE, Family, no_more_files
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from PIL import Image
from safetensors.torch import load_file, save_file

SIDE, PATCH, BANDS, TILES = 56, 7, 24, 36
ROWS = SIDE // PATCH // 2
CONTROLS = ["<|end|>", "<|image|>", "<|audio|>", "<|user|>", "<|assistant|>"]
LORAS = {"vision": (6, 9), "speech": (5, 4)}  # rank, alpha
TARGETS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.words.save_pretrained(folder)
        made = {**self.images.to_dict(), **self.extractor.to_dict()}
        (folder / "preprocessor_config.json").write_text(json.dumps(made, default=str))


def processor_of(words):
    import transformers as tf

    size = {"height": SIDE, "width": SIDE}
    images = tf.Phi4MultimodalImageProcessor(size=size, patch_size=PATCH, dynamic_hd=TILES)
    return Processor(words=words, images=images, extractor=tf.Phi4MultimodalFeatureExtractor(feature_size=BANDS))


def build(seed, tie=False, **text):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(CONTROLS, eos_token="<|end|>", pad_token="<|end|>")
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": SIDE,
        "patch_size": PATCH, "crop_size": SIDE, "image_token_id": words.convert_tokens_to_ids("<|image|>"),
    }  # fmt: skip
    audio = {
        "hidden_size": 48, "intermediate_size": 64, "num_blocks": 2, "num_attention_heads": 4, "ext_pw_out_channel": 48,
        "depthwise_separable_out_channel": 48, "input_size": BANDS, "bias_max_distance": 6, "nemo_conv_channels": 16,
        "audio_token_id": words.convert_tokens_to_ids("<|audio|>"),
    }  # fmt: skip
    config = tf.Phi4MultimodalConfig(**text_config(words, tie, **text), vision_config=vision, audio_config=audio)
    model = tf.Phi4MultimodalForCausalLM(config).eval()
    randomise(model, seed)
    extend = model.model.embed_tokens_extend
    for value in extend.parameters():
        value.data.mul_(0.5 if value.ndim > 1 else 1)  # randomise() takes them for token embeddings
    sharpen(extend.image_embed.img_processor)
    sharpen(extend.audio_embed.encoder)
    gen = torch.Generator().manual_seed(seed)
    extend.audio_embed.encoder.encoder_embedding.global_mean.copy_(torch.rand(BANDS, generator=gen) * 2 + 8)
    extend.audio_embed.encoder.encoder_embedding.global_invstd.copy_(torch.rand(BANDS, generator=gen) * 0.4 + 0.3)
    return model, processor_of(words)


def write_adapters(folder):
    """Write adapters that add zeros: the class of transformers loads none. The published layout tests others."""
    stored = load_file(folder / "model.safetensors")
    for name, (rank, alpha) in LORAS.items():
        made = {}
        for key, weight in stored.items():
            stem = key.removesuffix(".weight")
            if key.startswith("model.layers.") and stem.endswith(TARGETS):
                made[f"base_model.model.{stem}.lora_A.weight"] = torch.ones(rank, weight.shape[1])
                made[f"base_model.model.{stem}.lora_B.weight"] = torch.zeros(weight.shape[0], rank)
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": LAYERS}
        (folder / f"{name}-lora").mkdir(exist_ok=True)
        save_file(made, folder / f"{name}-lora" / "adapter_model.safetensors")
        (folder / f"{name}-lora" / "adapter_config.json").write_text(json.dumps(settings))


def load(folder):
    ensure_torchvision()
    import transformers as tf

    model = tf.Phi4MultimodalForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), processor_of(tf.PreTrainedTokenizerFast.from_pretrained(folder))


def refuses(modality, size):
    if modality == "audio":
        return size[0] < 400
    ensure_torchvision()
    try:
        processor_of(None).images([np.zeros((*size, 3), np.uint8)])
    except (ValueError, RuntimeError):
        return True
    return False


def call(processor, text, data):
    """Process each audio alone: in a batch, the class pads the shorter ones with silence that is attended to."""
    found = {"images": None, "audio": []}
    if data.get("image"):
        images = found["images"] = dict(processor.images(data["image"], return_tensors="pt"))
        for count in images.pop("num_img_tokens"):  # 256 rows and 16 ends of lines of the whole image are constants there
            text = text.replace("<|image|>", "<|held|>" * (int(count) - 272 + ROWS * (ROWS + 1)), 1)
    text = text.replace("<|held|>", "<|image|>")
    for samples in data.get("audio", ()):
        one = processor.extractor([samples], sampling_rate=RATE, return_tensors="pt")
        found["audio"].append((one["audio_input_features"], int(one["audio_embed_sizes"][0])))
        text = text.replace("<|audio|>", "<|held|>" * found["audio"][-1][1], 1)
    return {"input_ids": processor.words(text.replace("<|held|>", "<|audio|>"), return_tensors="pt")["input_ids"], **found}


def tensors(inputs, features):
    images = [one for one in features if one.modality == "image"]
    audio = [one for one in features if one.modality == "audio"]
    for number, feature in enumerate(images):
        rows, columns, *_ = feature.kwargs["layout"].data.tolist()
        crops = inputs["images"]["image_pixel_values"][number][: 1 + rows * columns]
        masks = inputs["images"]["image_attention_mask"][number][: 1 + rows * columns].bool()
        patches = crops.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        wanted = masks[:, 0::2, 0::2].repeat_interleave(2, 1).repeat_interleave(2, 2) & ~masks
        sizes = [int(part[number].sum()) for number in range(len(crops)) for part in (masks, wanted)]
        ours = feature.kwargs["pixel_values"].data.split(sizes)
        yield "pixel_values", torch.cat(ours[::2]), patches[masks]
        border = torch.cat(ours[1::2])
        yield "border", border[border.sum(1).argsort()], patches[wanted][patches[wanted].sum(1).argsort()]
    for feature, (theirs, _) in zip(audio, inputs["audio"], strict=True):
        yield "input_features", feature.kwargs["input_features"].data, theirs[0]


def run(model, inputs, answer, positions):
    ids, config, extend = inputs["input_ids"], model.config, model.model.embed_tokens_extend
    with torch.inference_mode():
        embeds = model.get_input_embeddings()(ids)
        if inputs["images"] is not None:
            embeds = extend.image_embed(ids, embeds, **inputs["images"])
        mode = "speech" if inputs["images"] is None else "vision"
        rows = []
        for features, count in inputs["audio"]:
            own = torch.full((1, count), config.audio_config.audio_token_id)
            room = embeds.new_zeros(1, count, config.hidden_size)
            rows.append(extend.audio_embed(own, room, features, torch.tensor([count]), None, mode)[0])
        if rows:
            embeds[ids == config.audio_config.audio_token_id] = torch.cat(rows)
        first = model(inputs_embeds=embeds, use_cache=True)
        if len(answer) < 2:
            return first.logits[0].float()
        tail = model.get_input_embeddings()(torch.tensor([answer[:-1]]))
        rest = model(inputs_embeds=tail, past_key_values=first.past_key_values)
    return torch.cat([first.logits[0], rest.logits[0]]).float()


EXTEND = "model.embed_tokens_extend."
TOWER, ENCODER = f"{EXTEND}image_embed.img_processor.", f"{EXTEND}audio_embed.encoder."
SILENT = {
    f"{TOWER}head.": "the pooling head is not used",
    f"{TOWER}post_layernorm.": "is after the layer that is read",
    f"{TOWER}encoder.layers.2.": "the rows are those of the layer before",
    **{f"{EXTEND}audio_embed.{way}_proj_for_speech.": "is for prompts without an image" for way in ("up", "down")},
    **{f"{part}.{i}.self_attn.k_proj.bias": "adds the same to all scores of a row"
       for part in (f"{TOWER}encoder.layers", f"{ENCODER}encoders") for i in range(2)},
}  # fmt: skip


PLAIN = Family(
    "phi4_multimodal",
    build,
    placeholders={"image": "<|image|>", "audio": "<|audio|>"},
    sizes={"image": [(100, 57), (65, 150), (200, 190)], "audio": [(30_000,), (9001,), (20_234,)]},
    grid={"image": IMAGE_SIZES, "audio": AUDIO_SIZES},
    refuses=refuses,
    call=call,
    run=run,
    tensors=tensors,
    load=load,
    cases=["", "i", "a", "ii", "aa", "iai"],
    variants={"tied": {"tie": True}},
    silent=SILENT,
    fullest={"image": [(56, 2016)], "audio": [(82_000,)]},
    fullest_items=1,
    finish=write_adapters,
)


class Published(torch.nn.Module):
    """The class of transformers under the publisher's names, with both adapters, of which the prompt's items select one."""

    def __init__(self, inner, loras):
        super().__init__()
        self.inner, self.loras, self.active = inner, torch.nn.ParameterDict(loras), None
        for name, module in inner.model.layers.named_modules():
            if name.endswith(TARGETS):
                module.register_forward_hook(functools.partial(self.adapt, f"model.layers.{name}"))

    def adapt(self, name, module, given, made):
        if self.active is None:
            return made
        down, up = (self.loras[f"{name}.lora_{letter}.{self.active}.weight".replace(".", "/")] for letter in "AB")
        rank, alpha = LORAS[self.active]
        return made + given[0] @ down.T @ up.T * (alpha / rank)

    def state_dict(self):
        made = {name.replace("/", "."): value.detach() for name, value in self.loras.items()}
        for name, value in self.inner.state_dict().items():
            if name.startswith("lm_head."):  # is tied, and not stored
                continue
            if name.startswith("model.layers.") and name.removesuffix(".weight").endswith(TARGETS):
                name = name.removesuffix("weight") + "base_layer.weight"
            for old, new in NAMES.items():
                name = re.sub(old, new, name)
            made[name] = value
        return made

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous().clone() for name, value in self.state_dict().items()}, folder / "model.safetensors")
        config = self.inner.config.to_dict()
        audio, vision = config.pop("audio_config"), config.pop("vision_config")
        keys = {"hidden_size": "attention_dim", "num_attention_heads": "attention_heads", "intermediate_size": "linear_units"}
        encoder = {keys.get(key, key): value for key, value in audio.items() if key != "downsample_rate"}
        encoder["nemo_conv_settings"] = {"conv_channels": encoder.pop("nemo_conv_channels")}
        encoder["relative_attention_bias_args"] = {"type": "t5", "t5_bias_max_distance": encoder.pop("bias_max_distance")}
        image = {"crop_size": SIDE, "hd_transform_order": "sub_glb", "use_hd_transform": True, "with_learnable_separator": True}
        config |= {
            "architectures": ["Phi4MMForCausalLM"],
            "model_type": "phi4mm",
            "embd_layer": {"image_embd_layer": image, "audio_embd_layer": {"compression_rate": 8, "downsample_rate": 1}},
            "audio_processor": {"name": "cascades", "config": encoder},
            "vision_config": vision,  # the published tower has the sizes of the defaults
            "image_token_id": vision["image_token_id"],
            "audio_token_id": audio["audio_token_id"],
            **{
                f"{name}_lora": {"r": rank, "lora_alpha": alpha, "dp": 0.0, "layer": LAYERS}
                for name, (rank, alpha) in LORAS.items()
            },
        }
        (folder / "config.json").write_text(json.dumps(config))


NAMES = {
    r"(\.feed_forward_(?:in|out))\.gate_up_proj": r"\1.net.0.linear",
    r"(\.feed_forward_(?:in|out))\.down_proj": r"\1.net.2",
    r"(audio_embed\..*self_attn)\.([qkv])_proj": r"\1.linear_\2",
    r"(audio_embed\..*self_attn)\.o_proj": r"\1.linear_out",
    r"(image_embed\.)img_projection_up": r"\1img_projection.0",
    r"(image_embed\.)img_projection_down": r"\1img_projection.2",
    r"(image_embed\.)global_img_feature_extensor": r"\1glb_GN",
    r"(image_embed\.)sub_img_feature_extensor": r"\1sub_GN",
    **{
        rf"(audio_embed\.){layer}_proj_for_{ours}\.": rf"\1audio_projection.{theirs}.{number}."
        for ours, theirs in (("speech", "speech"), ("vision_speech", "vision"))
        for layer, number in (("up", 0), ("down", 2))
    },
}
"""transformers' names -> the publisher's, the reverse of transformers' conversion script."""
LAYERS = r"((layers.*self_attn\.(qkv|o)_proj)|(layers.*mlp\.(gate_up|down)_proj))"


def build_published(seed):
    model, processor = build(seed, tie=True)
    gen, loras = torch.Generator().manual_seed(seed), {}
    for name, module in model.model.layers.named_modules():
        for adapter, (rank, _) in LORAS.items() if name.endswith(TARGETS) else ():
            outer, inner = module.weight.shape
            for letter, shape in (("A", (rank, inner)), ("B", (outer, rank))):
                value = torch.randn(shape, generator=gen) * 0.5 / shape[1] ** 0.5  # larger ones make attention too sharp
                loras[f"model.layers.{name}.lora_{letter}.{adapter}.weight".replace(".", "/")] = value
    return Published(model, loras).eval(), processor


def load_published(folder):
    """Make the same model again, since transformers does not read the publisher's layout."""
    seed = int(folder.name.split("-")[1])
    model, processor = build_published(seed)
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())
    model.inner.set_attn_implementation("eager")
    return model, processor


def resize_as_pillow(image, size, *args, **options):
    """Resize uint8 images as the publisher's processor does, with Pillow."""
    if image.dtype != torch.uint8:
        return RESIZE(image, size, *args, **options)
    picture = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def call_published(processor, text, data):
    global RESIZE
    from transformers.models.phi4_multimodal import image_processing_phi4_multimodal as module

    RESIZE = module.tvF.resize
    with mock.patch.object(module.tvF, "resize", resize_as_pillow):
        return call(processor, text.replace("<|image_1|>", "<|image|>").replace("<|audio_1|>", "<|audio|>"), data)


def run_published(model, inputs, answer, positions):
    model.active = "vision" if inputs["images"] is not None else "speech" if inputs["audio"] else None
    return run(model.inner, inputs, answer, positions)


UNUSED = [
    f"loras.model/layers/{layer}/{target}/lora_{letter}/speech/weight"
    for layer in range(3)
    for target in ("self_attn/qkv_proj", "self_attn/o_proj", "mlp/gate_up_proj", "mlp/down_proj")
    for letter in "AB"
]
FAMILIES = [
    PLAIN,
    replace(
        PLAIN,
        name="phi4mm",
        build=build_published,
        placeholders={"image": "<|image_1|>", "audio": "<|audio_1|>"},
        call=call_published,
        run=run_published,
        load=load_published,
        variants={},
        finish=no_more_files,
        silent={f"inner.{name}": why for name, why in SILENT.items()}
        | dict.fromkeys(UNUSED, "is for prompts without an image"),
    ),
]
