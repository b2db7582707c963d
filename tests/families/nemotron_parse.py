"""Nemotron-Parse in the parity suite, composed of transformers' RADIO and mBART, and the publisher's neck in plain torch.

Sources: the publisher's modelling and processing code; vLLM's nemotron_parse.py.
"""

import json
from types import SimpleNamespace

import numpy as np
import torch
from family import IMAGE_SIZES, Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen
from radio import PATCH, VISION, load_with_radio, make_radio, reset_scales, stored
from safetensors.torch import load_file, save_file
from sensorium.processors.images import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from torch import nn

PAGE, OUT, TOWER = (64, 80), 64, "encoder.model_encoder."
TASKS = ["<predict_bbox>", "<predict_classes>", "<output_markdown>", "<predict_no_text_in_pic>"]
CONTROLS = ["<s>", "<pad>", "</s>", *TASKS]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        width = VISION["hidden_size"]
        self.model_encoder = make_radio()
        self.conv1, self.conv2 = nn.Conv1d(width, OUT, 1), nn.Conv2d(OUT, OUT, (1, 4), (1, 4), bias=False)
        self.sum_proj = nn.Linear(2 * width, OUT)
        self.layer_norm1, self.layer_norm2, self.layer_norm3 = (nn.LayerNorm(OUT, eps=1e-6) for _ in range(3))

    def forward(self, pixels):
        seen = self.model_encoder(pixels)
        rows = self.layer_norm1(self.conv1(seen.features.transpose(1, 2)).transpose(1, 2))
        planes = rows.unflatten(1, (pixels.shape[2] // PATCH, -1)).permute(0, 3, 1, 2)
        rows = self.layer_norm2(self.conv2(planes).flatten(2).transpose(1, 2))
        return torch.cat([rows, self.layer_norm3(self.sum_proj(seen.summary))[:, None]], 1)


class Composed(nn.Module):
    def __init__(self, config):
        super().__init__()
        import transformers as tf
        from transformers.models.mbart.modeling_mbart import MBartDecoder

        self.config, text = config, config["decoder"]
        self.encoder = Encoder()
        self.decoder = MBartDecoder(tf.MBartConfig(**text, attn_implementation="eager"))
        self.lm_head = nn.Linear(text["d_model"], text["vocab_size"], bias=False)

    def forward(self, pixel_values, decoder_input_ids):
        seen = self.decoder(input_ids=decoder_input_ids, encoder_hidden_states=self.encoder(pixel_values), use_cache=False)
        return self.lm_head(seen.last_hidden_state)

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.state_dict(), folder / "model.safetensors", {"format": "pt"})

    def state_dict(self, *args, **kwargs):
        """Return the tensors as published."""
        tensors = {name: one for name, one in super().state_dict(*args, **kwargs).items() if "embed_positions" not in name}
        return {name: one.contiguous() for name, one in stored(tensors, TOWER).items()}


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)
        options = {"image_processor_type": "NemotronParseImageProcessor", "final_size": PAGE, "do_normalize": False}
        (folder / "preprocessor_config.json").write_text(json.dumps(options))


def build(seed, scaled=True):
    words = fast_tokenizer(CONTROLS, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    number = words.convert_tokens_to_ids
    ends = {"bos_token_id": number("<s>"), "eos_token_id": number("</s>"), "pad_token_id": number("<pad>")}
    shape = {"d_model": OUT, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    config = {
        "architectures": ["NemotronParseForConditionalGeneration"],
        "model_type": "nemotron_parse",
        "decoder": {**shape, "vocab_size": len(words), "scale_embedding": scaled, **ends},
        "decoder_start_token_id": number("</s>"),
        "encoder": VISION,
        "image_size": PAGE,
        "is_encoder_decoder": True,
        "max_sequence_length": 1024,
        "tie_word_embeddings": False,
        **ends,
    }
    model = Composed(config).eval()
    randomise(model, seed)
    model.decoder.embed_positions.weight.data.zero_()
    reset_scales(model.encoder.model_encoder)
    sharpen(model.encoder)
    for layer in model.decoder.layers:
        sharpen(layer.self_attn)
        layer.encoder_attn.out_proj.weight.data.mul_(4)  # the page outweighs the preceding text
    return model, Processor(tokenizer=words)


def load(folder):
    ensure_torchvision()
    import transformers as tf

    model = Composed(json.loads((folder / "config.json").read_text()))
    model.decoder.embed_positions.weight.data.zero_()
    tensors = load_file(folder / "model.safetensors") | {"decoder.embed_positions.weight": model.decoder.embed_positions.weight}
    load_with_radio(model, tensors, TOWER)
    return model.eval(), Processor(tokenizer=tf.PreTrainedTokenizerFast.from_pretrained(folder))


def fitted(width, height):
    ratio = width / height
    if height > PAGE[0]:
        width, height = int(PAGE[0] * ratio), PAGE[0]
    if width > PAGE[1]:
        width, height = PAGE[1], int(PAGE[1] / ratio)
    return width, height


def prompt(placeholders, seed):
    return f"</s><s>{''.join(TASKS)} def f{seed}(x): return" + " + x" * (seed % 5)


def call(processor, text, data):
    import cv2

    (image,) = data["image"]
    wide, tall = fitted(*image.size)
    page = np.full((*PAGE, 3), 255, np.uint8)
    top, left = (PAGE[0] - tall) // 2, (PAGE[1] - wide) // 2
    page[top : top + tall, left : left + wide] = cv2.resize(np.asarray(image), (wide, tall), interpolation=cv2.INTER_LINEAR)
    mean, std = (torch.tensor(one).view(3, 1, 1) for one in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    pixels = (torch.from_numpy(page).permute(2, 0, 1) / 255 - mean) / std
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return {"pixel_values": pixels[None], "input_ids": ids}


def run(model, inputs, answer, positions):
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.long)], 1)
    with torch.inference_mode():
        return model(inputs["pixel_values"], ids)[0].float()


def tensors(inputs, features):
    (feature,) = features
    squares = inputs["pixel_values"][0].unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH))
    yield "pixel_values", feature.kwargs["pixel_values"].data, squares.permute(1, 3, 0, 2, 4).reshape(-1, 3 * PATCH**2)


KEYS = [f"decoder.layers.{i}.{part}.k_proj.bias" for i in range(3) for part in ("self_attn", "encoder_attn")]
KEYS += [f"{TOWER}encoder.layer.{i}.attention.k_proj.bias" for i in range(3)]
FAMILY = Family(
    "nemotron_parse",
    build,
    placeholders={"image": ""},
    sizes={"image": [(90, 130), (60, 60), (30, 200), (200, 40)]},
    grid={"image": IMAGE_SIZES},
    refuses=lambda modality, size: not min(fitted(size[1], size[0])),
    cases=["i"] * 4,
    prompt=prompt,
    call=call,
    run=run,
    tensors=tensors,
    load=load,
    variants={"not scaled": {"scaled": False}},
    silent={
        **dict.fromkeys(KEYS, "adds the same to all scores of a row"),
        "decoder.embed_positions.weight": "the publisher's decoder has no positions, so the row sets them to zero",
    },
)
