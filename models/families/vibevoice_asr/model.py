"""VibeVoice-ASR (arXiv 2601.18184): two causal encoders of waveforms, whose projected rows are added, and Qwen2.

The published class adds noise to the rows of the first encoder unless it is called with `sample=False`; here, as in vLLM, rows
are without noise, so that they can be cached. Sources: the class of transformers 5.23; vLLM's vibevoice_asr.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....checkpoints.config import check_activation, positive_int, positive_number
from ....kernels.activation import activation
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.basic import TensorModule
from ...layers.builder import Builder
from ...layers.convolution import Past
from ...memory_formulas import SMALL, OpBytes
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from .config import hub_config, hub_name, section_of

_PART = 16  # rows that are computed at once
_NORM_EPS = 1e-6  # of the projectors
_DEFAULTS: dict[str, Any] = {
    "channels": 1, "hidden_size": 64, "kernel_size": 7, "rms_norm_eps": 1e-5, "num_filters": 32, "hidden_act": "gelu",
    "downsampling_ratios": (2, 2, 4, 5, 5, 8), "depths": (3, 3, 3, 3, 3, 3, 8), "ffn_expansion": 4,
}  # fmt: skip
ENCODERS: Mapping[str, Mapping[str, Any]] = {"acoustic": {}, "semantic": {"hidden_size": 128}}
"""The encoders, and what differs from the defaults in those that config.json has no section of."""


@dataclass(frozen=True)
class WaveEncoderSpec:
    """An encoder of samples.

    Args:
        out: numbers per row. filters: channels of the first stage; each further stage has twice as many.
        taps: of the convolutions that keep the rate. ratios: by which the rate falls before each further stage.
        depths: layers of each stage. expansion: width of their MLPs in channels.
    """

    out: int
    filters: int
    taps: int
    ratios: tuple[int, ...]
    depths: tuple[int, ...]
    expansion: int
    act: str
    eps: float

    @property
    def hop(self) -> int:
        """Samples per row."""
        return prod(self.ratios)


def wave_encoder_spec(config: Mapping[str, Any], kind: str) -> WaveEncoderSpec:
    """Read the config of one encoder. Raise ConfigError for several channels, or for ratios and depths that do not fit."""
    section = f"{kind}_tokenizer_encoder_config"
    c = {**_DEFAULTS, **(section_of(config, section) or ENCODERS[kind])}
    lists = (c[key] for key in ("downsampling_ratios", "depths"))
    ratios, depths = (tuple(each) if isinstance(each, list | tuple) else () for each in lists)
    counts = (*ratios, *depths)
    if c["channels"] != 1 or len(depths) != len(ratios) + 1 or not all(isinstance(n, int) and n > 0 for n in counts):
        reason = "channels must be 1, and depths must have one entry more than downsampling_ratios, all positive integers"
        raise ConfigError(f"{section} in config.json: {reason}")
    return WaveEncoderSpec(
        out=positive_int(c, "hidden_size"),
        filters=positive_int(c, "num_filters"),
        taps=positive_int(c, "kernel_size"),
        ratios=ratios,
        depths=depths,
        expansion=positive_int(c, "ffn_expansion"),
        act=check_activation(f"hidden_act of {section}", c["hidden_act"]),
        eps=positive_number(c, "rms_norm_eps"),
    )


def _after_past(layer: object, x: Tensor, past: Past, count: int) -> Tensor:
    """Return a layer's last `count` inputs and `x`; at the start of an item, zeros and `x`."""
    joined = past.append(layer, x, 0, count)
    missing = count + len(x) - len(joined)
    return F.pad(joined, (0, 0, missing, 0)) if missing else joined


class _TimeConvolution:
    """A causal convolution over time: `[time, inner] -> [time / stride, outer]`; `time` is a multiple of `stride`."""

    def __init__(self, name: str, inner: int, outer: int, taps: int, stride: int, build: Builder) -> None:
        self.layer = build.linear([f"{name}.conv"], inner * taps, [outer], True)
        self.taps, self.stride = taps, stride

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        joined = _after_past(self, x, past, self.taps - self.stride)
        return self.layer(joined.unfold(0, self.taps, self.stride).flatten(1))


class _Layer:
    """A depthwise causal convolution and an MLP, each normed before and scaled after. `[time, width] -> [time, width]`."""

    def __init__(self, s: WaveEncoderSpec, width: int, build: Builder) -> None:
        self.spec, inner = s, s.expansion * width
        self.norms = [build.norm(name, width, s.eps, False) for name in ("norm", "ffn_norm")]
        self.kernel = build.stored("mixer.conv.weight", width, 1, s.taps)
        self.bias = build.stored("mixer.conv.bias", width)
        self.up = build.linear(["ffn.linear1"], width, [inner], True)
        self.down = build.linear(["ffn.linear2"], inner, [width], True)
        self.scales = [build.stored(name, width) for name in ("gamma", "ffn_gamma")]

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        x = x.addcmul(self._mix(self.norms[0](x), past), self.scales[0].weight)
        rows = self.down(activation(self.spec.act, self.up(self.norms[1](x))))
        return x.addcmul_(rows, self.scales[1].weight)

    def _mix(self, x: Tensor, past: Past) -> Tensor:
        joined = _after_past(self, x, past, self.spec.taps - 1)
        out = self.bias.weight.expand(len(x), -1).clone()
        for tap, weight in enumerate(self.kernel.weight[:, 0].T):
            out.addcmul_(joined[tap : tap + len(x)], weight)
        return out


