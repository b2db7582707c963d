"""Convolutions over time and norms of channels in C++, against torch in float64."""

from __future__ import annotations

import pytest
import torch
from sensorium.kernels import convolution, native
from sensorium.kernels.channel_norm import leaky_norm, snake_norm
from sensorium.kernels.dispatch import use_backends
from torch.nn import functional as F

needs_kernels = pytest.mark.skipif(native.library() is None, reason="needs the C++ kernels")
needs_avx512 = pytest.mark.skipif(not native.has_avx512(), reason="needs AVX-512")


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def packed(weight, dilation, backend):
    with use_backends(f"convolution={backend}"):
        return convolution.pack(weight, dilation)


@needs_avx512
@pytest.mark.parametrize(
    ("inner", "outer", "taps", "dilation", "time"),
    [
        (5, 8, 3, 1, 1), (24, 16, 3, 1, 400), (24, 16, 3, 5, 61), (16, 24, 7, 3, 1000), (8, 8, 7, 9, 5), (32, 8, 11, 1, 193),
        (8, 32, 11, 5, 777), (3, 8, 17, 2, 90), (2, 8, 63, 1, 500),
    ],
)  # fmt: skip
def test_convolutions(inner, outer, taps, dilation, time, generator):
    """Dilated, with tiles that end between phases, shorter than their kernel, and with a bias and an addition or without."""
    x, weight, bias, add = (
        torch.randn(shape, generator=generator)
        for shape in ((1, inner, time), (outer, inner, taps), (outer,), (1, outer, time))
    )
    weight /= (inner * taps) ** 0.5
    exact = F.conv1d(x.double(), weight.double(), padding=dilation * (taps // 2), dilation=dilation)
    native_weight, plain = packed(weight, dilation, "native"), packed(weight, dilation, "torch")
    assert native_weight.backend is not plain.backend
    for made, atol in ((native_weight, 5e-5), (plain, 1e-5)):
        alone = convolution.convolve(x, made, None)
        torch.testing.assert_close(alone.double(), exact, rtol=0, atol=atol)
        both = convolution.convolve(x, made, bias, add)
        torch.testing.assert_close(both.double(), exact + bias[:, None] + add, rtol=0, atol=atol)
        assert made.weight.nbytes == convolution.packed_bytes(weight.to("meta"), torch.device("cpu")) or made is plain
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        single = convolution.convolve(x, native_weight, bias, add)
    finally:
        torch.set_num_threads(threads)
    assert convolution.convolve(x, native_weight, bias, add).equal(single)


def test_weights_of_other_widths_stay_as_they_are(generator):
    """Eight channels are computed at a time, and 65 taps do not fit."""
    for shape in ((6, 4, 7), (8, 4, 65)):
        weight = torch.randn(shape, generator=generator)
        assert convolution.pack(weight, 1).weight.equal(weight)


@needs_kernels
@pytest.mark.parametrize("time", [1, 15, 16, 1000])
@pytest.mark.parametrize("level", ["base", "avx2", "avx512"])
def test_norms_of_channels(time, level, generator):
    """Against float64, for every instruction set; arguments of the sine are up to about 300."""
    kernels = native.library()
    if level not in native.supported(kernels):
        pytest.skip(f"this CPU has no {level}")
    x, scale, shift = (torch.randn(shape, generator=generator) for shape in ((1, 9, time), (9,), (9,)))
    x, factor = x * 3 + 5, torch.rand(9, generator=generator) * 30 + 0.1
    y = (
        F.instance_norm(x.double(), weight=scale.double(), bias=shift.double())
        if time > 1
        else shift.double()[:, None].expand(x.shape)
    )
    before = native.set_level(kernels, native.LEVELS[level])
    try:
        leaky, snake = leaky_norm(x, 0.2, scale, shift), snake_norm(x, factor, scale, shift)
    finally:
        native.set_level(kernels, before)
    torch.testing.assert_close(leaky.double(), F.leaky_relu(y, 0.2), rtol=1e-5, atol=1e-5)
    wide = factor.double()[:, None]
    torch.testing.assert_close(snake.double(), y + (y * wide).sin().square() / wide, rtol=1e-4, atol=1e-4)
    if time > 1:
        with use_backends("channel_norm=torch"):
            torch.testing.assert_close(leaky_norm(x, 0.2, scale, shift), leaky, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(snake_norm(x, factor, scale, shift), snake, rtol=1e-4, atol=1e-4)


@needs_kernels
def test_norms_of_what_is_not_finite():
    x, ones = torch.tensor([[[1.0, float("inf"), 2.0]]]), torch.ones(1)
    assert snake_norm(x, ones, ones, ones).isnan().any()
    assert leaky_norm(x, 0.2, ones, ones).isnan().any()
