"""VibeVoice-ASR: the seconds of audio in prompts, loudness, settings, and the text of answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import fast_tokenizer
from sensorium.callers.errors import ConfigError
from sensorium.mm.types import AudioItem, ItemGeometry
from sensorium.models.families.vibevoice_asr.processing import VibeVoiceAsrProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.spans import lay_out

WORDS = fast_tokenizer(["<|box_start|>"])
AUDIO = WORDS.convert_tokens_to_ids("<|box_start|>")
DURATION = "<|AUDIO_DURATION|>"


def info_of(ratios: Any = None, **audio: Any) -> VibeVoiceAsrProcessingInfo:
    tokenizer = WORDS.backend_tokenizer

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    files = ProcessorFiles(
        config={"audio_token_id": AUDIO, "acoustic_tokenizer_encoder_config": {"downsampling_ratios": ratios}},
        audio=audio,
        encode=encode,
        encode_trusted=encode,
        decode=lambda ids: "" if list(ids) == [AUDIO] else WORDS.decode(ids),
    )
    return VibeVoiceAsrProcessingInfo(files)


def expanded(text: str, *seconds: float) -> str:
    """Return a prompt with one row for each audio, without its row."""
    info = info_of()
    ids = info.preprocess_prompt(info.files.encode(text), {"audio": len(seconds)})
    spans = [[info.span("audio", ItemGeometry(1, 1, 1, times=(one,)))] for one in seconds]
    return str(WORDS.decode(lay_out(ids, {"audio": spans}, {"audio": AUDIO}).expand()[0])).replace("<|box_start|>", "")


@pytest.mark.parametrize(
    ("text", "seconds", "found"),
    [
        (f"<|box_start|>\nThis is a {DURATION} seconds audio", (12.345,), "\nThis is a 12.35 seconds audio"),
        (f"<|box_start|>a {DURATION} b<|box_start|>{DURATION}", (1.0, 62.5), "a 1.00 b62.50"),
        (f"{DURATION}<|box_start|>", (1.0,), DURATION),  # before its audio, it is text
    ],
)
def test_seconds_of_the_audio_before_it(text: str, seconds: tuple[float, ...], found: str) -> None:
    assert expanded(text, *seconds) == found


def test_a_prompt_without_audio_stays_as_it_is() -> None:
    info = info_of()
    ids = info.files.encode(DURATION)
    assert info.preprocess_prompt(ids, {}) == ids


def test_each_token_of_a_prompt_is_decoded_a_few_times() -> None:
    info, calls = info_of(), list[int]()
    decode = info.files.decode
    info.files = replace(info.files, decode=lambda ids: (calls.append(1), decode(ids))[1])
    ids = info.files.encode("<|box_start|>" + "a>" * 500)
    assert info.preprocess_prompt(ids, {"audio": 1}) == ids
    assert len(calls) <= 2 * len(ids)


def test_rows_alone_tell_their_seconds() -> None:
    fills = info_of().span("audio", ItemGeometry(15, 1, 1)).fills
    assert [WORDS.decode(tokens) for tokens in fills.values()] == ["2.00"]


def leveled(samples: torch.Tensor, **audio: Any) -> torch.Tensor:
    return info_of(**audio).process(AudioItem(samples, 24_000), torch.float32)[0]["input_values"].data


def test_loudness() -> None:
    tone, spike = torch.sin(torch.arange(6400) * 0.3), torch.zeros(6400)
    quiet, loud = leveled(tone * 1e-2), leveled(tone)
    assert float(quiet.square().mean().sqrt()) == pytest.approx(10**-1.25, rel=2e-3)  # -25 dB
    assert torch.allclose(quiet, loud, rtol=2e-3)
    assert not leveled(tone * 0).any()
    spike[7] = 0.5
    assert leveled(spike).max() <= 1.0
    assert torch.equal(leveled(tone, normalize_audio=False), tone)


@pytest.mark.parametrize("audio", [{"target_dB_FS": "-25"}, {"eps": -1}, {"sampling_rate": 0}, {"ratios": [2, "4"]}])
def test_settings_are_checked(audio: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        info_of(**audio)


def test_answers_become_text() -> None:
    info = info_of()
    segments = 'assistant\n[{"Start":0,"End":7.5,"Speaker":0,"Content":"Hello there."},{"Start":7.5,"Content":" Hi. "}'
    assert info.parse_transcript(segments + "]\n<|im_end|>", None) == ("Hello there. Hi.", None)
    assert info.parse_transcript(segments + ',{"Start":9,"Con', None) == ("Hello there. Hi.", None)
    assert info.parse_transcript("[unclear] words", None) == ("[unclear] words", None)
    assert info.parse_transcript("[" * 100_000, None) == ("[" * 100_000, None)


def test_the_published_prompt() -> None:
    request = info_of().transcription_request(None, "transcribe", False, "Ann")
    assert f"\nThis is a {DURATION} seconds audio, with extra info: Ann\n\nPlease transcribe it with these" in request.prompt
    assert "audio, please transcribe it with these keys" in info_of().transcription_request(None, "", False, "").prompt
