"""`llm.transcribe` with Moonshine: audio of any length, in any batch, and the times of words by its cross-attention."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import family
import numpy as np
import pytest
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import InputError

RATE = 16_000
SHORT = SamplingParams(temperature=0.0, max_tokens=8)


def make_audio(seed: int, seconds: float) -> tuple[np.ndarray, int]:
    return family.make_media("audio", (round(seconds * RATE),), seed), RATE


@pytest.mark.parametrize("name", ["moonshine", "moonshine_streaming"])
def test_any_length_in_any_batch_with_words(name: str, tmp_path: Path) -> None:
    with LLM(family.save(family.load_rows()[name], tmp_path), max_num_seqs=4) as llm:
        items = [make_audio(1, 2.3), make_audio(2, 0.3), (np.zeros(2 * RATE, np.float32), RATE)]
        given = {"sampling_params": SHORT, "use_tqdm": False}
        together = llm.transcribe(items, vad=False, timestamps="word", **given)
        assert [one.error for one in together] == [None] * 3
        assert len(together[0].windows) > 2
        for item, one in zip(items, together, strict=True):
            (alone,) = llm.transcribe(item, vad=False, timestamps="word", **given)
            assert (alone.windows, alone.segments) == (one.windows, one.segments)
            words = [word for part in one.segments for word in part.words]
            assert words
            assert all(0 <= word.start <= word.end <= one.duration for word in words)
            assert all(a.end <= b.start for a, b in pairwise(words))
            for part in one.segments:
                assert "".join("".join(word.word for word in part.words).split()) == "".join(part.text.split())
        assert llm.transcribe(items[2], **given)[0].skipped == "silence"
        for options in ({"language": "en"}, {"timestamps": "segment"}, {"context": "Ann"}):
            with pytest.raises(InputError, match="leave"):
                llm.transcribe(items[1], **given, **options)
