"""MiDashengLM in the parity suite, with chunks of 1 s.

The oracle is composed of torch's layers and transformers' Qwen2, as the publisher's modelling file describes them.
"""

from functools import partial

import torch
from composed import ComposedModel, ComposedProcessor, expand_audio, load_composed, run_composed, text_positions
from family import AUDIO_SIZES, RATE, Family
from oracle import AUDIO_SPECIALS, fast_tokenizer, randomise, text_config
from torch import nn
from torch.nn import functional as F

HOP, FFT = 160, 512
AUDIO, START, END = AUDIO_SPECIALS


class Block(nn.Module):
    def __init__(self, width, heads, inner, scaled):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})
        for name in ("ls1", "ls2") if scaled else ():
            self.register_module(name, nn.Module())
            getattr(self, name).gamma = nn.Parameter(torch.empty(width))

    def forward(self, x, valid):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(0, 1) for part in self.attn["qkv"](self.norm1(x)).chunk(3, -1)
        )
        scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
        scores[..., valid:] = torch.finfo(torch.float32).min
        x = x + self._scaled("ls1", self.attn["proj"]((scores.softmax(-1) @ v).transpose(0, 1).flatten(1)))
        return x + self._scaled("ls2", self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x)))))

    def _scaled(self, name, x):
        return x * getattr(self, name).gamma if hasattr(self, name) else x


class Encoder(nn.Module):
    """One item: a patch is masked unless all its frames start before the end of the audio."""

    def __init__(self, c):
        super().__init__()
        width, (bands, patch) = c["embed_dim"], c["patch_size"]
        self.patch, self.chunk = patch, c["target_length"] // patch
        self.init_bn = nn.BatchNorm2d(bands)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(1, width, (bands, patch), (bands, patch))})
        self.time_pos_embed = nn.Parameter(torch.empty(1, width, 1, self.chunk))
        self.freq_pos_embed = nn.Parameter(torch.empty(1, width, 1, 1))
        inner = int(width * c["mlp_ratio"])
        self.blocks = nn.ModuleList(Block(width, c["num_heads"], inner, c["init_values"]) for _ in range(c["depth"]))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, decibels, samples):
        x = self.init_bn(decibels.T[None, :, None]).transpose(1, 2)  # [1, 1, bands, frames]
        x, valid, out = self.patch_embed["proj"](x), samples // (HOP * self.patch), []
        for part in x.split(self.chunk, -1):
            part = (part + self.time_pos_embed[..., : part.shape[-1]] + self.freq_pos_embed).flatten(2)[0].T
            for block in self.blocks:
                part = block(part, max(0, valid))
            out.append(self.norm(part))
            valid -= self.chunk
        return torch.cat(out)


