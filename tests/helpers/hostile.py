"""Harmful images, prompts and encoders, and good ones, for the shipped model."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

MODEL = Path(__file__).parents[2] / "assets" / "tiny-vl"
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
NO_NUMBER = "<|vision_pad|>"  # sequences with this token get non-finite hidden states, see `numberless`
MARK = (255, 0, 255)  # no other image has a patch of this colour


def make_image(seed: int, width: int = 64, height: int = 32) -> Image.Image:
    """Return noise; each seed gives other content."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def marked(seed: int = 0) -> Image.Image:
    """Return an image for which a `FailingEncoder` fails."""
    image = make_image(seed)
    image.paste(MARK, (0, 0, 16, 16))
    return image


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def asked(*images: object, text: str = "Read the text.", **more: Any) -> dict[str, Any]:
    return {"prompt": PLACEHOLDER * len(images) + text, "multi_modal_data": {"image": list(images)}, **more}


def has_mark(patches: torch.Tensor) -> torch.Tensor:
    """Return bool `[patches]`: True for normalised, flat patches entirely in the mark's colour."""
    mean = torch.tensor([0.48145467, 0.45782751, 0.40821072])
    std = torch.tensor([0.26862955, 0.26130259, 0.2757771])
    colour = (torch.tensor(MARK) / 255 - mean) / std
    return ((patches.reshape(len(patches), 3, -1) - colour[:, None]).abs() < 0.01).flatten(1).all(1)


class FailingEncoder:
    """Wraps `embed_multimodal`: rows of marked images go through `harm`, which may raise. `calls` counts the calls."""

    def __init__(self, real: Callable[..., list[torch.Tensor]], harm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.real, self.harm, self.calls = real, harm, 0

    def __call__(self, modality: str, tensors: dict[str, Any]) -> list[torch.Tensor]:
        self.calls += 1
        bad = has_mark(tensors["pixel_values"])
        counts = [int(grid.prod()) for grid in torch.as_tensor(tensors[f"{modality}_grid_thw"]).reshape(-1, 3)]
        parts = bad.split(counts)
        made = self.real(modality, tensors)
        return [self.harm(rows) if part.any() else rows for rows, part in zip(made, parts, strict=True)]


def raising(kind: type[BaseException], *args: object) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a `harm` that raises. Each error is new, because a reused one would keep the frames of all earlier ones."""

    def harm(rows: torch.Tensor) -> torch.Tensor:
        raise kind(*args)

    return harm


def numberless(real: Callable[[Any], torch.Tensor], token: int, value: float) -> Callable[[Any], torch.Tensor]:
    """Wrap `forward`: the hidden states, keys and values of sequences with `token` in this step become `value`."""

    def forward(batch: Any) -> torch.Tensor:
        hidden = real(batch)
        for start, stop in pairwise(batch.attn[0].query_start_loc):
            if (batch.input_ids[start:stop] == token).any():
                hidden[start:stop] = value
                for cache, attn in zip(batch.kv_caches, batch.attn, strict=True):
                    cache.view(2, -1, *cache.shape[3:])[:, attn.slot_mapping[start:stop]] = value
        return hidden

    return forward
