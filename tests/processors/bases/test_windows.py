"""Families that cut audio into windows: content of a window, lengths, transcription prompts."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from family import make_media
from oracle import small_tekken
from sensorium.callers.errors import InputError
from sensorium.mm.types import AudioItem, MediaHeader
from sensorium.models.families.glmasr.processing import GlmAsrProcessingInfo
from sensorium.models.families.granite_speech.processing import GraniteSpeechProcessingInfo
from sensorium.models.families.ultravox.processing import UltravoxProcessingInfo
from sensorium.models.families.voxtral.processing import VoxtralProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.mel import log_mel
from sensorium.processors.text.tokenizer import Tokenizer

RATE = 16_000


def rows(info, samples: int) -> int:
    return info.geometry(MediaHeader("audio", samples=samples)).num_embeds


def sound(samples: int) -> AudioItem:
    return AudioItem(torch.from_numpy(make_media("audio", (samples,), 1)), RATE)


def test_rows_of_windows() -> None:
    glm, voxtral = GlmAsrProcessingInfo(ProcessorFiles()), VoxtralProcessingInfo(ProcessorFiles())
    ultravox = UltravoxProcessingInfo(ProcessorFiles(audio={"feature_size": 80}))
    seconds = {1: (12, 375, 7), 30: (375, 375, 188), 31: (387, 750, 195), 60: (750, 750, 376)}
    for length, counts in seconds.items():
        assert (rows(glm, length * RATE), rows(voxtral, length * RATE), rows(ultravox, length * RATE)) == counts


def test_audio_longer_than_the_model_takes_is_refused() -> None:
    glm, voxtral = GlmAsrProcessingInfo(ProcessorFiles()), VoxtralProcessingInfo(ProcessorFiles())
    assert rows(glm, 630 * RATE) == 21 * 375
    with pytest.raises(InputError, match=r"it lasts 631\.00 s, the model takes at most 630 s; cut it"):
        rows(glm, 631 * RATE)
    assert voxtral.mel_spec.max_samples == 131_072 // 375 * 30 * RATE
    with pytest.raises(InputError, match="too few for one token; give at least 961 "):
        rows(glm, 900)


def test_repeated_silence_is_not_stored() -> None:
    """Frames of silence at the end of a window are equal, so only one is stored."""
    info = VoxtralProcessingInfo(ProcessorFiles())
    tensors, _ = info.process(sound(31 * RATE), torch.float32)
    whole = log_mel(sound(31 * RATE).samples, info.mel_spec, 60 * RATE)
    heard = tensors["input_features"].data
    assert tensors["audio_frames"].data.tolist() == [3000, 103]
    assert torch.equal(heard, whole[:3103])
    assert (whole[3103:] == heard[-1]).all()


def test_a_loud_window_does_not_change_the_others() -> None:
    info, quiet = GlmAsrProcessingInfo(ProcessorFiles()), 0.001 * sound(30 * RATE).samples
    both, _ = info.process(AudioItem(torch.cat([sound(30 * RATE).samples, quiet]), RATE), torch.float32)
    alone, _ = info.process(AudioItem(quiet, RATE), torch.float32)
    assert torch.equal(both["input_features"].data[3000:], alone["input_features"].data)


@pytest.mark.parametrize("language", [None, "en"])
def test_the_transcription_prompt_equals_mistral_commons(tmp_path: Path, language: str | None) -> None:
    import soundfile
    from mistral_common.protocol.transcription.request import TranscriptionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    bands = {"num_mel_bins": 128, "hop_length": 160, "window_size": 400}
    said = {"sampling_rate": RATE, "frame_rate": 12.5, "audio_encoding_config": bands, "chunk_length_s": 30.0}
    (tmp_path / "tekken.json").write_text(json.dumps(small_tekken() | {"audio": said}))
    file = io.BytesIO()
    soundfile.write(file, np.zeros(RATE, np.float32), RATE, format="wav")
    given = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
    asked = TranscriptionRequest(model="any", audio=given["data"], language=language, strict_audio_validation=False)
    expected = MistralTokenizer.from_file(tmp_path / "tekken.json").encode_transcription(asked).tokens

    tokenizer = Tokenizer(tmp_path)
    placeholder = tokenizer.token_to_id("[AUDIO]")
    info = VoxtralProcessingInfo(ProcessorFiles(config={"audio_token_id": placeholder, "text_config": {"vocab_size": 2000}}))
    ids = tokenizer.encode(info.transcription_request(language, "transcribe", False, "").prompt)
    place = ids.index(placeholder)
    assert ids[:place] + [placeholder] * rows(info, RATE) + ids[place + 1 :] == expected


def test_an_adapter_beside_the_weights_is_for_prompts_with_audio(tmp_path: Path) -> None:
    assert GraniteSpeechProcessingInfo(ProcessorFiles(folder=tmp_path)).adapters == {}
    (tmp_path / "adapter_config.json").write_text("{}")
    assert GraniteSpeechProcessingInfo(ProcessorFiles(folder=tmp_path)).adapters == {"audio": "."}


def test_rows_of_pairs_of_frames() -> None:
    info = GraniteSpeechProcessingInfo(ProcessorFiles())
    assert [rows(info, n) for n in (257, 4639, 4640, 4800, 9439, 10 * RATE)] == [3, 3, 3, 3, 6, 102]
