"""Conditions on the CPU that runs the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from sensorium.kernels import dispatch, native
from sensorium.kernels.linear.int8 import supported

needs_int8 = pytest.mark.skipif(
    not supported(torch.device("cpu")), reason="products of 8-bit integers need AVX2 and the C++ kernels, or avx512_vnni"
)
"""Mark tests that multiply in int8: quantization="int8", also with batch_invariant or recorded steps."""

PRODUCTS = [name for name in list(native.LEVELS)[1:] if (found := native.library()) and name in native.supported(found)]
"""The instruction sets of linear layers that this CPU has."""
if native.restriction() is not None:  # torch lacks the newer ones, too
    PRODUCTS = PRODUCTS[: PRODUCTS.index(native.instructions()) + 1] if native.instructions() in PRODUCTS else []


@contextmanager
def running_with(instructions: str) -> Iterator[None]:
    """Run the C++ kernels as on a CPU with this instruction set of `native.LEVELS`. Skips the test if the CPU lacks it."""
    found, before = native.library(), native.instructions()
    if found is None or instructions not in PRODUCTS:
        pytest.skip(f"the CPU has no {instructions}, or the C++ kernels are not built")
    native.use(found, instructions)
    dispatch._choose_backend.cache_clear()
    try:
        yield
    finally:
        native.use(found, before)
        dispatch._choose_backend.cache_clear()
