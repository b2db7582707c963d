"""Requests with any value in any place, and media of any bytes, made by Hypothesis. Each gets an answer or a typed error."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from sensorium import SamplingParams
from sensorium.callers.errors import SensoriumError
from sensorium.engine.frontend.media import MultiModalProcessor, MultiModalSettings
from sensorium.engine.frontend.prompts import read_prompt
from sensorium.mm.media.policy import MediaPolicy

from .requests import Call, Raw, build, options, places, put, requests

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
from infos import INFOS, ITEMS
from mutants import FILES, mutated

_PYTHON = re.compile(r"(?<!['\"\w])[A-Z]\w*(Error|Exception|Warning|Interrupt)\b(?!['\"])")
"""Names of classes that a message should not have. In quotes they are values, since names of ours are tried as texts."""
_MISSING = object()
_AUDIO = "Qwen2AudioProcessingInfo"  # the shipped model takes no audio
_POLICY = MediaPolicy(max_bytes=1 << 20, max_pixels=1 << 16, max_video_bytes=8 << 20, max_audio_seconds=10.0)


def _nested(depth: int, make: Callable[[Any], Any]) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = make(value)
    return value


EXTREMES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 10**5000, -(10**5000)),
    *(0.0, -0.0, 1e-320, 1e39, 1e308, -1e308, math.nan, math.inf, -math.inf, 1j),
    *(Decimal("NaN"), Decimal(10**400), Fraction(1, 3), np.float32("nan"), np.int64(3), np.bool_(True), np.str_("x")),
    *(np.datetime64("NaT"), torch.tensor(1), torch.tensor([0.5]), "", " ", "\0", "²", "\ud800", "a\u0301" * 50, "\u202e"),
    *("\U0010ffff", "<|im_end|>", "{{ 1/0 }}", "json", "auto", "cuda:99", "x" * 10**6, "\n" * 10**5),
    *("http://127.0.0.1:9/", "http://[::1", "file:///dev/zero", "data:,", "data:image/png;base64,@", "/", "../.."),
    *(Path("/dev/zero"), Path("\0"), b"", b"x", b"\xff" * 10**5, bytearray(b"x"), memoryview(b"xy")[::2]),
    *([], {}, (), set(), frozenset({1}), range(10**9), [[]], [None] * 1000, list(range(10**5)), ["\ud800"]),
    *({"²": 1}, {-1: 1e9}, {1: 2, "1": 3}, {"a": {"a": {}}}, {"\ud800": 1}, {None: None}, {(): 1}),
    *({"type": "object", "x": {"$ref": "#"}}, {str(i): i for i in range(5000)}),
    *(_nested(5000, lambda value: [value]), _nested(5000, lambda value: {"a": value}), _nested(100, lambda value: [value])),
    *(object(), int, len, Ellipsis, NotImplemented, iter([]), SamplingParams()),
    *(Image.new("RGB", (1, 1)), Image.new("P", (0, 0)), np.zeros(0), np.zeros((3, 3)), np.full((2, 2), np.nan)),
    *(np.array(["x"]), np.array([None]), np.zeros((1,) * 30), np.zeros((4, 4, 3), np.uint8), torch.zeros(0)),
    *(torch.zeros(2, 2, device="meta"), torch.zeros(3, dtype=torch.complex64), torch.zeros(3).to_sparse()),
]  # fmt: skip


def _extreme(index: int) -> Any:
    return EXTREMES[index]  # Hypothesis shows and compares the elements of `sampled_from`, which some values do not allow


_EXTREME = st.integers(0, len(EXTREMES) - 1).map(_extreme)
_TEXT = st.text(st.characters(exclude_categories=()), max_size=30)  # with lone surrogates
_PLAIN = _EXTREME | st.integers() | st.floats() | _TEXT | st.binary(max_size=30)
_ANY = _PLAIN | st.recursive(
    _PLAIN, lambda some: st.lists(some, max_size=4) | st.dictionaries(_TEXT, some, max_size=4), max_leaves=8
)


@st.composite
def hostile_calls(draw: Any, calls: list[Call]) -> Call:
    """Return one of the calls with one to three values replaced, removed or added, or moved from elsewhere in it."""
    node = draw(st.sampled_from(calls))
    for _ in range(draw(st.integers(1, 3))):
        paths = sorted(places(node), key=repr)
        path = draw(st.sampled_from(paths))
        parent, here = _at(node, path[:-1]), _at(node, path)
        how = draw(st.sampled_from(("replace", "replace", "replace", "move", "add", "remove")))
        if how == "add" and isinstance(here, dict):
            node = put(node, (*path, draw(_TEXT | st.sampled_from([0, None, (), True]))), Raw(draw(_ANY)))
        elif how == "move":
            node = put(node, path, _at(node, draw(st.sampled_from(paths))))
        elif how == "remove" and not isinstance(parent, Call):
            node = put(node, path[:-1], _without(parent, path[-1]))
        else:
            node = put(node, path, Raw(draw(_ANY)))
    return node


def _without(node: Any, key: object) -> Any:
    """Return a list or dict without one entry."""
    if isinstance(node, list):
        return [value for i, value in enumerate(node) if i != key]
    return {name: value for name, value in node.items() if name != key}


def _at(node: Any, path: Iterable[Any]) -> Any:
    for key in path:
        node = (node.fields if isinstance(node, Call) else node)[key]
    return node


def outcome(make: Callable[[], Any]) -> str:
    """Return "served", "refused: code", or "UNTYPED ..." for what is neither an answer nor a typed error."""
    try:
        results = make()
        results = list(results) if hasattr(results, "__iter__") else [results]
        errors = [result.error for result in results if getattr(result, "error", None) is not None]
    except SensoriumError as error:
        errors = [error.info]
    except Exception as error:
        return f"UNTYPED {type(error).__name__}: {str(error)[:200]}"
    for error in errors:
        if error.code in ("internal", "engine_dead") or _PYTHON.search(error.message) or len(error.message.splitlines()) != 1:
            return f"UNTYPED {error.code}: {error.message[:300]}"
    return f"refused: {errors[0].code}" if errors else "served"


def family_calls() -> list[Call]:
    """Return calls that process an item of each modality of each family, with all of its options."""
    return [
        Call(partial(process, family, modality), {"data": Raw(data), "options": options(info)})
        for family, info in INFOS.items()
        for modality in info.valid_kwargs
        for data in ITEMS[modality][:1]
    ]


def process(family: str, modality: str, data: object, options: Any) -> list[Any]:
    """Plan and process an item as the engine does."""
    media = _processor(family)
    read: Any = read_prompt({"prompt": "", "multi_modal_data": {modality: [data]}, "mm_processor_kwargs": options})
    items = media.open(read.media, {}, read.options, None)
    return [media.process(item, None, {}) for item in items if sum(grid.num_embeds for grid in item.geometries) < 1 << 8]


@cache
def _processor(family: str) -> MultiModalProcessor:
    return MultiModalProcessor(INFOS[family], MultiModalSettings(_POLICY, cache_bytes=1))


def hostile_bytes(modality: str) -> st.SearchStrategy[tuple[str, bytes]]:
    """Return mutated files of every format: `(description, bytes)`."""
    files = FILES[modality]()
    return st.builds(lambda number, case: mutated(modality, number, case, files), st.integers(0, 1 << 32), st.integers(0, 999))


def read(llm: Any, modality: str, data: bytes) -> Any:
    """Ask about an item, or process it if the model does not take it."""
    if modality not in llm.engine.inputs._info.modalities:
        return process(_AUDIO, modality, data, {})
    content = [{"type": modality, modality: data}, {"type": "text", "text": "a"}]
    return llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=1), use_tqdm=False)


def tally(strategy: Any, run: Callable[[Any], str], count: int, number: int = 0) -> tuple[Counter[str], dict[str, Any]]:
    """Run that many examples. Return how many had each outcome, and the first example of each untyped one."""
    counts: Counter[str] = Counter()
    untyped: dict[str, Any] = {}

    @seed(number)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def example(value: Any) -> None:
        result = run(value)
        counts[result.split(" ")[0]] += 1
        if result.startswith("UNTYPED"):
            untyped.setdefault(result, value)

    example()
    return counts, untyped


def areas(llm: Any) -> dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], str]]]:
    """Return what is attacked: the examples, and what becomes of one."""
    by_name = requests(llm)
    names = st.sampled_from(sorted(by_name))

    def run(node: Call) -> str:
        return outcome(lambda: build(node))

    def run_bytes(modality: str, example: tuple[str, bytes]) -> str:
        return outcome(lambda: read(llm, modality, example[1]))

    return {
        "requests with any value in any place": (names.flatmap(lambda name: hostile_calls(by_name[name])), run),
        "processing options of all families": (hostile_calls(family_calls()), run),
        **{f"mutated {modality} files": (hostile_bytes(modality), partial(run_bytes, modality)) for modality in FILES},
    }
