"""Building classes of transformers, without downloads."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.models.fallback.borrowed import ATTENTION, build, class_of

SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = SIZES | {"model_type": "cohere2", "vocab_size": 99, "eos_token_id": 1}
VISION = SIZES | {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 56}


def test_what_a_config_names_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a backbone nor an attention kernel, which would be code, is downloaded."""
    import transformers as tf
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    config: dict[str, Any] = {"text_config": TEXT, "vision_config": VISION | {"attn_implementation": "some/kernel"}}
    config |= {"architectures": ["AyaVisionForConditionalGeneration"], "_attn_implementation": "flash_attention_2"}
    outer = build(config, torch.float32).outer
    used = {module.config._attn_implementation for module in outer.modules() if isinstance(module, tf.PreTrainedModel)}
    assert used <= {None, ATTENTION, "sdpa"}
    assert constants.HF_HUB_OFFLINE is False

    def fetch(*_: object, **__: object) -> None:
        assert constants.HF_HUB_OFFLINE
        raise ConnectionError("offline mode is enabled")

    monkeypatch.setattr(tf.PreTrainedModel, "_from_config", fetch)
    with pytest.raises(ConfigError, match=r"cannot be built from config\.json: offline mode is enabled"):
        build(config, torch.float32)
    with pytest.raises(ConfigError, match=r"cannot be built from config\.json: Validation error for field 'hidden_size'"):
        build(config | {"text_config": {"model_type": "cohere2", "hidden_size": "big"}}, torch.float32)


def test_a_class_that_cannot_be_imported_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(types.ModuleType):
        __version__ = "5.0"

        def __getattr__(self, name: str) -> object:
            raise ModuleNotFoundError(f"Could not import module {name!r}.") from RuntimeError("operator nms\ndoes not exist")

    monkeypatch.setitem(sys.modules, "transformers", Broken("transformers"))
    with pytest.raises(
        ImportError, match=r"^transformers 5.0 cannot import its Other \(operator nms does not exist\); reinstall"
    ):
        class_of({"architectures": ["Other"]})
