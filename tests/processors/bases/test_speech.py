"""Prompts and outputs of families that transcribe speech, and languages by name."""

from __future__ import annotations

import pytest
from sensorium.mm.errors import ConfigError, InputError
from sensorium.mm.speech import LANGUAGES, language_code, strip_control_tokens
from sensorium.mm.types import MediaHeader
from sensorium.processors.families.audioflamingo3 import AudioFlamingo3ProcessingInfo
from sensorium.processors.families.qwen2_audio import Qwen2AudioProcessingInfo
from sensorium.processors.families.qwen2_vl import Qwen2VLProcessingInfo
from sensorium.processors.families.qwen3_asr import Qwen3ASRProcessingInfo
from sensorium.processors.families.whisper import WhisperProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.interface import SupportsTranscription

RATE = 16_000
ENGLISH = {"is_multilingual": False, "no_timestamps_token_id": 50362, "eos_token_id": 50256}
MANY = {"lang_to_id": {"<|en|>": 50259, "<|de|>": 50261}, "suppress_tokens": [1, 2], "begin_suppress_tokens": [220]}


def whisper(**generation: object) -> WhisperProcessingInfo:
    return WhisperProcessingInfo(ProcessorFiles(audio={"feature_size": 80}, generation=generation))


def test_whisper_always_has_a_full_window() -> None:
    """Audio of any length up to 30 s gives 1500 rows."""
    info = whisper(**ENGLISH)
    for samples in (1, 400, RATE, 30 * RATE):
        assert info.geometry(MediaHeader("audio", samples=samples)).num_embeds == 1500
    with pytest.raises(InputError, match=r"it lasts 30\.00 s, the model takes at most 30 s"):
        info.geometry(MediaHeader("audio", samples=30 * RATE + 1))
    assert info.geometry(MediaHeader("audio", samples=99 * RATE, exact=False)).num_embeds == 1500


def test_config_must_agree_with_the_window() -> None:
    with pytest.raises(ConfigError, match=r"max_source_positions is 1000 in config\.json"):
        WhisperProcessingInfo(ProcessorFiles(config={"max_source_positions": 1000}, audio={"feature_size": 80}))


def test_prompts_of_whisper() -> None:
    english, many = whisper(**ENGLISH), whisper(**MANY)
    assert english.language_detection_request() is None
    assert english.transcription_request(None, "transcribe", False, "").prompt == "<|startoftranscript|><|notimestamps|>"
    timed = english.transcription_request(None, "transcribe", True, " Ann ")
    assert timed.prompt == "<|startofprev|> Ann<|startoftranscript|>"
    assert (timed.times.first, timed.times.none, timed.times.end, timed.times.step) == (50363, 50362, 50256, 0.02)
    assert many.language_detection_request().allowed_tokens == {"<|en|>": "en", "<|de|>": "de"}
    asked = many.transcription_request("de", "translate", False, "")
    assert asked.prompt == "<|startoftranscript|><|de|><|translate|><|notimestamps|>"
    assert (asked.suppressed, asked.suppressed_first, asked.times) == ((1, 2), (220,), None)
    assert (english.tasks, many.tasks) == (("transcribe",), ("transcribe", "translate"))
    assert not many.has_timestamps


def test_lengths_of_qwen3_asr() -> None:
    """Audio shorter than half a second is padded; 20 minutes is the limit."""
    info = Qwen3ASRProcessingInfo(ProcessorFiles(audio={"feature_size": 128}))
    counts = {1: 7, 8000: 7, RATE: 13, RATE + 159: 13, RATE + 160: 14, 3 * RATE: 39, 1200 * RATE: 15_600}
    for samples, rows in counts.items():
        assert info.geometry(MediaHeader("audio", samples=samples)).num_embeds == rows
    with pytest.raises(InputError, match="at most 1200 s"):
        info.geometry(MediaHeader("audio", samples=1200 * RATE + 1))


def test_prompts_and_answers_of_qwen3_asr() -> None:
    info = Qwen3ASRProcessingInfo(ProcessorFiles(audio={"feature_size": 128}))
    turns = "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n<|im_start|>assistant\n"
    assert info.transcription_request(None, "transcribe", False, "").prompt == f"<|im_start|>system\n<|im_end|>\n{turns}"
    told = info.transcription_request("yue", "transcribe", False, "Ann").prompt
    assert told == f"<|im_start|>system\nAnn<|im_end|>\n{turns}language Cantonese<asr_text>"
    assert info.parse_transcript("language English<asr_text> Hello.<|im_end|>", None) == ("Hello.", "en")
    assert info.parse_transcript("language None<asr_text>", None) == ("", None)
    assert info.parse_transcript("Guten Tag.<|im_end|>", "de") == ("Guten Tag.", "de")
    assert info.mel_spec.max_samples == 1200 * RATE


def test_prompts_and_answers_of_qwen2_audio() -> None:
    info = Qwen2AudioProcessingInfo(ProcessorFiles(audio={"feature_size": 128}))
    asked = info.transcription_request("de", "transcribe", False, "").prompt
    assert asked == "<|audio_bos|><|AUDIO|><|audio_eos|>Detect the language and recognize the speech: <|de|>"
    assert info.transcription_request(None, "transcribe", False, "").prompt.endswith("the speech:")
    assert info.parse_transcript("<|zh|>你好。<|endoftext|>", None) == ("你好。", "zh")
    assert info.parse_transcript(" Hello.", "en") == ("Hello.", "en")
    assert info.parse_transcript("Hello.", None) == ("Hello.", None)


def test_prompts_and_answers_of_audio_flamingo() -> None:
    info = AudioFlamingo3ProcessingInfo(ProcessorFiles(audio={"feature_size": 128}))
    prompt = info.transcription_request(None, "transcribe", False, "").prompt
    assert prompt.endswith("<|im_start|>user\n<sound>Transcribe the input speech.<|im_end|>\n<|im_start|>assistant\n")
    for answer in (
        'The spoken content of the audio is "It is 5.30."<|im_end|>',
        "The content of the input audio is 'It is 5.30.'.",
    ):
        assert info.parse_transcript(answer, None) == ("It is 5.30.", None)
    for answer in ('She said "no".', "It is 5.30.", "", '"'):
        assert info.parse_transcript(answer, None) == (answer, None)
    assert info.mel_spec.max_samples == 600 * RATE


@pytest.mark.parametrize("info", [WhisperProcessingInfo, Qwen3ASRProcessingInfo, Qwen2AudioProcessingInfo])
def test_families_that_support_transcription(info: type) -> None:
    assert isinstance(info(ProcessorFiles()), SupportsTranscription)
    assert not isinstance(Qwen2VLProcessingInfo(ProcessorFiles()), SupportsTranscription)


def test_languages_by_code_and_name() -> None:
    assert language_code(" DE ", LANGUAGES) == language_code("German", LANGUAGES) == "de"
    assert language_code("haitian creole", LANGUAGES) == "ht"
    with pytest.raises(InputError, match="language='xx' is unknown to this model"):
        language_code("xx", LANGUAGES)
    with pytest.raises(InputError, match="language=3"):
        language_code(3, LANGUAGES)  # type: ignore[arg-type]
    assert strip_control_tokens("<|en|> a <|0.00|>b<|endoftext|>") == " a b"
