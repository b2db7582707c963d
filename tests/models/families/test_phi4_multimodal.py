"""Tests of Phi-4-multimodal beside the parity suite: long audio, configs, parts of the model, published constants."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from family import ask, load_rows, save
from safetensors.torch import load_file, save_file
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.checkpoints.adapters import adapter_spec
from sensorium.models.audio.biased_conformer import BiasedConformer, biased_conformer_spec
from sensorium.models.families.phi4_multimodal.model import AUDIO, Phi4Multimodal
from sensorium.models.weights import fill

CPU = torch.device("cpu")
OPTIONS = {"max_num_seqs": 2, "max_model_len": 256, "block_size": 4, "device": "cpu"}


@torch.inference_mode()
def test_audio_of_more_than_500_rows_is_the_oracles():
    """Segments of 500 rows; the last one is filled up with zeros that are attended to."""
    import transformers as tf
    from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalAudioModel

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_blocks": 2, "num_attention_heads": 2, "ext_pw_out_channel": 16}
    sizes |= {"depthwise_separable_out_channel": 16, "input_size": 8, "nemo_conv_channels": 8, "bias_max_distance": 40}
    gen = torch.Generator().manual_seed(0)
    theirs = Phi4MultimodalAudioModel._from_config(tf.Phi4MultimodalAudioConfig(**sizes), attn_implementation="eager").eval()
    for value in theirs.parameters():
        value.copy_(torch.randn(value.shape, generator=gen) / max(1, value[0].numel() if value.ndim > 1 else 4) ** 0.5)
    ours = BiasedConformer(biased_conformer_spec({**AUDIO, **sizes}), torch.float32, CPU)
    fill(ours, theirs.state_dict().items(), ())
    frames = [4100, 40, 4000, 8001]
    features = torch.randn(sum(frames), 8, generator=gen)
    rows = ours(features, frames).split([-(-n // 8) for n in frames])
    for item, made in zip(features.split(frames), rows, strict=True):
        torch.testing.assert_close(made, theirs(item[None], None)[0], atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(load_rows()["phi4mm"], tmp_path_factory.mktemp("phi4") / "phi4mm-0-")


@pytest.mark.parametrize("limits", [{"image": 0}, {"audio": 0}, {"image": 0, "audio": 0}])
def test_parts_that_are_not_needed_are_not_loaded(published, limits):
    llm = LLM(published, limit_mm_per_prompt=limits, **OPTIONS)
    (output,) = llm.generate([{"prompt": "def f(x):"}], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    assert output.error is None


def test_transcription(published):
    llm = LLM(published, **OPTIONS)
    request = llm.speech.transcription_request(None, "transcribe", False, "")
    assert request.prompt == "<|user|><|audio_1|>Transcribe the audio clip into text.<|end|><|assistant|>"
    (found,) = llm.transcribe([(np.zeros(16_000, np.float32), 16_000)])
    assert isinstance(found.text, str)


def test_adapters_in_folders_are_those_among_the_weights(published, tmp_path):
    """transformers' layout has the adapters in folders of peft's layout."""
    row, question = load_rows()["phi4mm"], "def f(x): <|audio_1|> return"
    stored, raw = load_file(published / "model.safetensors"), json.loads((published / "config.json").read_text())
    for file in published.iterdir():
        if file.is_file() and not file.name.endswith(".safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    loras = {name: raw.pop(f"{name}_lora") for name in ("vision", "speech")}
    raw["architectures"] = ["Phi4MultimodalForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file({name: value for name, value in stored.items() if ".lora_" not in name}, tmp_path / "model.safetensors")
    for name, lora in loras.items():
        (tmp_path / f"{name}-lora").mkdir()
        own = {
            f"base_model.model.{key.replace(f'.{name}.', '.')}": value
            for key, value in stored.items()
            if f".{name}.weight" in key
        }
        save_file(own, tmp_path / f"{name}-lora" / "adapter_model.safetensors")
        made = {"peft_type": "LORA", "r": lora["r"], "lora_alpha": lora["lora_alpha"], "target_modules": lora["layer"]}
        (tmp_path / f"{name}-lora" / "adapter_config.json").write_text(json.dumps(made))
    audio = (np.sin(np.arange(20_000) * 0.05).astype(np.float32), 16_000)
    params, answers = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), []
    for folder, placeholder in ((published, "<|audio_1|>"), (tmp_path, row.placeholders["audio"].replace("_1", ""))):
        prompt = {"prompt": question.replace("<|audio_1|>", placeholder), "multi_modal_data": {"audio": audio}}
        (output,) = LLM(folder, **OPTIONS).generate([prompt], params, use_tqdm=False)
        answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]
    shutil.rmtree(tmp_path / "speech-lora")
    with pytest.raises(CheckpointError, match=r"lacks speech-lora.*hf download"):
        LLM(tmp_path, **OPTIONS)


CHANGES = [
    ({"audio_config": {"chunk_size": 18}}, "chunk_size"),
    ({"audio_config": {"ext_pw_out_channel": 512}}, "ext_pw_out_channel"),
    ({"audio_config": {"time_reduction": 6}}, "time_reduction"),
    ({"audio_config": {"activation": "prelu"}}, "activation"),
    ({"vision_config": {"crop_size": 336}}, "crop_size"),
    ({"vision_config": {"image_size": 378, "crop_size": 378}}, "even number"),
    ({"embd_layer": {"image_embd_layer": {"hd_transform_order": "glb_sub"}}}, "hd_transform_order"),
    ({"embd_layer": 3}, "embd_layer"),
]


@pytest.mark.parametrize(("changes", "named"), CHANGES)
def test_bad_configs_are_named(changes, named):
    text = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ConfigError, match=named):
        Phi4Multimodal({**text, "num_key_value_heads": 2, **changes}, torch.float32, torch.device("meta"))


def test_targets_of_an_adapter_may_be_a_pattern():
    pattern = adapter_spec("a", {"target_modules": r"((layers.*self_attn\.(qkv|o)_proj)|(layers.*mlp\.down_proj))"}).pattern
    for name, wanted in (("self_attn.qkv_proj", True), ("mlp.down_proj", True), ("mlp.gate_up_proj", False)):
        assert bool(pattern.fullmatch(f"language_model.layers.3.{name}")) == wanted


@pytest.mark.parametrize(("case", "used", "unused"), [("a", "speech", "vision"), ("iai", "vision", "speech")])
def test_items_choose_adapter_and_projection(case, used, unused):
    """The parity suite compares the right ones: the oracle's logits need those of the prompt's items, and no others."""
    row = load_rows()["phi4mm"]
    model, processor = row.build(0)
    inputs = ask(row, case).theirs(processor)
    logits = row.run(model, inputs, [], None)

    def change(*parts):
        kept = {name: value for name, value in model.named_parameters() if any(part in name for part in parts)}
        before = {name: value.data.clone() for name, value in kept.items()}
        for value in kept.values():
            value.data.zero_()
        found = row.run(model, inputs, [], None)
        for name, value in kept.items():
            value.data.copy_(before[name])
        assert kept
        return float((found - logits).abs().max())

    projections = {"speech": "_for_speech.", "vision": "_for_vision_speech."}
    assert change(f"/{unused}/weight", projections[unused]) == 0
    for part in (f"/{used}/weight", projections[used]):
        assert change(part) > 100 * row.tolerance * max(1.0, float(logits.std())), part
