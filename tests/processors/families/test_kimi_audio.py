"""Kimi-Audio's prompts, and the files of its encoder's folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import TemplateError
from sensorium.callers.errors import ConfigError
from sensorium.engine.setup.hub_cache import RemoteFile, remote_weights, small_files
from sensorium.models.families.kimi_audio.model import KimiAudio
from sensorium.models.families.kimi_audio.processing import KimiAudioProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.text.template import Sandbox

AUDIO = "<|im_media_begin|><|im_kimia_text_blank|><|im_media_end|>"
USER, ASSISTANT, END = "<|im_kimia_user_msg_start|>", "<|im_kimia_assistant_msg_start|>", "<|im_msg_end|>"
ASK = "请将音频内容转换为文字。"


def test_the_transcription_prompt_is_the_publishers() -> None:
    info = KimiAudioProcessingInfo(ProcessorFiles())
    request = info.transcription_request(None, "transcribe", False, "")
    assert request.prompt == f"{USER}{ASK}{AUDIO}<|im_kimia_speech_ct_id|>{END}{ASSISTANT}"
    assert [info.num_item_rows(samples) for samples in (1, 1280, 1281, 480_000, 480_001)] == [1, 1, 2, 375, 376]


def test_the_chat_template_joins_the_publishers_messages() -> None:
    """The token that asks for an answer in text follows audio at the end of a turn; answers end with a token of their own."""

    def rendered(*messages: dict[str, Any]) -> str:
        sandbox = Sandbox()
        sandbox.load(KimiAudioProcessingInfo.chat_template or "")
        return str(sandbox.render({"messages": messages, "add_generation_prompt": True}, 1000, 10.0))

    heard, asked = {"type": "audio"}, {"type": "text", "text": ASK}
    ask = {"role": "user", "content": [asked, heard]}
    first = f"{USER}{ASK}{AUDIO}<|im_kimia_speech_ct_id|>{END}"
    assert rendered(ask) == first + ASSISTANT
    more = {"role": "assistant", "content": "Yes."}, {"role": "user", "content": [heard, asked]}
    answered = f"{first}{ASSISTANT}Yes.<|im_kimia_text_eos|>{END}"
    assert rendered(ask, *more) == f"{answered}{USER}{AUDIO}{ASK}{END}{ASSISTANT}"
    one_turn = {"role": "user", "content": [heard]}, {"role": "user", "content": ASK}, {"role": "user", "content": [heard]}
    assert rendered(*one_turn) == f"{USER}{AUDIO}{ASK}{AUDIO}<|im_kimia_speech_ct_id|>{END}{ASSISTANT}"
    with pytest.raises(TemplateError, match="no message of role system"):
        rendered({"role": "system", "content": "Be brief."}, ask)


def test_files_of_the_encoders_folder_are_downloaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"use_whisper_feature": True}))
    names = ["config.json", "model.safetensors", "detokenizer/model.safetensors", "whisper-large-v3/model.safetensors"]
    names += [f"whisper-large-v3/{name}" for name in ("config.json", "preprocessor_config.json", "vocab.json")]
    files = {name: RemoteFile(name, 1, "0") for name in names}
    small = {"config.json", "whisper-large-v3/config.json", "whisper-large-v3/preprocessor_config.json"}
    assert set(small_files(files)) == small
    found = [file.name for file in remote_weights("moonshotai/Kimi-Audio-7B-Instruct", files, tmp_path)]
    assert found == ["model.safetensors", "whisper-large-v3/model.safetensors"]


def test_a_tied_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        KimiAudio({"tie_word_embeddings": True}, torch.float32, torch.device("meta"))
