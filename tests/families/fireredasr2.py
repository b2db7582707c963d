"""FireRedASR2-LLM in the parity suite.

The oracle is composed of torch's layers and transformers' Qwen2, as the publisher's code and vLLM's class describe them.
"""

from functools import partial

import numpy as np
import torch
from composed import ComposedModel, ComposedProcessor, load_composed, run_composed
from family import AUDIO_SIZES, RATE, Family
from oracle import fast_tokenizer, randomise, text_config
from torch import nn
from torch.nn import functional as F

AUDIO = "<|AUDIO|>"


class Attention(nn.Module):
    """Transformer-XL's attention, with a norm each for queries, keys and values."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.layer_norm_q, self.layer_norm_k, self.layer_norm_v = (nn.LayerNorm(width) for _ in range(3))
        self.w_qs, self.w_ks, self.w_vs, self.fc, self.linear_pos = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.empty(heads, width // heads)) for _ in range(2))

    def forward(self, x):
        n, width = x.shape
        q, k, v = self.w_qs(self.layer_norm_q(x)), self.w_ks(self.layer_norm_k(x)), self.w_vs(self.layer_norm_v(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v))
        rates = 10_000.0 ** (-torch.arange(0, width, 2).float() / width)
        places = torch.arange(n)
        angles = (places[:, None] - places)[..., None] * rates  # of each distance from a key to its query
        sines = torch.stack((angles.sin(), angles.cos()), -1).flatten(2)
        far = self.linear_pos(sines).unflatten(-1, (self.heads, -1))  # [queries, keys, heads, dim]
        scores = torch.einsum("qhd,khd->hqk", q + self.pos_bias_u, k) + torch.einsum("qhd,qkhd->hqk", q + self.pos_bias_v, far)
        weights = (scores * (width // self.heads) ** -0.5).softmax(-1)
        return self.fc(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))


class Convolution(nn.Module):
    def __init__(self, width, taps):
        super().__init__()
        self.pre_layer_norm, self.batch_norm = nn.LayerNorm(width), nn.LayerNorm(2 * width)
        self.pointwise_conv1 = nn.Conv1d(width, 4 * width, 1, bias=False)
        self.depthwise_conv = nn.Conv1d(2 * width, 2 * width, taps, padding=taps // 2, groups=2 * width, bias=False)
        self.pointwise_conv2 = nn.Conv1d(2 * width, width, 1, bias=False)

    def forward(self, x):
        x = self.depthwise_conv(F.glu(self.pointwise_conv1(self.pre_layer_norm(x).T), 0))
        return self.pointwise_conv2(F.silu(self.batch_norm(x.T)).T).T


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        layers = (nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Identity(), nn.Linear(4 * width, width))
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.net(x)


class Layer(nn.Module):
    def __init__(self, width, heads, taps):
        super().__init__()
        self.ffn1, self.mhsa, self.conv, self.ffn2 = (
            FeedForward(width),
            Attention(width, heads),
            Convolution(width, taps),
            FeedForward(width),
        )
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, x):
        x = 0.5 * x + 0.5 * self.ffn1(x)
        x = x + self.mhsa(x)
        x = x + self.conv(x)
        return self.layer_norm(0.5 * x + 0.5 * self.ffn2(x))


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        width, bands = c["d_model"], ((c["idim"] - 1) // 2 - 1) // 2
        conv = nn.Sequential(nn.Conv2d(1, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 32, 3, 2), nn.ReLU())
        self.input_preprocessor = nn.ModuleDict({"conv": conv, "out": nn.Linear(32 * bands, width)})
        self.layer_stack = nn.ModuleList(Layer(width, c["n_head"], c["kernel_size"]) for _ in range(c["n_layers_enc"]))
        self.positional_encoding = nn.Module()  # a table of sines that is part of the checkpoint
        self.positional_encoding.register_buffer("pe", torch.zeros(1, 9, width))

    def forward(self, frames):
        x = self.input_preprocessor["conv"](F.pad(frames, (0, 0, 0, 6))[None])
        x = self.input_preprocessor["out"](x.transpose(0, 1).flatten(1))
        for layer in self.layer_stack:
            x = layer(x)
        return x


class Composed(ComposedModel):
    def __init__(self, config):
        super().__init__(config)
        import transformers as tf

        text = {key: value for key, value in config.items() if key not in ("audio_encoder_conf", "architectures", "model_type")}
        self.encoder, group = Encoder(config["audio_encoder_conf"]), config["encoder_downsample_rate"]
        inputs, width = group * config["audio_encoder_conf"]["d_model"], config["hidden_size"]
        layers = {"linear1": nn.Linear(inputs, width), "linear2": nn.Linear(width, width)}
        self.encoder_projector = nn.ModuleDict(layers)
        self.llm = tf.Qwen2ForCausalLM._from_config(tf.Qwen2Config(**text), attn_implementation="eager")

    @property
    def decoder(self):
        return self.llm

    def encode(self, frames):
        rows, group, projector = self.encoder(frames), self.config["encoder_downsample_rate"], self.encoder_projector
        joined = rows[: len(rows) // group * group].reshape(-1, group * rows.shape[1])
        return projector["linear2"](projector["linear1"](joined).relu())


def build(seed, bands=80, heads=4, taps=9, group=2, width=48):
    words = fast_tokenizer(["<|endoftext|>", AUDIO], eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    audio = {"idim": bands, "n_layers_enc": 3, "n_head": heads, "d_model": width, "kernel_size": taps, "pe_maxlen": 5000}
    config = {
        "architectures": ["FireRedASR2ForConditionalGeneration"],
        "model_type": "qwen2",
        "audio_encoder_conf": audio,
        "encoder_downsample_rate": group,
        "audio_token_id": words.convert_tokens_to_ids(AUDIO),
        **text_config(words),
    }
    model = Composed(config).eval()
    randomise(model, seed)
    for layer in model.encoder.layer_stack:
        layer.mhsa.w_qs.weight.data *= 3
    gen = torch.Generator().manual_seed(seed)
    files = {
        "feature_extractor_type": "FireRedASR2FeatureExtractor",
        "processor_class": "FireRedASR2Processor",
        "num_mel_bins": bands,
        "dim": bands,
        "sampling_rate": RATE,
        "means": (10 + torch.randn(bands, generator=gen)).tolist(),
        "inverse_std_variences": (0.2 + 0.1 * torch.rand(bands, generator=gen)).tolist(),
    }
    return model, ComposedProcessor(tokenizer=words, config=config, preprocessor=files)


def fbank(samples, files):
    """Return Kaldi's log-mel frames, normalised."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    filters = mel_filter_bank(257, files["num_mel_bins"], 20, RATE // 2, RATE, None, "kaldi", triangularize_in_mel_space=True)
    options = {"power": 2.0, "center": False, "preemphasis": 0.97, "log_mel": "log", "mel_floor": 1.192092955078125e-07}
    window = window_function(400, "povey", periodic=False)
    frames = spectrogram(
        samples * 32768.0, window, 400, 160, 512, mel_filters=filters, remove_dc_offset=True, dtype=np.float32, **options
    ).T
    return torch.from_numpy((frames - np.array(files["means"])) * np.array(files["inverse_std_variences"])).float()