class Composed(ComposedModel):
    def __init__(self, config):
        super().__init__(config)
        import transformers as tf

        width = config["audio_encoder_config"]["embed_dim"]
        text = {key: value for key, value in config["text_config"].items() if key not in ("model_type", "rope_scaling")}
        out = text["hidden_size"]
        self.audio_encoder = Encoder(config["audio_encoder_config"])
        group = config["subsample_factor"]
        self.audio_projector = nn.ModuleDict(
            {"net": nn.Sequential(nn.Linear(group * width, out), nn.GELU(), nn.Linear(out, out))}
        )
        self.decoder = tf.Qwen2ForCausalLM._from_config(tf.Qwen2Config(**text), attn_implementation="eager")

    def encode(self, decibels, samples):
        rows, group = self.audio_encoder(decibels, samples), self.config["subsample_factor"]
        return self.audio_projector["net"](rows[: len(rows) // group * group].reshape(-1, group * rows.shape[1]))


def build(seed, width=64, heads=4, init_values=None, bands=32, chunk=25, subsample=5):
    words = fast_tokenizer(["<|endoftext|>", *AUDIO_SPECIALS], eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    audio = {"embed_dim": width, "depth": 3, "num_heads": heads, "mlp_ratio": 2.0, "init_values": init_values, "qkv_bias": True}
    audio |= {"n_mels": bands, "patch_size": [bands, 4], "patch_stride": [bands, 4], "target_length": 4 * chunk, "n_fft": FFT}
    audio |= {"hop_length": HOP, "win_length": FFT, "f_min": 0.0, "f_max": 8000.0, "center": True, "sample_rate": RATE}
    text = {"model_type": "qwen2_5_omni_text", **text_config(words), "rope_theta": 1e4}
    text["rope_scaling"] = {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"}
    config = {
        "architectures": ["MiDashengLMModel"],
        "model_type": "midashenglm",
        "audio_encoder_config": {"model_type": "midashenglm_dasheng_encoder", "input_channels": 1, "outputdim": 527, **audio},
        "audio_token_id": words.convert_tokens_to_ids(AUDIO),
        "subsample_factor": subsample,
        "text_config": text,
    }
    model = Composed(config).eval()
    randomise(model, seed)
    encoder, gen = model.audio_encoder, torch.Generator().manual_seed(seed)
    encoder.init_bn.weight.data.add_(1)
    encoder.init_bn.running_mean.copy_(torch.randn(bands, generator=gen) * 5 - 20)
    encoder.init_bn.running_var.copy_(torch.rand(bands, generator=gen) * 100 + 300)
    for block in encoder.blocks:
        block.attn["qkv"].weight.data[: 2 * width] *= 3
    files = {
        "feature_extractor_type": "Wav2Vec2FeatureExtractor",
        "feature_size": 1,
        "sampling_rate": RATE,
        "do_normalize": False,
    }
    return model, ComposedProcessor(tokenizer=words, config=config, preprocessor=files)


def decibels(samples, audio):
    """Return `[frames, bands]`: HTK filters, of equal height, on the power spectrum, at most 120 dB below the loudest band."""
    from transformers.audio_utils import mel_filter_bank

    filters = mel_filter_bank(FFT // 2 + 1, audio["n_mels"], audio["f_min"], audio["f_max"], RATE, None, "htk")
    window = torch.hann_window(FFT)
    spectrum = torch.stft(torch.from_numpy(samples), FFT, HOP, FFT, window, center=True, return_complex=True).abs() ** 2
    loud = 10 * (torch.from_numpy(filters).float().T @ spectrum).clamp(min=1e-10).log10()
    return loud.clamp(min=float(loud.max()) - 120).T


def call(processor, text, data):
    config, samples = processor.config, data.get("audio", ())
    rows = [int(1 + len(one) / HOP) // 4 // config["subsample_factor"] for one in samples]
    ids = processor.tokenizer.encode(expand_audio(text, rows, AUDIO_SPECIALS), add_special_tokens=False)
    audio = [(decibels(one, config["audio_encoder_config"]), len(one)) for one in samples]
    return {"input_ids": torch.tensor([ids]), "audio": audio}


def tensors(inputs, features):
    for feature, (frames, _) in zip(features, inputs["audio"], strict=True):
        yield "input_features", feature.kwargs["input_features"].data, frames


def prompt(placeholders, seed):
    """Leave out the tokens around the audio in some prompts."""
    around = [START + one + END if seed % 2 else one for one in placeholders]
    return f"def f{seed}(x):" + " and ".join(around) + " return it"


FAMILY = Family(
    "midashenglm",
    build,
    placeholders={"audio": AUDIO},
    # 12,799 and 54,399 samples end in a masked patch that is part of a row, and 48,000 in a lone one that is not
    sizes={"audio": [(12_799,), (30_000,), (54_399,), (48_000,)]},
    grid={"audio": [*AUDIO_SIZES, (3039,), (3040,), (6239,), (6240,), (64_001,)]},
    refuses=lambda modality, size: size[0] < 3040,  # too short for one row
    prompt=prompt,
    call=call,
    run=run_composed,
    tensors=tensors,
    tensor_tolerance=2e-3,  # decibels
    oracle_positions=text_positions,
    load=partial(load_composed, Composed),
    silent={"audio_encoder.init_bn.num_batches_tracked": "a counter of training"},
    variants={
        "layer scale": {"init_values": 1e-5},
        "wide heads, more bands, rows joined by four": {"width": 96, "heads": 2, "bands": 64, "subsample": 4},
    },
)
