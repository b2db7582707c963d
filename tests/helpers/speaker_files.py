"""Small random networks that tell speakers apart, saved as their publishers save them, and the same networks in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PlainPyanNet(nn.Module):
    """pyannote's PyanNet with torch's own layers."""

    def __init__(self, classes: int, width: int = 8, layers: int = 2, linear: int = 6) -> None:
        super().__init__()
        self.low, self.band = nn.Parameter(torch.linspace(30, 4000, 40)[:, None]), nn.Parameter(torch.rand(40, 1) * 200)
        self.norms = nn.ModuleList(nn.InstanceNorm1d(count, affine=True) for count in (1, 80, 60, 60))
        self.convolutions = nn.ModuleList((nn.Conv1d(80, 60, 5), nn.Conv1d(60, 60, 5)))
        self.lstm = nn.LSTM(60, width, layers, batch_first=True, bidirectional=True)
        self.linear = nn.ModuleList((nn.Linear(2 * width, linear), nn.Linear(linear, linear)))
        self.classifier = nn.Linear(linear, classes)
        for norm in self.norms:
            nn.init.normal_(norm.weight, 1, 0.2)
            nn.init.normal_(norm.bias, 0, 0.2)
        for parameter in (*self.lstm.parameters(), *self.linear.parameters()):
            nn.init.normal_(parameter, 0, 0.7)
        nn.init.normal_(self.classifier.weight, 0, 3)
        nn.init.zeros_(self.classifier.bias)

    def filters(self) -> Tensor:
        """Return the filters as integrals of cosine and sine over the band, each at its own time."""
        low = 50 + self.low.abs()
        high = (low + 50 + self.band.abs()).clamp(50, 8000)
        dtype = low.dtype
        times = torch.arange(-125, 126, dtype=dtype) / 16_000 * 2 * torch.pi
        window = torch.hamming_window(251, periodic=False, dtype=dtype)
        safe = torch.where(times == 0, 1.0, times)
        cosine = 2 * ((high * times).sin() - (low * times).sin()) / safe
        cosine = torch.where(times == 0, 2 * (high - low), cosine)
        sine = torch.where(times == 0, 0.0, 2 * ((low * times).cos() - (high * times).cos()) / safe)
        return (torch.cat((cosine, sine)) * window / (2 * (high - low)).repeat(2, 1))[:, None]

    def forward(self, samples: Tensor) -> Tensor:
        x = F.max_pool1d(F.conv1d(self.norms[0](samples[:, None]), self.filters(), stride=10).abs(), 3)
        x = F.leaky_relu(self.norms[1](x))
        for convolution, norm in zip(self.convolutions, self.norms[2:], strict=True):
            x = F.leaky_relu(norm(F.max_pool1d(convolution(x), 3)))
        x, _ = self.lstm(x.transpose(1, 2))
        for layer in self.linear:
            x = F.leaky_relu(layer(x))
        scores: Tensor = self.classifier(x)
        return scores

    def state(self) -> dict[str, Tensor]:
        """Return the tensors under pyannote's names."""
        bank = "sincnet.conv1d.0.filterbank"
        window = torch.hamming_window(251, periodic=False, dtype=self.low.dtype)[:125]
        named = {f"{bank}.low_hz_": self.low, f"{bank}.band_hz_": self.band, f"{bank}.window_": window}
        named[f"{bank}.n_"] = 2 * torch.pi * torch.arange(-125, 0, dtype=self.low.dtype)[None] / 16_000
        modules = {"sincnet.wav_norm1d": self.norms[0], "lstm": self.lstm, "classifier": self.classifier}
        modules |= {f"sincnet.norm1d.{i}": norm for i, norm in enumerate(self.norms[1:])}
        modules |= {f"sincnet.conv1d.{i}": layer for i, layer in enumerate(self.convolutions, 1)}
        modules |= {f"linear.{i}": layer for i, layer in enumerate(self.linear)}
        named |= {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
        return {name: value.detach().clone() for name, value in named.items()}


class PlainEncoder(nn.Module):
    """The speaker encoder with torch's own layers."""

    def __init__(self, bands: int = 40, width: int = 12, dim: int = 10, layers: int = 3) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(bands, width, layers, batch_first=True), nn.Linear(width, dim)
        nn.init.normal_(self.lstm.weight_ih_l0, 0, 3)

    def forward(self, frames: Tensor) -> Tensor:
        """Return a vector for each of `[n, frames, bands]`."""
        hidden = self.lstm(frames)[1][0][-1]
        return F.normalize(self.linear(hidden).relu())


def save_networks(
    folder: Path, classes: int = 3, seconds: float | None = None, seed: int = 0
) -> tuple[PlainPyanNet, PlainEncoder]:
    """Save both networks into a folder as `speaker_model` expects it. `seconds`: 5 or 10 by the number of classes if None."""
    torch.manual_seed(seed)
    net, encoder = PlainPyanNet(classes), PlainEncoder()
    for part in ("segmentation", "embedding"):
        (folder / part).mkdir(parents=True)
    content: dict[str, Any] = {"state_dict": net.state(), "epoch": 3, "callbacks": [{"a": (1, 2.5)}]}
    if seconds is not None:
        content["pyannote.audio"] = {"specifications": Specifications(seconds, classes), "versions": {"torch": "1.10"}}
    torch.save(content, folder / "segmentation" / "pytorch_model.bin")
    state = {"step": 1, "model_state": encoder.state_dict()}
    torch.save(state, folder / "embedding" / "pretrained.pt", _use_new_zipfile_serialization=False)
    return net, encoder


class Specifications:
    """An object of a class that is not read, with the attributes of pyannote's."""

    def __init__(self, duration: float, classes: int) -> None:
        self.duration, self.classes = duration, [f"speaker#{number}" for number in range(1, 4)]
        self.powerset_max_classes = 2 if classes == 7 else None
