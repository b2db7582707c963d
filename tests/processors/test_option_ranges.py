"""Every option of every family with extreme and wrong values: a typed error or a plan, each within bounded work."""

from __future__ import annotations

import math
import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
from infos import INFOS, ITEMS
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.geometry import FrameSampling, sample_indices
from sensorium.mm.media import gate
from sensorium.mm.media.policy import MediaPolicy
from sensorium.models.families.glm4v.processing import Glm4VProcessingInfo
from sensorium.processors.options import VALUES

EXTREME = [
    0,
    -1,
    1e-9,
    1e-3,
    1,
    1e6,
    1e18,
    10**400,
    -(10**5000),
    math.nan,
    math.inf,
    True,
    "1",
    "x" * 10**6,
    None,
    [],
    {},
    [1],
    {1: 2},
]
NESTED = [{"shortest_edge": value} for value in EXTREME] + [{"max_height": value, "max_width": value} for value in EXTREME]
MOST_BYTES = 24 << 20
MOST_CALLS = 200_000


def plan(info: Any, modality: str) -> None:
    """Plan each item of the modality from its header, as the engine does."""
    for data in ITEMS[modality]:
        (source,) = info.parser().parse({modality: [data]}, {}, {})[modality]
        headers = gate.probe(source, info.decode_spec, MediaPolicy())
        spans = info.spans(modality, [info.geometry(header) for header in headers])
        assert all(0 <= span.num_embeds <= span.num_tokens for span in spans)
        info.options_key(modality)


@contextmanager
def bounded_work() -> Iterator[None]:
    """Fail if the body calls more than MOST_CALLS functions or holds more than MOST_BYTES at once."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += 1

    tracemalloc.start()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert calls < MOST_CALLS, f"{calls} calls"
    assert peak < MOST_BYTES, f"{peak:,} bytes"


def refusal(info: Any, options: Mapping[str, Any], modality: str) -> str:
    """Return the error's text, "" if the items are planned."""
    with bounded_work():
        try:
            plan(info.with_kwargs(options), modality)
        except (ConfigError, InputError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name", sorted(INFOS))
def test_extreme_options_are_refused_or_planned_with_bounded_work(name: str) -> None:
    info = INFOS[name]
    for modality, options in info.valid_kwargs.items():
        plan(info, modality)
        for option in options:
            values = EXTREME + (NESTED if option == "size" else [])
            for value, nest in product(values, (False, True)):
                given = {option: value}
                message = refusal(info, {f"{modality}s_kwargs": given} if nest else given, modality)
                assert len(message) < 400, option


def test_every_option_has_its_values() -> None:
    shared = set[str]()
    for info in INFOS.values():
        options = {option for several in info.valid_kwargs.values() for option in several}
        assert info.option_values.keys() <= options - VALUES.keys()
        shared |= options - info.option_values.keys()
    assert shared == VALUES.keys()


@pytest.mark.parametrize(("fps", "message"), [(1e6, "over the limit of 1,000;"), (1e-4, "at least 0.001"), (math.nan, "nan")])
def test_rates_out_of_range_are_refused(fps: float, message: str) -> None:
    with pytest.raises(ConfigError, match=f"fps is .*{message}") as caught:
        INFOS["Glm4VProcessingInfo"].with_kwargs({"fps": fps})
    assert caught.value.info.param == "fps"


def test_a_low_rate_takes_one_frame() -> None:
    info: Glm4VProcessingInfo = INFOS["Glm4VProcessingInfo"].with_kwargs({"fps": 1e-3})
    assert sample_indices(120, 30.0, info.decode_spec.sampling) == [0]


def test_a_rate_far_above_the_sources_takes_each_frame_once() -> None:
    for total, source_fps, fps in product((1, 2, 7, 100), (0.5, 1.0, 23.976, 29.97, 60.0), (0.3, 1.0, 59.9, 120.0, 1000.0)):
        seconds = total / source_fps
        places = [i * source_fps / fps for i in range(max(1, math.floor(seconds * fps)))]
        expected = sorted({min(math.ceil(place), total - 1) for place in places})
        assert sample_indices(total, source_fps, FrameSampling(fps=fps, spread="after")) == expected
