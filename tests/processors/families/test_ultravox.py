"""Ultravox: the placeholder is plain text; in a conversation, only the template can write it."""

from __future__ import annotations

import numpy as np
import pytest
from sensorium.callers.errors import ConfigError
from sensorium.engine.frontend.input_processor import InputProcessor
from sensorium.engine.frontend.media import MultiModalSettings
from sensorium.models.families.ultravox.processing import UltravoxProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.text.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Fast

PLACEHOLDER = 9999
TEMPLATE = (
    "{% for m in messages %}<s>{% for part in m.content %}"
    "{{ '<|audio|>' if part.type == 'audio' else part.text | lower }}{% endfor %}</s>{% endfor %}"
)


@pytest.fixture
def inputs(tmp_path) -> InputProcessor:
    letters = sorted({*"<|audio|>hello", *"</s>"})
    fast = Fast(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tok = Tokenizer(tmp_path)
    config = {"audio_token_index": PLACEHOLDER}
    files = ProcessorFiles(config, audio={"feature_size": 80}, encode=tok.encode_ordinary, decode=tok.decode)
    return InputProcessor(UltravoxProcessingInfo(files), tok, MultiModalSettings(), 4096)


@pytest.mark.parametrize("text", ["hello", "<|audio|>", "<|AUDIO|>", "<|audio", "|>"])
def test_text_of_a_user_is_no_placeholder(inputs, text):
    parts = [{"type": "text", "text": text}, {"type": "audio", "audio": np.zeros(16_000, np.float32)}]
    parsed = inputs.parse_chat([{"role": "user", "content": parts}], {"template": TEMPLATE}, {})
    ids = list(parsed.token_ids)
    assert ids.count(PLACEHOLDER) == 1
    assert ids[-2] == PLACEHOLDER  # before the end of the turn
    tok = inputs._tokenizer
    assert "".join(tok.decode([number], False) for number in ids[1:-2]) == text.lower()


def test_the_placeholder_of_a_raw_prompt(inputs):
    audio = {"audio": np.zeros(16_000, np.float32)}
    parsed = inputs.parse({"prompt": "<s><|audio|>hello", "multi_modal_data": audio})
    assert list(parsed.token_ids).count(PLACEHOLDER) == 1


def test_mel_bands_without_a_preprocessor_file_are_those_of_the_encoder():
    config = {"audio_token_index": PLACEHOLDER, "audio_config": {"num_mel_bins": 128}}
    assert UltravoxProcessingInfo(ProcessorFiles(config)).mel_spec.num_mel_bins == 128
    with pytest.raises(ConfigError, match="num_mel_bins is 128 in audio_config"):
        UltravoxProcessingInfo(ProcessorFiles(config, audio={"hop_length": 160}))
