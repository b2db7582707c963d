"""Rows of the suite of embedders (tests/models/families/test_embedders.py), in EMBEDDERS of files in tests/families."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from family import IMAGE_SIZES, no_more_files, same_names
from oracle import load_oracle

TEXTS = ("def f(x): return x", "import os", "a house with {{ braces }} and %s")


def count_image_tokens(processor: Any, inputs: Mapping[str, Any]) -> int:
    return int((inputs["input_ids"] == processor.image_token_id).sum())


@dataclass(frozen=True, repr=False)
class Embedder:
    """One embedder.

    Args:
        name: unique name, used in test ids.
        build: `build(seed)` -> a small random model and processor of transformers.
        inputs: (processor, text or PIL image) -> the oracle's inputs, batch of one.
        run: (model, the oracle's inputs) -> its vectors, `[tokens, n]` or `[n]`, of length 1.
        sizes: (height, width) of images whose vectors are compared. grid: of images whose tokens are counted.
        tensors, finish, load, options: as in Family.
        count: (processor, the oracle's inputs of an image) -> its number of encoder rows.
        has_tokens: prompts of images are those of the oracle, which has token ids for them.
        score: (model, vectors of the query, of the document) -> the score; None: not compared.
        texts: texts whose vectors are compared; empty for models of images only.
        layouts: name -> a function of a stored tensor's name, and one of config.json, that return those of another layout.
        tolerance: of vectors of length 1.
    """

    name: str
    build: Callable[[int], tuple[Any, Any]]
    inputs: Callable[[Any, Any], Mapping[str, Any]]
    run: Callable[[Any, Mapping[str, Any]], torch.Tensor]
    sizes: Sequence[tuple[int, int]] = ((90, 130), (60, 60), (150, 40))
    grid: Sequence[tuple[int, int]] = tuple(IMAGE_SIZES)
    tensors: Callable[..., Any] = same_names
    texts: Sequence[str] = TEXTS
    count: Callable[[Any, Mapping[str, Any]], int] = count_image_tokens
    has_tokens: bool = True
    score: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    layouts: Mapping[str, tuple[Callable[[str], str], Callable[[dict[str, Any]], dict[str, Any]]]] = field(default_factory=dict)
    finish: Callable[[Path], None] = no_more_files
    load: Callable[[Path], tuple[Any, Any]] = load_oracle
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 2e-5


@functools.cache
def load_embedders() -> dict[str, Embedder]:
    """Return every embedder of tests/families by name."""
    found: dict[str, Embedder] = {}
    for path in sorted((Path(__file__).parents[1] / "families").glob("*.py")):
        if "EMBEDDERS" not in path.read_text("utf-8"):
            continue
        spec = importlib.util.spec_from_file_location(f"families_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found |= {row.name: row for row in module.EMBEDDERS}
    return found
