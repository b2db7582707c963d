"""Cosmos 3 Edge: the tokens around a video's placeholder."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sensorium.models.families.cosmos3_edge.processing import Cosmos3EdgeProcessingInfo
from sensorium.processors.files import ProcessorFiles

IMAGE, VIDEO, START, END = 19, 18, 20, 21
WRAPPED = (START, VIDEO, END)


@pytest.mark.parametrize(
    ("ids", "videos", "expected"),
    [
        ((5, *WRAPPED, 6), 1, [5, VIDEO, 6]),
        ((5, VIDEO, 6), 1, [5, VIDEO, 6]),
        ((*WRAPPED, *WRAPPED), 2, [VIDEO, VIDEO]),
        ((START, IMAGE, END, *WRAPPED), 1, [START, IMAGE, END, VIDEO]),
        ((5, *WRAPPED, 6, *WRAPPED), 1, [5, *WRAPPED, 6, *WRAPPED]),  # two frames of one row each
    ],
)
def test_the_tokens_of_each_frame_replace_those_around_a_video(ids: Sequence[int], videos: int, expected: list[int]) -> None:
    info = Cosmos3EdgeProcessingInfo(ProcessorFiles())
    assert list(info.preprocess_prompt(ids, {"video": videos})) == expected
    assert list(info.preprocess_chat(ids, {"video": videos})) == expected
