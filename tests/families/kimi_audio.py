"""Kimi-Audio in the parity suite, with windows of 2 s.

The oracle has the publisher's two streams of tokens. Codes of audio are the blank, since their tokenizer is another checkpoint.
"""

import json

import torch
from composed import ComposedModel, ComposedProcessor, run_composed
from family import AUDIO_SIZES, RATE, Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from safetensors.torch import load_file, save_file
from torch import nn

SECONDS, GROUP, FOLDER = 2, 4, "whisper-large-v3"
BEGIN, BLANK, END = "<|im_media_begin|>", "<|im_kimia_text_blank|>", "<|im_media_end|>"
CONTROLS = ["<|endoftext|>", BEGIN, BLANK, END, "<|im_kimia_user_msg_start|>", "<|im_msg_end|>"]
WINDOW = SECONDS * RATE


class Composed(ComposedModel):
    def __init__(self, config, audio):
        super().__init__(config)
        import transformers as tf
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        text = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        whole = tf.Qwen2ForCausalLM._from_config(tf.Qwen2Config(**text), attn_implementation="eager")
        self.whole, self.audio, width = [whole], audio, config["hidden_size"]
        self.model, self.lm_head, self.mimo_output = whole.model, whole.lm_head, nn.Linear(width, config["vocab_size"], False)
        layers = [nn.Linear(GROUP * audio["d_model"], width), nn.SiLU(), nn.Dropout(0.0), nn.Linear(width, width)]
        self.model.vq_adaptor = nn.ModuleDict({"layers": nn.Sequential(*layers, nn.LayerNorm(width, eps=1e-6))})
        self.audio_tower = WhisperEncoder(tf.WhisperConfig(**audio, attn_implementation="eager"))

    def forward(self, input_ids, audio=(), past_key_values=None):
        blank = torch.full_like(input_ids, self.config["kimia_text_blank_token_id"])
        table, controls = self.model.embed_tokens, input_ids >= 626
        speech, text = torch.where(controls, input_ids, blank), torch.where(controls, blank, input_ids)
        embeds = table(speech)
        if audio:
            heard = input_ids == blank
            rows = self.model.vq_adaptor["layers"](torch.cat([self.encode(*item) for item in audio]))
            embeds[heard] = (embeds[heard] + rows) * 2**0.5
        embeds = embeds + table(text)
        return self.whole[0](inputs_embeds=embeds, past_key_values=past_key_values, use_cache=True)

    def encode(self, windows, samples):
        parts = []
        for number, frames in enumerate(windows):
            rows = self.audio_tower(frames[None]).last_hidden_state[0]
            count = min(samples - number * WINDOW, WINDOW)
            parts.append(rows[: ((count - 1) // (160 * 8) + 1) * GROUP])
        return torch.cat(parts).reshape(-1, GROUP * self.audio["d_model"])

    def save_pretrained(self, folder, max_shard_size=None):
        tensors = {name: value.contiguous() for name, value in self.state_dict().items()}
        own = {name: value for name, value in tensors.items() if not name.startswith("audio_tower.")}
        tower = {f"model.encoder.{name[12:]}": value for name, value in tensors.items() if name not in own}
        tower["model.decoder.layer_norm.weight"] = torch.ones(4)  # not used
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(own, folder / "model.safetensors", {"format": "pt"})
        (folder / FOLDER / "config.json").write_text(json.dumps({"model_type": "whisper", **self.audio}))
        shard = "model-00001-of-00001.safetensors"
        save_file(tower, folder / FOLDER / shard, {"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(tower, shard)}
        (folder / FOLDER / "model.safetensors.index.json").write_text(json.dumps(index))


class Processor(ComposedProcessor):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)
        self.extractor.save_pretrained(folder / FOLDER)


def build(seed, heads=4, mels=24):
    import transformers as tf

    words = fast_tokenizer(CONTROLS, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    audio = {"d_model": 32, "encoder_ffn_dim": 128, "encoder_layers": 3, "encoder_attention_heads": heads}
    audio |= {"num_mel_bins": mels, "max_source_positions": 50 * SECONDS}
    config = {
        "architectures": ["MoonshotKimiaForCausalLM"],
        "model_type": "kimi_audio",
        "use_whisper_feature": True,
        "kimia_adaptor_input_dim": GROUP * audio["d_model"],
        "kimia_text_blank_token_id": words.convert_tokens_to_ids(BLANK),
        **text_config(words),
        "rms_norm_eps": 1e-6,
    }
    model = Composed(config, audio).eval()
    randomise(model, seed)
    last = model.model.vq_adaptor["layers"][4]
    last.weight.data.add_(1)  # randomise() does not take it for a norm
    sharpen(model.audio_tower)
    extractor = tf.WhisperFeatureExtractor(feature_size=mels, chunk_length=SECONDS)
    return model, Processor(tokenizer=words, extractor=extractor)


def load(folder):
    ensure_torchvision()
    import transformers as tf

    audio = json.loads((folder / FOLDER / "config.json").read_text())
    model = Composed(json.loads((folder / "config.json").read_text()), {k: v for k, v in audio.items() if k != "model_type"})
    tower = load_file(folder / FOLDER / "model-00001-of-00001.safetensors")
    stored = {f"audio_tower.{name[14:]}": value for name, value in tower.items() if name.startswith("model.encoder.")}
    model.load_state_dict(load_file(folder / "model.safetensors") | stored)
    words = tf.PreTrainedTokenizerFast.from_pretrained(folder)
    return model.eval(), Processor(tokenizer=words, extractor=tf.WhisperFeatureExtractor.from_pretrained(folder / FOLDER))


def call(processor, text, data):
    items = []
    for one in data.get("audio", ()):
        parts = [one[start : start + WINDOW] for start in range(0, len(one), WINDOW)]
        frames = processor.extractor(parts, sampling_rate=RATE, return_tensors="pt")["input_features"]
        items.append((frames, len(one)))
        rows = sum((len(part) - 1) // (160 * 8) + 1 for part in parts)
        text = text.replace(BLANK, "<held>" * rows, 1)
    ids = processor.tokenizer(text.replace("<held>", BLANK), return_tensors="pt")["input_ids"]
    return {"input_ids": ids, "audio": items}


def tensors(inputs, features):
    for feature, (theirs, _) in zip(features, inputs["audio"], strict=True):
        lengths = feature.kwargs["audio_frames"].data.tolist()
        for frames, window in zip(feature.kwargs["input_features"].data.split(lengths), theirs, strict=True):
            yield "input_features", frames, window.T[: len(frames)]


FAMILY = Family(
    "kimi_audio",
    build,
    placeholders={"audio": BEGIN + BLANK + END},
    sizes={"audio": [(30_000,), (9000,), (81_234,)]},
    grid={"audio": [*AUDIO_SIZES, (1,), (1280,), (1281,), (32_001,), (64_000,)]},
    call=call,
    run=run_composed,
    load=load,
    tensors=tensors,
    silent={"mimo_output.": "makes speech"},
    variants={"wide heads, more bands": {"heads": 2, "mels": 80}},
)
