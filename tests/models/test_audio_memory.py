"""Memory formulas of audio encoders against live tensors, for lengths with and without padded rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from measured import filled, peak_bytes
from sensorium.models.audio import aut, chunked_encoder, mel_encoder
from sensorium.models.audio.aut import AutSpec
from sensorium.models.audio.mel_encoder import MelEncoderSpec, mel_encoder_bytes
from sensorium.models.interface import StepLimits
from sensorium.models.text.spec import RopeSpec

CPU = torch.device("cpu")
LIMITS = StepLimits(1, 1, 1, CPU)
NARROW = MelEncoderSpec(mels=24, width=64, inner=96, heads=4, layers=2, positions=1500)
JOINED = replace(NARROW, inner=256)
ROTARY = replace(JOINED, rope=RopeSpec(10000.0, 8, (0,) * 4))
BANDS = replace(NARROW, mels=128)
WIDE = replace(NARROW, width=256, inner=1024, mels=80)
LENGTHS = [332, 1792, 2050]  # rows of the second are not padded, those of one frame less are
NEAR = 0.1  # of the live bytes
OUT = 96
AUT = AutSpec(replace(NARROW, positions=13, key_bias=True), channels=16, chunk=100, window=400, out=OUT)
Made = tuple[mel_encoder.MelEncoder | chunked_encoder.ChunkedEncoder | aut.AutEncoder, bool, Callable[[int], int]]


def whisper(c: MelEncoderSpec, pool: int = 1, silence: bool = True) -> Callable[[torch.dtype], Made]:
    """Return a function from a dtype to the encoder, True if it reads silence after the audio, and its formula."""
    return lambda dtype: (
        mel_encoder.MelEncoder(c, dtype, CPU, pool, silence=silence),
        silence,
        lambda frames: mel_encoder_bytes(c, frames, 0, dtype, LIMITS),
    )


def chunked(c: MelEncoderSpec) -> Callable[[torch.dtype], Made]:
    return lambda dtype: (
        chunked_encoder.ChunkedEncoder(c, OUT, dtype, CPU),
        False,
        lambda frames: mel_encoder_bytes(c, frames, OUT, dtype, LIMITS),
    )


def auts(spec: AutSpec) -> Callable[[torch.dtype], Made]:
    return lambda dtype: (aut.AutEncoder(spec, dtype, CPU), False, lambda frames: aut.aut_bytes(spec, frames, dtype, LIMITS))


CASES = {
    "plain": whisper(NARROW),
    "inner of four": whisper(JOINED),
    "many bands, averaged": whisper(BANDS, 2),
    "no silence": whisper(NARROW, silence=False),
    "rotary": whisper(ROTARY),
    "wide": whisper(WIDE),
    "in chunks": chunked(replace(NARROW, positions=100)),
    "in chunks, wide": chunked(replace(WIDE, positions=20)),
    "aut": auts(AUT),
    "aut, wide": auts(replace(AUT, layer=replace(WIDE, positions=13, key_bias=True))),
    "aut of more channels, short audio not padded": auts(replace(AUT, channels=48, pad_short=False)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frames", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_audio_of_at_most_so_many_frames_takes_what_is_planned(case: str, frames: int, dtype: torch.dtype) -> None:
    model, silence, plan = CASES[case](dtype)
    filled(model)
    layer = model.spec.layer if isinstance(model, aut.AutEncoder) else model.config

    def live(count: int) -> int:
        features = torch.randn(2 * ((count + 1) // 2) + 1 if silence else count, layer.mels).to(dtype)
        return features.nbytes + peak_bytes(lambda: model(features, [count]))

    most, planned = max(live(count) for count in range(frames - 3, frames + 1)), plan(frames)
    assert most <= planned <= (1 + NEAR) * most
