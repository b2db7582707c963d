"""Options that change an item's plan or tensors change the key under which it is cached: every option of every family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from infos import INFOS
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.media import gate
from sensorium.mm.media.policy import MediaPolicy
from sensorium.processors.options import VALUES, ListOf, Range

RANDOM = np.random.default_rng(0)
ITEMS: dict[str, Any] = {
    "image": RANDOM.integers(0, 256, (500, 900, 3), dtype=np.uint8),
    "video": (RANDOM.integers(0, 256, (24, 60, 100, 3), dtype=np.uint8), {"fps": 8.0}),  # 3 s
    "audio": (RANDOM.standard_normal(24_000).astype(np.float32), 16_000),
}
ITEMS["vision_chunk"] = {"type": "video", "video": ITEMS["video"]}
NUMBERS = (0, 0.5, 1, 3, 300, 40_000)
SIZES = ({"shortest_edge": 56}, {"longest_edge": 224}, {"height": 112, "width": 112}, {"max_height": 140, "max_width": 140})
PANNED = {"do_pan_and_scan": True}
BESIDE: Mapping[str, Mapping[str, Any]] = {
    "max_patches": {"crop_to_patches": True},
    "min_frame_similarity": {"frame_types": "auto"},
    "min_patches": {"crop_to_patches": True},
    "pan_and_scan_max_num_crops": PANNED,
    "pan_and_scan_min_crop_size": PANNED,
    "pan_and_scan_min_ratio_to_activate": PANNED,
    "resized_height": {"resized_width": 112},
    "resized_width": {"resized_height": 112},
}
"""Options without which an option has no effect, for families that have both."""
NAMES = [name for name in sorted(INFOS) if any(INFOS[name].valid_kwargs.values())]


def values_of(info: Any, option: str) -> Iterator[Any]:
    values = {**VALUES, **info.option_values}[option]
    if isinstance(values, Range):
        yield from SIZES if option == "size" else ()
        yield from (n for n in NUMBERS if values.minimum <= n <= values.maximum and isinstance(n, (int, values.kind)))
    elif isinstance(values, ListOf):
        yield from ([0, 1] * 12, [1] * 24, values.word)
    else:
        yield from values


def variants(info: Any, modality: str, option: str) -> Iterator[tuple[object, Any]]:
    """Yield the values that the family takes beside the options that it needs, each with its ProcessingInfo."""
    beside = {name: value for name, value in BESIDE.get(option, {}).items() if name in info.valid_kwargs[modality]}
    for value in values_of(info, option):
        try:
            yield value, info.with_kwargs({f"{modality}s_kwargs": {**beside, option: value}})
        except ConfigError:
            continue


def result(info: Any, modality: str) -> object:
    """Return the plan and the tensors of an item, or the reason why it is refused, in a form that can be compared."""
    try:
        return processed(info, modality)
    except (ConfigError, InputError) as error:  # ConfigError: Ernie draws on the frames of videos with a font of the checkpoint
        return str(error)


def processed(info: Any, modality: str) -> list[object]:
    (source,) = info.parser().parse({modality: [ITEMS[modality]]}, {}, {})[modality]
    headers = gate.probe(source, info.decode_spec, MediaPolicy())
    grids = [info.geometry(header) for header in headers]
    spans = [(span.num_tokens, span.num_embeds) for span in info.spans(modality, grids)]
    pieces = [info.process(item, torch.float32) for item in gate.decode(source, info.decode_spec, MediaPolicy())]
    tensors = [(name, one.data.shape, one.data.numpy().tobytes()) for kwargs, _ in pieces for name, one in kwargs.items()]
    return [grids, spans, tensors, [grid for _, grid in pieces]]


@pytest.mark.parametrize("name", NAMES)
def test_items_with_equal_keys_are_equal(name: str) -> None:
    for modality, options in INFOS[name].valid_kwargs.items():
        for option in options:
            of_key: dict[str, list[tuple[object, Any]]] = {}
            for value, info in (("the default", INFOS[name]), *variants(INFOS[name], modality, option)):
                of_key.setdefault(info.options_key(modality), []).append((value, info))
            for (first, one), *others in of_key.values():
                expected = result(one, modality) if others else None
                for value, other in others:
                    assert result(other, modality) == expected, f"{option}={value!r} of {modality} has the key of {first!r}"


def test_every_option_of_items_changes_a_key() -> None:
    """Otherwise the test above compares values without effect."""
    changed = {
        option
        for name in NAMES
        for modality, options in INFOS[name].valid_kwargs.items()
        for option in options
        if len({info.options_key(modality) for _, info in variants(INFOS[name], modality, option)}) > 1
    }
    known = VALUES.keys() | {option for name in NAMES for option in INFOS[name].option_values}
    assert known - changed == {"use_image_id"}  # it numbers the items in the prompt
