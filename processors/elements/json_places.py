"""Boxes and points in JSON: Qwen-VL's `bbox_2d` and `point_2d`, the layout of dots.ocr."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from .element import Element, ImageScale, finite_numbers
from .tables import read_table

_DECODER = json.JSONDecoder(strict=False)
_MAX_FAILURES = 100  # objects that are not JSON, each of which may be read to the end of the text
_MAX_DEPTH = 8
_PLACES = ("bbox_2d", "bbox", "point_2d", "point")
_LABELS = ("label", "category", "name", "class")
_TEXTS = ("text", "text_content", "content")


def find_json(text: str, scale: ImageScale, across: float, down: float) -> Iterator[Element]:
    """Yield the elements of all JSON objects in the text, including the complete ones in an unfinished list."""
    for value, span in _objects(text):
        yield from (replace(element, span=span) for element in _walk(value, scale, across, down, 0))


def _objects(text: str) -> Iterator[tuple[object, tuple[int, int]]]:
    """Yield the outermost JSON objects of a text, each with its start and end."""
    at = failures = 0
    while (at := text.find("{", at)) >= 0 and failures < _MAX_FAILURES:
        try:
            start = at
            value, at = _DECODER.raw_decode(text, at)
            yield value, (start, at)
        except (ValueError, RecursionError):
            at, failures = at + 1, failures + 1


def _walk(value: object, scale: ImageScale, across: float, down: float, depth: int) -> Iterator[Element]:
    if isinstance(value, Mapping):
        numbers = next((box for key in _PLACES if (box := finite_numbers(value.get(key)))), [])
        content = _text(value, _TEXTS)
        element = scale.element(numbers, across, down, _text(value, _LABELS), content)
        if element is not None:
            yield replace(element, cells=read_table(content))
        value = list(value.values())
    if isinstance(value, list) and depth < _MAX_DEPTH:
        for entry in value:
            yield from _walk(entry, scale, across, down, depth + 1)


def _text(value: Mapping[str, object], keys: tuple[str, ...]) -> str:
    return next((text for key in keys if isinstance(text := value.get(key), str)), "")
