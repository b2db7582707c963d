"""Conditions on the CPU that runs the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from sensorium.kernels import dispatch, native
from sensorium.kernels.int8 import supported

needs_int8 = pytest.mark.skipif(
    not supported(torch.device("cpu")), reason="products of 8-bit integers need AVX2 and the C++ kernels, or avx512_vnni"
)
"""Mark tests that multiply in int8: quantization="int8", also with batch_invariant or recorded steps."""

PRODUCTS = [] if (_library := native.library()) is None else native.supported(_library)[1:]
"""The instruction sets of linear layers that this CPU has."""


@contextmanager
def running_with(instructions: str) -> Iterator[None]:
    """Run the C++ kernels as on a CPU with this instruction set of `native.LEVELS`. Skips the test if the CPU lacks it."""
    found = native.library()
    if found is None:
        pytest.skip("the C++ kernels are not built")
    before = native.instructions()
    if instructions not in native.supported(found):
        pytest.skip(f"the CPU has no {instructions}")
    native.use(found, instructions)
    dispatch._choose_backend.cache_clear()
    try:
        yield
    finally:
        native.use(found, before)
        dispatch._choose_backend.cache_clear()
