"""Classes of transformers that paged attention does not support, and broken checkpoints of supported ones."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from oracle import ensure_torchvision, tokenizer
from safetensors.torch import load_file, save_file
from sensorium import LLM
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.engine.setup.doctor import describe_checkpoint
from sensorium.models.fallback.borrowed import build as build_class
from sensorium.models.fallback.fallback import Fallback

ensure_torchvision()
import transformers as tf  # noqa: E402


def config_of(kind, **parts):
    return kind.config_class(**parts).to_dict() | {"architectures": [kind.__name__]}


def test_other_decoders_are_refused_by_layer_and_kind():
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig

    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99}
    text = tf.Lfm2Config(**small, num_hidden_layers=2, layer_types=["full_attention", "conv"])
    with pytest.raises(ConfigError, match=r"Lfm2Vl.* layer 1 is conv, whose state is not keys and values"):
        build_class(config_of(tf.Lfm2VlForConditionalGeneration, text_config=text), torch.float32)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = MllamaTextConfig(**small, num_hidden_layers=2, cross_attention_layers=[1], rope_parameters=rope, pad_token_id=0)
    with pytest.raises(ConfigError, match=r"layer 1 \(MllamaCrossAttentionDecoderLayer\) attends 0 times"):
        build_class(config_of(tf.MllamaForConditionalGeneration, text_config=text), torch.float32)
    with pytest.raises(ConfigError, match="is an encoder-decoder model"):
        build_class(config_of(tf.Florence2ForConditionalGeneration), torch.float32)


def test_unknown_classes_are_refused(built, tmp_path, monkeypatch):
    folder = shutil.copytree(built("aya_vision"), tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["AyaVizionForConditionalGeneration"]}))
    with pytest.raises(ConfigError, match=r"no implementation of .*; transformers 5\S+ has no model AyaViz.* register a model"):
        LLM(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"is not installed: pip install 'sensorium\[fallback\]'"):
        LLM(folder)


def test_classes_that_transformers_has_but_cannot_run_here_are_named(tmp_path):
    def refuse(config, match):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=match):
            LLM(tmp_path)

    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer()).save_pretrained(tmp_path)
    ours = r"no implementation of the architecture '\w+' here .*; "
    refuse(
        {"architectures": ["ElectraModel"]},
        rf"{ours}transformers 5\S+ has ElectraModel, but only its classes that generate",
    )
    refuse(config_of(tf.GPTJForCausalLM), f"{ours}and through transformers: GPTJ.* chooses among attention classes of its own")
    refuse(config_of(tf.FalconForCausalLM, alibi=True), "alibi in the config of a falcon decoder must be false")


@pytest.mark.parametrize(
    ("name", "bias"),
    [("T5", ", with a bias of relative positions,"), *((name, "") for name in ("MBart", "Pegasus"))],
)
def test_encoder_decoder_models_are_refused_by_their_config_alone(name, bias, tmp_path):
    """The missing tokenizer is not named: it would not help."""
    kind = getattr(tf, f"{name}ForConditionalGeneration")
    whole = config_of(kind)
    named = {key: whole[key] for key in ("architectures", "model_type")}
    why = f"{kind.__name__} is an encoder-decoder model{bias} and .*; use transformers itself"
    for config in (whole, named):
        (tmp_path / "config.json").write_text(json.dumps(config))
        for call in (LLM, describe_checkpoint):
            with pytest.raises(
                ConfigError, match=rf"no implementation of the architecture .*; and through transformers: {why}"
            ):
                call(tmp_path)


def test_a_class_that_computes_otherwise_is_refused_when_loaded(built, monkeypatch):
    from transformers.models.cohere2.modeling_cohere2 import Cohere2MLP

    plain = Cohere2MLP.forward
    monkeypatch.setattr(Cohere2MLP, "forward", lambda self, x: plain(self, x) + x.mean(1, keepdim=True))  # mixes rows
    with pytest.raises(ConfigError, match=r"AyaVision.* differ from ours .* more than causal attention"):
        LLM(built("aya_vision"), max_model_len=256)


def test_what_only_models_of_ours_can_do_is_refused(built):
    with pytest.raises(ConfigError, match="quantization='int8' is not supported for this model"):
        LLM(built("aya_vision"), quantization="int8")
    with pytest.raises(ConfigError, match="media_device='cuda' is not supported for this model"):
        LLM(built("aya_vision"), media_device="cuda")


def test_weights_that_are_missing_or_left_over_are_named(built, tmp_path):
    folder = shutil.copytree(built("audioflamingo3"), tmp_path / "torn")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(weights) if "linear_1.weight" in name)
    moved = {key: value for key, value in weights.items() if key != name} | {"odd.weight": weights[name].clone()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks .*linear_1\.weight"):
        LLM(folder, max_model_len=256)
    save_file(weights | {"odd.weight": weights[name].clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"holds unknown odd\.weight"):
        LLM(folder, max_model_len=256)


def test_tensors_that_the_class_ignores_are_not_read(built, tmp_path, monkeypatch):
    folder = shutil.copytree(built("audioflamingo3"), tmp_path / "more")
    stored, read, load = load_file(folder / "model.safetensors"), [], Fallback.load_weights
    save_file(stored | {"mtp.norm.weight": torch.zeros(4)}, folder / "model.safetensors", metadata={"format": "pt"})

    def spy(self, weights):
        weights = dict(weights)
        read.extend(weights)
        load(self, weights.items())

    monkeypatch.setattr(Fallback, "load_weights", spy)
    kind = tf.AudioFlamingo3ForConditionalGeneration
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"^mtp.*", "norm"])
    LLM(folder, max_model_len=256).close()
    assert set(read) == set(stored)


def test_the_error_for_an_unsupported_stack_has_both_reasons(tmp_path):
    def refuse(config, match):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=match):
            LLM(tmp_path)

    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer()).save_pretrained(tmp_path)
    text = {"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 640}
    ours = r"model_type 'rwkv' is not supported; known are .*; "
    refuse({"architectures": ["UltravoxModel"], "text_config": text}, f"{ours}transformers .* has no model Ultravox")
    whole = config_of(tf.LlavaForConditionalGeneration, text_config=tf.RwkvConfig(**text))
    refuse(whole, f"{ours}and through transformers: ")
    refuse(text | {"architectures": ["LlamaForCausalLM"]}, f"{ours}and through transformers: Llama.* is for model_type 'llama'")


def test_a_text_model_with_other_results_is_refused(tmp_path, monkeypatch):
    from transformers.models.olmo.modeling_olmo import OlmoMLP

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tf.OlmoForCausalLM(tf.OlmoConfig(**sizes, vocab_size=640)).save_pretrained(tmp_path)
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer()).save_pretrained(tmp_path)
    plain = OlmoMLP.forward
    monkeypatch.setattr(OlmoMLP, "forward", lambda self, x: plain(self, x) + x.mean(1, keepdim=True))  # mixes rows
    with pytest.raises(ConfigError, match=r"Olmo.* differ from ours .* more than causal attention"):
        LLM(tmp_path, max_model_len=64)
