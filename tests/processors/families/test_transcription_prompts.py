"""Prompts that Qwen-Omni, Gemma 3n and MiniCPM-o transcribe and translate with."""

from __future__ import annotations

import pytest
from sensorium.models.families.gemma3n.processing import Gemma3nProcessingInfo
from sensorium.models.families.minicpmv.processing import MiniCPMOProcessingInfo
from sensorium.models.families.qwen2_5_omni.processing import Qwen25OmniProcessingInfo
from sensorium.models.families.qwen3_omni.processing import Qwen3OmniProcessingInfo
from sensorium.processors.files import ProcessorFiles

HEARD = {
    (None, "transcribe"): "Transcribe the audio into text",
    ("fr", "transcribe"): "Transcribe the French audio into text",
    (None, "translate"): "Listen to the provided speech and produce a translation in English text",
    ("fr", "translate"): "Listen to the provided French speech and produce a translation in English text",
}


def prompt(info: type, language: str | None, task: str) -> str:
    return info(ProcessorFiles()).transcription_request(language, task, False, "").prompt


@pytest.mark.parametrize(("language", "task"), HEARD)
def test_qwen_omni(language: str | None, task: str) -> None:
    asked = HEARD[language, task]
    kind, more = ("recognition", " without any punctuation marks") if task == "transcribe" else ("translation", "")
    system = f"<|im_start|>system\nYou are a speech {kind} model.<|im_end|>\n"
    assert prompt(Qwen25OmniProcessingInfo, language, task) == (
        f"{system}<|im_start|>user\n<|audio_bos|><|AUDIO|><|audio_eos|>{asked}{more}.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt(Qwen3OmniProcessingInfo, language, task) == (
        f"<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|>{asked}.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_qwen3_omni_asks_for_chinese_in_chinese() -> None:
    assert "\u8bf7\u5c06\u8fd9\u6bb5\u4e2d\u6587" in prompt(Qwen3OmniProcessingInfo, "zh", "transcribe")
    assert "provided Chinese speech" in prompt(Qwen3OmniProcessingInfo, "zh", "translate")


@pytest.mark.parametrize(
    ("language", "task", "asked"),
    [
        (None, "transcribe", "Transcribe this audio"),
        ("de", "transcribe", "Transcribe this audio into German"),
        (None, "translate", "Translate this audio into English"),
        ("de", "translate", "Translate this audio from German into English"),
    ],
)
def test_gemma3n(language: str | None, task: str, asked: str) -> None:
    expected = f"<start_of_turn>user\n{asked}: <audio_soft_token><end_of_turn>\n<start_of_turn>model\n"
    assert prompt(Gemma3nProcessingInfo, language, task) == expected


@pytest.mark.parametrize(
    ("version", "begins"),
    [(2.6, "<|spk_bos|><|spk|><|spk_eos|><|tts_bos|>"), (4.5, "<think>\n\n</think>\n\n<|tts_bos|>")],
)
def test_minicpm_o(version: float, begins: str) -> None:
    """The prompts equal those that the publisher's `chat` writes with `use_tts_template=True`."""
    info = object.__new__(MiniCPMOProcessingInfo)  # its files need a tokenizer with tags
    info.files = ProcessorFiles(config={"version": version})
    asked = {
        None: "Please listen to the audio snippet carefully and transcribe the content.",
        "zh": "\u8bf7\u4ed4\u7ec6\u542c\u8fd9\u6bb5\u97f3\u9891\u7247\u6bb5\uff0c"
        "\u5e76\u5c06\u5176\u5185\u5bb9\u9010\u5b57\u8bb0\u5f55\u3002",
    }
    asked["en"] = asked[None]
    for language, text in asked.items():
        expected = f"<|im_start|>user\n{text}\n\n(<audio>./</audio>)<|im_end|>\n<|im_start|>assistant\n{begins}"
        assert info.transcription_request(language, "transcribe", False, "").prompt == expected
