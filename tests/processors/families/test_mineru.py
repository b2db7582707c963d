"""MinerU 2.0: its template, and what its config.json may say of tiles."""

import pytest
from oracle import fast_tokenizer
from sensorium.callers.errors import ConfigError
from sensorium.models.families.llava.config import stretched_tiles
from sensorium.models.families.llava.processing import Mineru2ProcessingInfo
from sensorium.processors.text.chat import render_chat
from sensorium.processors.text.tokenizer import Tokenizer

SYSTEM = "A conversation between a user and an LLM-based AI assistant. The assistant gives helpful and honest answers."


def test_published_tiles():
    tiling, most = stretched_tiles({}, 384)
    assert (len(tiling.sizes), tiling.sizes[1], tiling.sizes[-1], most) == (16, (768, 384), (1536, 1536), 9)
    assert tiling.plan(100, 400).views[1].tile_size == (384, 384)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"image_grid_pinpoints": "none"}, "image size"),
        ({"image_grid_pinpoints": [[384]]}, "image_grid_pinpoints"),
        ({"image_aspect_ratio": "pad"}, "image_aspect_ratio"),
    ],
)
def test_tiles_that_are_not_supported(config, said):
    with pytest.raises(ConfigError, match=said):
        stretched_tiles(config, 384)


@pytest.mark.parametrize("own", ["", "Be brief."])
def test_the_template_writes_the_publishers_prompt(tmp_path, own):
    fast_tokenizer(["<image>", "<|im_start|>", "<|im_end|>"]).save_pretrained(tmp_path)
    parts = [{"type": "image", "image": b"page"}, {"type": "text", "text": "Document Parsing:"}]
    messages = [{"role": "system", "content": own}] if own else []
    messages.append({"role": "user", "content": parts})
    chat = render_chat(messages, Mineru2ProcessingInfo.chat_template, Tokenizer(tmp_path))
    user = "<|im_start|>user\n<image>\nDocument Parsing:<|im_end|><|im_start|>assistant\n"
    assert chat.text == f"<|im_start|>system\n{own or SYSTEM}<|im_end|>{user}"
