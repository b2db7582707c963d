"""Fun-ASR-Nano in the parity suite: transformers' layout and class, and the publisher's, composed of torch's layers."""

import json
from functools import partial

import numpy as np
import torch
from composed import ComposedModel, ComposedProcessor, load_composed, run_composed
from family import AUDIO_SIZES, RATE, Family
from oracle import fast_tokenizer, randomise, sharpen, text_config
from torch import nn
from torch.nn import functional as F

AUDIO = {"hf": "<|object_ref_start|>", "vllm": "<|AUDIO|>"}
STACK, STRIDE = 7, 6


def fbank(samples, bands, scale):
    """Return Kaldi's log-mel frames, stacked."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    filters = mel_filter_bank(257, bands, 20, RATE // 2, RATE, None, "kaldi", triangularize_in_mel_space=True)
    options = {"power": 2.0, "center": False, "preemphasis": 0.97, "log_mel": "log", "mel_floor": 1.192092955078125e-07}
    window = window_function(400, "hamming", periodic=False)
    frames = spectrogram(
        samples * scale, window, 400, 160, 512, mel_filters=filters, remove_dc_offset=True, dtype=np.float32, **options
    ).T
    count = -(-len(frames) // STRIDE)
    index = (np.arange(count)[:, None] * STRIDE + np.arange(STACK) - STACK // 2).clip(0, len(frames) - 1)
    return torch.from_numpy(frames[index].reshape(count, -1))


def build(seed, tie=False, bands=16, heads=4, taps=5):
    import transformers as tf

    words = fast_tokenizer(["<|endoftext|>", AUDIO["hf"]], eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    audio = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 5, "num_timestamp_prediction_layers": 2}
    audio |= {"num_mel_bins": bands, "num_attention_heads": heads, "fsmn_kernel_size": taps}
    text = text_config(words, tie)
    adaptor = {"hidden_size": 64, "intermediate_size": 16, "num_attention_heads": 4, "projector_hidden_size": 80}
    config = tf.FunAsrNanoConfig(
        audio_config=audio,
        adaptor_config=adaptor,
        text_config=tf.Qwen3Config(**text, head_dim=16),
        audio_token_id=words.convert_tokens_to_ids(AUDIO["hf"]),
        tie_word_embeddings=tie,
    )
    model = tf.FunAsrNanoForConditionalGeneration(config).eval()
    randomise(model, seed)
    sharpen(model.model.audio_tower)
    sharpen(model.model.multi_modal_projector)
    files = {"feature_extractor_type": "FunAsrNanoFeatureExtractor", "feature_size": bands, "sampling_rate": RATE}
    return model, ComposedProcessor(tokenizer=words, config=config, preprocessor=files)


def load(folder):
    import transformers as tf

    made = tf.FunAsrNanoForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    files = json.loads((folder / "preprocessor_config.json").read_text())
    words = tf.PreTrainedTokenizerFast.from_pretrained(folder)
    return made.eval(), ComposedProcessor(tokenizer=words, config=made.config, preprocessor=files)


def expanded(processor, text, audio, rows):
    for count in rows:
        text = text.replace(audio, "<|held|>" * count, 1)
    return processor.tokenizer(text.replace("<|held|>", audio), return_tensors="pt")["input_ids"]


def call(processor, text, data):
    features = [fbank(one, processor.preprocessor["feature_size"], 1) for one in data.get("audio", ())]
    ids = expanded(processor, text, AUDIO["hf"], [len(one) for one in features])
    found = {"input_ids": ids}
    if features:
        longest = max(len(one) for one in features)
        found["input_features"] = torch.stack([F.pad(one, (0, 0, 0, longest - len(one))) for one in features])
        found["input_features_mask"] = torch.stack([torch.arange(longest) < len(one) for one in features]).long()
    return found


def tensors(inputs, features):
    masks = inputs["input_features_mask"].bool()
    for feature, theirs, mask in zip(features, inputs["input_features"], masks, strict=True):
        yield "input_features", feature.kwargs["input_features"].data, theirs[mask]


class Memory(nn.Module):
    """The publisher's attention: one projection, and a convolution over the values."""

    def __init__(self, inputs, width, heads, taps):
        super().__init__()
        self.heads, self.taps = heads, taps
        self.linear_q_k_v, self.linear_out = nn.Linear(inputs, 3 * width), nn.Linear(width, width)
        self.fsmn_block = nn.Conv1d(width, width, taps, groups=width, bias=False)

    def forward(self, x):
        q, k, v = self.linear_q_k_v(x).chunk(3, -1)
        before = (self.taps - 1) // 2
        memory = self.fsmn_block(F.pad(v.T, (before, self.taps - 1 - before))).T + v
        return attended(q, k, v, self.heads, self.linear_out) + memory


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        return attended(self.linear_q(x), self.linear_k(x), self.linear_v(x), self.heads, self.linear_out)


def attended(q, k, v, heads, out):
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in (q, k, v))
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    return out((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))


