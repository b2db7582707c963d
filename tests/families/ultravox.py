"""Ultravox in the parity suite, with windows of 2 s. The oracle is composed of transformers' parts."""

import json
from types import SimpleNamespace

import numpy as np
import torch
from family import AUDIO_SIZES, RATE, Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, sharpen, text_config
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

SECONDS, HOP, STACK = 2, 160, 8
WINDOW = SECONDS * RATE // HOP
PLACEHOLDER, RESERVED = "<|audio|>", "<|reserved|>"


class Projector(nn.Module):
    def __init__(self, config, norm):
        super().__init__()
        inner, out, self.middle = config["hidden_size"], config["text_config"]["hidden_size"], config["projector_ln_mid"]
        self.gated = config["projector_act"] == "swiglu"
        self.ln_pre = norm(STACK * config["audio_config"]["d_model"], eps=1e-6)
        self.linear_1 = nn.Linear(STACK * config["audio_config"]["d_model"], inner, bias=False)
        half = inner // 2 if self.gated else inner
        self.linear_2 = nn.Linear(half, out, bias=False)
        self.add_module("ln_mid" if self.middle else "ln_post", norm(half if self.middle else out, eps=1e-6))

    def forward(self, x):
        x = self.linear_1(self.ln_pre(x))
        if self.gated:
            x, gate = x.chunk(2, -1)
            x = F.silu(gate) * x
        else:
            x = F.gelu(x)
        return self.linear_2(self.ln_mid(x)) if self.middle else self.ln_post(self.linear_2(x))


class Composed(nn.Module):
    """Whisper's encoder layers per window with padding masked, rows stacked by eight, then the decoder."""

    def __init__(self, config):
        super().__init__()
        import transformers as tf
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        self.config = config
        self.audio_tower = WhisperEncoder(tf.WhisperConfig(**config["audio_config"], attn_implementation="eager"))
        self.multi_modal_projector = Projector(config, LlamaRMSNorm)
        text = tf.CONFIG_MAPPING[config["text_config"]["model_type"]](**config["text_config"])
        self.language_model = tf.AutoModelForCausalLM.from_config(text, attn_implementation="eager")

    def encode(self, frames, valid):
        tower = self.audio_tower
        x = F.gelu(tower.conv2(F.gelu(tower.conv1(frames.T[None])))).transpose(1, 2)
        x = x + tower.embed_positions.weight[: x.shape[1]]
        mask = torch.zeros(1, 1, 1, x.shape[1])
        mask[..., (valid + 1) // 2 :] = torch.finfo(torch.float32).min
        for layer in tower.layers:
            x = layer(x, mask)
            x = x[0] if isinstance(x, tuple) else x
        x = tower.layer_norm(x)[0]
        x = F.pad(x, (0, 0, 0, -len(x) % STACK)).reshape(-1, STACK * x.shape[1])
        return self.multi_modal_projector(x)[: -(-valid // (2 * STACK))]

    def forward(self, input_ids, windows=(), past_key_values=None, use_cache=True):
        embeds = self.language_model.get_input_embeddings()(input_ids)
        if windows:
            embeds[input_ids == self.config["audio_token_index"]] = torch.cat([self.encode(*window) for window in windows])
        return self.language_model(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=use_cache)

    def save_pretrained(self, folder, max_shard_size=None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tied = self.config["text_config"]["tie_word_embeddings"]
        tensors = {k: v.contiguous() for k, v in self.state_dict().items() if not (tied and k.endswith("lm_head.weight"))}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class Processor(SimpleNamespace):
    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)


def build(seed, tie=False, act="swiglu", middle=True, model_type="llama"):
    import transformers as tf

    words = fast_tokenizer(["</s>", RESERVED], eos_token="</s>", pad_token="</s>")
    audio = {"d_model": 64, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
    config = {
        "architectures": ["UltravoxModel"],
        "model_type": "ultravox",
        "audio_config": {**audio, "num_mel_bins": 24, "max_source_positions": WINDOW // 2},
        "text_config": {"model_type": model_type, **text_config(words, tie)},
        "audio_token_index": words.convert_tokens_to_ids(RESERVED),
        "hidden_size": 80,
        "stack_factor": STACK,
        "projector_act": act,
        "projector_ln_mid": middle,
    }
    model = Composed(config).eval()
    randomise(model, seed)
    for norm in (module for name, module in model.multi_modal_projector.named_children() if name.startswith("ln_")):
        norm.weight.data.add_(1)
    sharpen(model.audio_tower)
    extractor = tf.WhisperFeatureExtractor(feature_size=24, chunk_length=SECONDS)
    return model, Processor(tokenizer=words, feature_extractor=extractor)


def load(folder):
    ensure_torchvision()
    import transformers as tf

    model = Composed(json.loads((folder / "config.json").read_text()))
    missing, surplus = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not surplus
    assert set(missing) <= {"language_model.lm_head.weight"}
    words = tf.PreTrainedTokenizerFast.from_pretrained(folder)
    return model.eval(), Processor(tokenizer=words, feature_extractor=tf.WhisperFeatureExtractor.from_pretrained(folder))


def call(processor, text, data):
    """Process each audio alone, like the published processor, and tokenise the text between placeholders part by part."""
    encode, placeholder = processor.tokenizer.encode, processor.tokenizer.convert_tokens_to_ids(RESERVED)
    first, *others = text.split(PLACEHOLDER)
    ids, windows = encode(first, add_special_tokens=False), []
    for samples, part in zip(data.get("audio", ()), others, strict=True):
        samples = np.pad(samples, (0, max(0, 2 * HOP - len(samples))))
        options = {"padding": "longest", "pad_to_multiple_of": HOP, "truncation": False, "return_attention_mask": True}
        made = processor.feature_extractor(samples, sampling_rate=RATE, return_tensors="pt", **options)
        frames = made["input_features"][0].T.split(WINDOW)
        assert sum(map(len, frames)) == made["attention_mask"].sum()
        *whole, last = frames
        filled = F.pad(last, (0, 0, 0, WINDOW - len(last))) if whole else last  # a first window is not padded
        windows += [*((one, WINDOW) for one in whole), (filled, len(last))]
        ids += [placeholder] * sum(-(-len(one) // (2 * STACK)) for one in frames) + encode(part, add_special_tokens=False)
    return {"input_ids": torch.tensor([ids]), "windows": windows}


def tensors(inputs, features):
    ours = [part for one in features for part in _cut(one.kwargs)]
    for mine, (theirs, valid) in zip(ours, inputs["windows"], strict=True):
        yield "input_features", mine, theirs[:valid]


def _cut(kwargs):
    return kwargs["input_features"].data.split(kwargs["audio_frames"].data.tolist())


def run(model, inputs, answer, positions):
    with torch.inference_mode():
        first = model(**inputs)
        if len(answer) < 2:
            return first.logits[0].float()
        rest = model(torch.tensor([answer[:-1]]), past_key_values=first.past_key_values)
    return torch.cat([first.logits[0], rest.logits[0]]).float()


FAMILY = Family(
    "ultravox",
    build,
    placeholders={"audio": PLACEHOLDER},
    sizes={"audio": [(36_960,), (9001,), (70_234,)]},
    grid={"audio": [*AUDIO_SIZES, (1,), (319,), (2560,), (2561,), (32_000,), (32_001,)]},
    call=call,
    run=run,
    tensors=tensors,
    oracle_positions=lambda model, inputs: None,
    load=load,
    variants={
        "tied": {"tie": True},
        "norm last": {"middle": False},
        "plain activation": {"act": "gelu"},
        "another decoder": {"model_type": "qwen3"},
    },
)
