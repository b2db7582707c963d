"""Errors of exhausted memory are recognised."""

import copy
import pickle

import pytest
import torch
from sensorium import LLM, AsyncLLM
from sensorium.callers.errors import InputError, is_out_of_memory
from sensorium.engine.session import LiveSession


def test_errors_of_exhausted_memory_are_recognised():
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"),
    ):
        assert is_out_of_memory(error)
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), KeyboardInterrupt()):
        assert not is_out_of_memory(error)


def test_an_allocation_of_torch_that_fails_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", [LLM, AsyncLLM, LiveSession])
def test_engines_say_that_another_process_cannot_have_them(kind, send):
    with pytest.raises(InputError, match=f"the {kind.__name__} cannot be pickled or copied.*make one in each process"):
        send(object.__new__(kind))