class Block(nn.Module):
    def __init__(self, inputs, width, inner, attention, eps):
        super().__init__()
        self.residual = inputs == width
        self.self_attn = attention
        self.feed_forward = nn.ModuleDict({"w_1": nn.Linear(width, inner), "w_2": nn.Linear(inner, width)})
        self.norm1, self.norm2 = nn.LayerNorm(inputs, eps=eps), nn.LayerNorm(width, eps=eps)

    def forward(self, x):
        x = self.self_attn(self.norm1(x)) + (x if self.residual else 0)
        return x + self.feed_forward["w_2"](F.relu(self.feed_forward["w_1"](self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self, c, inputs):
        super().__init__()
        width, taps = c["output_size"], c["kernel_size"]

        def blocks(count, inner=width):
            parts = (Memory(inner, width, c["attention_heads"], taps) for _ in range(count))
            return nn.ModuleList(Block(inner, width, c["linear_units"], part, 1e-5) for part in parts)

        self.encoders0, self.encoders, self.tp_encoders = (
            blocks(1, inputs),
            blocks(c["num_blocks"] - 1),
            blocks(c["tp_blocks"]),
        )
        self.after_norm, self.tp_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        n, half = x.shape[0], x.shape[1] // 2
        rates = torch.exp(torch.arange(half) * (-np.log(10_000.0) / (half - 1))).float()
        angles = torch.arange(1, n + 1)[:, None] * rates
        x = x * self.after_norm.normalized_shape[0] ** 0.5 + torch.cat((angles.sin(), angles.cos()), 1)
        for block in (*self.encoders0, *self.encoders):
            x = block(x)
        x = self.after_norm(x)
        for block in self.tp_encoders:
            x = block(x)
        return self.tp_norm(x)


class Composed(ComposedModel):
    """The publisher's model; the first rows of the adaptor are used, an eighth of them."""

    def __init__(self, config):
        super().__init__(config)
        import transformers as tf

        encoder, width = config["audio_encoder_conf"], config["hidden_size"]
        self.audio_encoder = Encoder(encoder, STACK * 80)
        layers = nn.ModuleList(Block(width, width, width // 4, Attention(width, 8), 1e-12) for _ in range(2))
        parts = {"linear1": nn.Linear(encoder["output_size"], 2048), "linear2": nn.Linear(2048, width), "blocks": layers}
        self.audio_adaptor = nn.ModuleDict(parts)
        text = {key: value for key, value in config.items() if key not in ("audio_encoder_conf", "architectures", "model_type")}
        self.llm = tf.Qwen3ForCausalLM._from_config(tf.Qwen3Config(**text), attn_implementation="eager")

    @property
    def decoder(self):
        return self.llm

    def encode(self, features):
        adaptor = self.audio_adaptor
        x = adaptor["linear2"](F.relu(adaptor["linear1"](self.audio_encoder(features))))
        for block in adaptor["blocks"]:
            x = block(x)
        return x[: tokens(features)]


def tokens(features):
    """Return the publisher's number of tokens, after three halvings."""
    count = len(features)
    for _ in range(3):
        count = (count - 1) // 2 + 1
    return count


def build_published(seed):
    words = fast_tokenizer(["<|endoftext|>", AUDIO["vllm"]], eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    encoder = {"output_size": 48, "attention_heads": 4, "linear_units": 64, "num_blocks": 3, "tp_blocks": 2, "kernel_size": 5}
    config = {
        "architectures": ["FunASRForConditionalGeneration"],
        "model_type": "qwen3",
        "audio_encoder_conf": encoder,
        "audio_token_id": words.convert_tokens_to_ids(AUDIO["vllm"]),
        **text_config(words),
        "head_dim": 16,
    }
    model = Composed(config).eval()
    randomise(model, seed)
    for name, weight in model.named_parameters():
        if "linear_q_k_v.weight" in name:
            weight.data[: 2 * len(weight) // 3] *= 3
        if name.endswith(("linear_q.weight", "linear_k.weight")):
            weight.data *= 5
    frontend = {"fs": RATE, "window": "hamming", "n_mels": 80, "frame_length": 25, "frame_shift": 10, "cmvn_file": None}
    frontend |= {"lfr_m": STACK, "lfr_n": STRIDE}
    files = {"feature_extractor_type": "FunASRFeatureExtractor", "feature_size": 80, "frontend_conf": frontend}
    return model, ComposedProcessor(tokenizer=words, config=config, preprocessor=files)


def call_published(processor, text, data):
    features = [fbank(one, 80, 32768) for one in data.get("audio", ())]
    ids = expanded(processor, text, AUDIO["vllm"], [tokens(one) for one in features])
    return {"input_ids": ids, "audio": [(one,) for one in features]}


def tensors_published(inputs, features):
    for feature, (theirs,) in zip(features, inputs["audio"], strict=True):
        yield "input_features", feature.kwargs["input_features"].data, theirs


KEYS = "a key bias adds the same to all scores of a row"
SIZES = {
    "sizes": {"audio": [(30_000,), (9001,), (81_234,)]},
    "grid": {"audio": [*AUDIO_SIZES, (399,), (1359,), (1360,), (8079,), (8080,)]},
    "refuses": lambda modality, size: size[0] < 400,  # too short for one frame
    "tensor_tolerance": 2e-3,  # logarithms of bands with little energy
}
FAMILIES = [
    Family(
        "fun_asr_nano",
        build,
        placeholders={"audio": AUDIO["hf"]},
        call=call,
        load=load,
        tensors=tensors,
        silent={
            f"model.{part}.layers.{i}.self_attn.k_proj.bias": KEYS
            for part, layers in (("audio_tower", 5), ("multi_modal_projector", 2))
            for i in range(layers)
        },
        variants={
            "tied": {"tie": True},
            "more bands, wide heads": {"bands": 24, "heads": 2},
            "a memory of 4 rows": {"taps": 4},
        },
        **SIZES,
    ),
    Family(
        "funasr",
        build_published,
        placeholders={"audio": AUDIO["vllm"]},
        call=call_published,
        run=run_composed,
        load=partial(load_composed, Composed),
        tensors=tensors_published,
        silent={f"audio_adaptor.blocks.{i}.self_attn.linear_k.bias": KEYS for i in range(2)},
        fullest={"audio": [(84_720,)]},  # the rows of the encoder are a multiple of 8
        oracle_positions=lambda model, inputs: None,
        **SIZES,
    ),
]
