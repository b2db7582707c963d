"""List the sections of a run, their parts, and their time limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from .machine import Bench
from .record import PEER, Figure

Made = Figure | Callable[[], Figure | Iterator[Figure]]
"""A figure, or a function that makes one or several; if it fails, the part continues with the next."""
Run = Callable[[Bench], Iterator[Made]]
SECONDS = 230.0
"""Seconds that a section may take, including the start of its processes."""
START = 60.0
"""The part of these seconds that a process may take before its first part starts: torch is read from a cold disk."""


@dataclass(frozen=True)
class Part:
    """A group of figures, made by `run` ("module:function" in this folder).

    Args:
        seconds: usual upper limit including compilation; the part is not started with less time left.
        limit: seconds after which the part is stopped.
    """

    name: str
    run: str
    seconds: float
    limit: float

    def load(self) -> Run:
        module, _, function = self.run.partition(":")
        found: Run = getattr(import_module(f".{module}", __package__), function)
        return found


SECTIONS: dict[str, tuple[Part, ...]] = {
    "ops": (
        Part("ceilings", "ops:ceilings", 5, 30),
        Part("prompt attention", "attention:prompt", 10, 40),
        Part("decode attention", "attention:decode", 5, 30),
        Part("tower attention", "attention:towers", 5, 30),
        Part("norms", "ops:norms", 5, 30),
        Part("rotary", "ops:rotary", 5, 30),
        Part("activations", "ops:activations", 5, 30),
        Part("scatter", "ops:scatter", 2, 20),
        Part("mixture", "products:mixture", 10, 40),
        Part("int8", "products:int8", 10, 40),
        Part("fp8", "products:fp8", 10, 40),
        Part("sampling", "sampling:sampling", 10, 40),
        Part("pixels", "media:pixels", 10, 40),
        Part("mel", "media:mel", 5, 30),
        Part("exact: attention", "attention:exactness", 30, 110),
        Part("exact: rest", "ops:exactness", 20, 60),
    ),
    "e2e": (
        Part("same tokens as the CPU", "equal:tokens", 30, 90),
        Part("Qwen2.5-VL-7B", "e2e:qwen2_5_vl", 50, 110),
        Part("Qwen3-VL-8B", "e2e:qwen3_vl", 50, 110),
        Part(f"{PEER}Qwen2.5-VL-7B", "peer:qwen2_5_vl", 30, 80),
        Part(f"{PEER}Qwen3-VL-8B", "peer:qwen3_vl", 30, 80),
    ),
    "ranks": (Part("MLP of several GPUs", "ranks:mlp", 60, 120),),
    "train": (Part("tiny-vl", "train:tiny_vl", 75, 150),),
}


def find(section: str, name: str) -> Part:
    return next(part for part in SECTIONS[section] if part.name == name)