class WaveEncoder(TensorModule):
    """Samples of one item `[rows * hop]` -> `[rows, out]`. Parts of a few rows are computed one after another."""

    def __init__(self, s: WaveEncoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, root = s, Builder(self, dtype, device)
        self.steps: list[_TimeConvolution | _Layer] = []
        inner = 1
        for number, depth in enumerate(s.depths):
            build, width = root.scope("stem" if not number else f"conv_layers.{number - 1}"), s.filters << number
            taps, stride = (2 * s.ratios[number - 1], s.ratios[number - 1]) if number else (s.taps, 1)
            self.steps.append(_TimeConvolution("conv", inner, width, taps, stride, build))
            self.steps += [_Layer(s, width, build.scope(f"stage.{i}")) for i in range(depth)]
            inner = width
        self.steps.append(_TimeConvolution("head", inner, s.out, s.taps, 1, root))

    def forward(self, samples: Tensor) -> Tensor:
        past, rows = Past(), list[Tensor]()
        for x in samples[:, None].split(_PART * self.spec.hop):
            for step in self.steps:
                x = step(x, past)
            rows.append(x)
        return torch.cat(rows)


def wave_encoder_bytes(s: WaveEncoderSpec, rows: int, ops: OpBytes) -> int:
    """Return the bytes alive in WaveEncoder for an item of `rows` rows, without its samples."""
    size, part = ops.dtype.itemsize, min(rows, _PART)
    times = [part * s.hop // factor for factor in accumulate(s.ratios, mul, initial=1)]
    most = kept = 0
    inner, length = 1, times[0]  # of the input of a convolution
    for number, (time, depth) in enumerate(zip(times, s.depths, strict=True)):
        width, taps = s.filters << number, 2 * s.ratios[number - 1] if number else s.taps
        wide, row = s.expansion * width, width * size
        copies = (2 * length + taps) * inner * size  # the input, also after its past
        most = max(most, copies + time * (inner * taps * size + ops.linear(inner * taps, width, time)))
        mixed = 3 * time * row + (time + s.taps) * row
        mlp = max(ops.norm(width, True) + ops.linear(width, wide, time), ops.mlp(width, wide, wide, time))
        most = max(most, mixed, time * (2 * row + mlp))
        kept += (taps * inner + depth * s.taps * width) * size
        inner, length = width, time
    head = part * (s.taps * inner * size + ops.linear(inner * s.taps, s.out, part)) + (2 * part + s.taps) * inner * size
    return max(most, head) + kept + 2 * rows * s.out * size


class NormedMlp(TensorModule):
    """Two linear layers with an RMSNorm between them. `[rows, inner] -> [rows, outer]`."""

    def __init__(self, inner: int, outer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        build = Builder(self, dtype, device)
        self.parts = (
            build.linear(["linear_1"], inner, [outer], True),
            build.norm("norm", outer, _NORM_EPS, False),
            build.linear(["linear_2"], outer, [outer], True),
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class VibeVoiceAsr(DecoderModel):
    """A model of audio."""

    prefixes = (
        *(
            (f"{root}{kind}_tokenizer_encoder.", f"{kind}_encoder.")
            for root in ("model.", "")
            for kind in ENCODERS
        ),
        *(
            (f"{root}multi_modal_projector.{kind}_", f"{kind}_projector.")
            for root in ("model.", "")
            for kind in ENCODERS
        ),
        *TEXT_PREFIXES,
    )  # fmt: skip

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = hub_config(config)
        super().__init__(decoder_spec(config, STACKS["qwen2"]), dtype, device)
        specs = {kind: wave_encoder_spec(config, kind) for kind in ENCODERS}
        if len({spec.hop for spec in specs.values()}) > 1:
            raise ConfigError("downsampling_ratios of the two encoders in config.json give rows of different lengths")
        for kind, spec in specs.items():
            self.add_module(f"{kind}_encoder", WaveEncoder(spec, dtype, device))
            self.add_module(f"{kind}_projector", NormedMlp(spec.out, self.hidden_size, dtype, device))

    @property
    def encoders(self) -> list[WaveEncoder]:
        return [getattr(self, f"{kind}_encoder") for kind in ENCODERS]

    @property
    def projectors(self) -> list[NormedMlp]:
        return [getattr(self, f"{kind}_projector") for kind in ENCODERS]

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename the publisher's tensors."""
        for name, tensor in weights:
            renamed = hub_name(name)
            if renamed is not None:
                yield renamed, tensor

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        hop = self.encoders[0].spec.hop
        lengths = [rows * hop for rows in tensors["audio_rows"].tolist()]
        return [self._encode(samples) for samples in tensors["input_values"].to(self.dtype).split(lengths)]

    def _encode(self, samples: Tensor) -> Tensor:
        acoustic, semantic = (
            projector(encoder(samples)) for encoder, projector in zip(self.encoders, self.projectors, strict=True)
        )
        return acoustic.add_(semantic)

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.encoders[0].spec.hop * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        ops, width = OpBytes(self.dtype, limits), self.hidden_size
        result = rows * width * self.dtype.itemsize
        encoders = max(wave_encoder_bytes(encoder.spec, rows, ops) for encoder in self.encoders)
        latents = max(encoder.spec.out for encoder in self.encoders) * self.dtype.itemsize
        projected = rows * (latents + ops.linear(width, width, rows) + ops.norm(width, True))
        return SMALL + self.input_bytes(modality, rows) + result + max(encoders, projected)