def call(processor, text, data):
    features = [fbank(one, processor.preprocessor) for one in data.get("audio", ())]
    for one in features:
        text = text.replace(AUDIO, "<|held|>" * (-(-len(one) // 4) // processor.config["encoder_downsample_rate"]), 1)
    ids = processor.tokenizer(text.replace("<|held|>", AUDIO), return_tensors="pt")["input_ids"]
    return {"input_ids": ids, "audio": [(one,) for one in features]}


def tensors(inputs, features):
    for feature, (theirs,) in zip(features, inputs["audio"], strict=True):
        yield "input_features", feature.kwargs["input_features"].data, theirs


FAMILY = Family(
    "fireredasr2",
    build,
    placeholders={"audio": AUDIO},
    sizes={"audio": [(30_000,), (9001,), (81_234,)]},
    grid={"audio": [*AUDIO_SIZES, (1039,), (1040,), (2319,), (2320,)]},
    refuses=lambda modality, size: size[0] < 1040,  # one row of the encoder, half a token
    call=call,
    run=run_composed,
    load=partial(load_composed, Composed),
    tensors=tensors,
    silent={
        f"encoder.layer_stack.{i}.mhsa.layer_norm_k.bias": "a key bias adds the same to all scores of a row" for i in range(3)
    },
    tensor_tolerance=2e-3,  # logarithms of bands with little energy
    oracle_positions=lambda model, inputs: None,
    fullest={"audio": [(400 + 160 * (4 * 749 - 1),)]},  # 749 rows of the encoder, the last of which is dropped
    fullest_items=1,
    variants={
        "more bands, wide heads": {"bands": 96, "heads": 2},
        "three rows per token": {"group": 3},
        "a wide convolution": {"taps": 33},
    },
)
