"""The reference that resizes, normalises and lays out images, against torch's filter and by hand."""

from __future__ import annotations

import pytest
import torch
from sensorium.kernels.pixels import preprocess_frames, resize
from sensorium.kernels.pixels.layout import Normalization, PatchLayout
from sensorium.kernels.pixels.reference import _resize_last_axis
from sensorium.kernels.pixels.resize_weights import resize_weights
from torch import Tensor

PLAIN = Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
FILTERS = ("bilinear", "bicubic", "lanczos")
SIDES = (1, 2, 3, 7, 14, 30, 57, 91, 130)


def noise(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("size", SIDES)
def test_weights_in_closed_form_are_torchs(size: int, filter: str) -> None:
    """Resize one axis after the other, on noise and on values whose sums overflow a byte."""
    for image in (noise(2, 3, 9, size), torch.where(noise(2, 3, 9, size) > 127, 255, 0).to(torch.uint8)):
        for target in (*SIDES, 333):
            across = _resize_last_axis(image, filter, target)
            wanted = torch.nn.functional.interpolate(image, (23, target), mode=filter, antialias=True)
            assert torch.equal(_resize_last_axis(across.transpose(2, 3), filter, 23).transpose(2, 3), wanted)


@pytest.mark.parametrize("filter", FILTERS)
def test_weights_add_up(filter: str) -> None:
    for size, target in ((1000, 37), (37, 1000), (64, 64)):
        table, shift = resize_weights(size, target, filter)
        assert table.shape[1] == target
        assert (table[1:].sum(0) - (1 << shift)).abs().max() <= len(table)
        assert table[0].min() >= 0
        assert table[0].max() < size


def test_patches_by_hand() -> None:
    """Two frames make a patch, the last is repeated; squares of 2 x 2 patches; a row has channel, frame, line and column."""
    frames, p, m = noise(3, 8, 12, 3), 2, 2
    rows = preprocess_frames(frames, (8, 12), "bicubic", PLAIN, PatchLayout(p, m, 2), torch.float32).view(
        2, 2, 3, m, m, 3, 2, p, p
    )
    for step, line, column, frame in ((0, 0, 0, 0), (0, 5, 7, 1), (1, 7, 11, 0), (1, 3, 4, 1)):
        square, inner = (line // 4, column // 4), (line % 4 // p, column % 4 // p)
        found = rows[step, *square, *inner, :, frame, line % p, column % p]
        assert torch.equal(found, frames[min(2 * step + frame, 2), line, column].float())


def test_planes_and_scaling() -> None:
    frames, normalization = noise(2, 9, 7, 3), Normalization((1.5, 2.5, 3.5), (3.0, 5.0, 7.0))
    planes = preprocess_frames(frames, (6, 5), "bilinear", normalization, PatchLayout(), torch.float32)
    small = resize(frames, (6, 5), "bilinear").float()
    for channel in range(3):
        assert torch.equal(planes[:, channel], (small[:, channel] - normalization.mean[channel]) / normalization.std[channel])
