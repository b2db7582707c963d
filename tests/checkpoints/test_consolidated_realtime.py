"""Voxtral-Realtime in its publisher's own layout gives the logits and texts of the Hub's layout and of transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sensorium import LLM, AsyncLLM, SamplingParams
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.checkpoints.consolidated import hub_config
from sensorium.engine.model_files import load_model_files

RATE, ROW_MS = 16_000, 80
AUDIO = "mm_streams_embeddings.embedding_module"
WHOLE = {
    "model.language_model.embed_tokens": f"{AUDIO}.tok_embeddings",
    "model.language_model.norm": "norm",
    "lm_head": "output",
    "model.audio_tower.embedder.conv1": f"{AUDIO}.whisper_encoder.conv_layers.0.conv",
    "model.audio_tower.embedder.conv2": f"{AUDIO}.whisper_encoder.conv_layers.1.conv",
    "model.audio_tower.norm": f"{AUDIO}.whisper_encoder.transformer.norm",
    "model.multi_modal_projector.linear_1": f"{AUDIO}.audio_language_projection.0",
    "model.multi_modal_projector.linear_2": f"{AUDIO}.audio_language_projection.2",
}
LAYERS = {
    "model.language_model.layers": "layers",
    "model.audio_tower.layers": f"{AUDIO}.whisper_encoder.transformer.layers",
}
PARTS = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn_layer_norm": "attention_norm", "final_layer_norm": "ffn_norm",
    "ada_rms_norm.linear1": "ada_rms_norm_t_cond.0", "ada_rms_norm.linear2": "ada_rms_norm_t_cond.2",
}  # fmt: skip
PUBLISHED = {
    "dim": 3072, "n_layers": 26, "head_dim": 128, "hidden_dim": 9216, "n_heads": 32, "n_kv_heads": 8, "use_biases": False,
    "causal": True, "rope_theta": 1e6, "norm_eps": 1e-05, "vocab_size": 131072, "model_parallel": 1, "tied_embeddings": True,
    "sliding_window": 8192, "model_max_length": 131072, "ada_rms_norm_t_cond": True, "ada_rms_norm_t_cond_dim": 32,
}  # fmt: skip
ENCODER = {
    "dim": 1280, "n_layers": 32, "head_dim": 64, "hidden_dim": 5120, "n_heads": 32, "vocab_size": 131072, "n_kv_heads": 32,
    "use_biases": True, "use_cache": False, "rope_theta": 1e6, "causal": True, "norm_eps": 1e-05, "pos_embed": "rope",
    "max_source_positions": None, "ffn_type": "swiglu", "norm_type": "rms_norm", "sliding_window": 750,
    "audio_encoding_args": {
        "sampling_rate": RATE, "frame_rate": 12.5, "num_mel_bins": 128, "hop_length": 160, "window_size": 400,
        "chunk_length_s": None, "global_log_mel_max": 1.5, "transcription_format": "streaming",
    },
}  # fmt: skip
SPEECH = {"frame_rate": 12.5, "transcription_delay_ms": 480.0, "streaming_n_left_pad_tokens": 32}


def params_of(encoder: dict[str, Any], **text: Any) -> dict[str, Any]:
    heard = {"encoder_args": encoder, "downsample_args": {"downsample_factor": 4}}
    return PUBLISHED | text | {"multimodal": {"whisper_model_args": heard}}


def stored_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{kind}"
    prefix = next(prefix for prefix in LAYERS if stem.startswith(prefix))
    number, part = stem.removeprefix(f"{prefix}.").split(".", 1)
    return f"{LAYERS[prefix]}.{number}.{PARTS[part]}.{kind}"


def stored_weights(model: Any) -> dict[str, torch.Tensor]:
    """Convert weights to the publisher's layout, in which rotated pairs of queries and keys are adjacent."""
    weights = {}
    for name, tensor in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            config = model.config.audio_config if "audio_tower" in name else model.config.text_config
            halves = tensor.view(-1, 2, config.head_dim // 2, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if name != "lm_head.weight":  # tied
            weights[stored_name(name)] = tensor.contiguous().clone()
    return weights


def make_params(model: Any, **text_keys: Any) -> dict[str, Any]:
    """Return the params.json of a model of the parity suite."""
    text, audio = model.config.text_config, model.config.audio_config
    sizes = [
        {
            "dim": part.hidden_size, "n_layers": part.num_hidden_layers, "head_dim": part.head_dim,
            "hidden_dim": part.intermediate_size, "n_heads": part.num_attention_heads, "n_kv_heads": part.num_key_value_heads,
            "norm_eps": part.rms_norm_eps, "rope_theta": part.rope_parameters["rope_theta"],
            "vocab_size": part.vocab_size, "sliding_window": part.sliding_window,
        }
        for part in (text, audio)
    ]  # fmt: skip
    bands = ENCODER["audio_encoding_args"] | {"num_mel_bins": audio.num_mel_bins}
    return params_of(ENCODER | sizes[1] | {"audio_encoding_args": bands}, **(sizes[0] | text_keys))


def make(folder: Path, delay: int, left: int, **text_keys: Any) -> tuple[Any, Any]:
    """Save the oracle in the Hub's layout and in the publisher's. Return it with its processor."""
    row = family.load_rows()["voxtral_realtime"]
    family.save(row, folder / "hub", window=24)
    tekken = json.loads((folder / "hub" / "tekken.json").read_text())
    tekken["audio"] |= {"transcription_delay_ms": ROW_MS * delay, "streaming_n_left_pad_tokens": left}
    (folder / "own").mkdir()
    for name in ("hub", "own"):
        (folder / name / "tekken.json").write_text(json.dumps(tekken))
    model, processor = family.load(folder / "hub")
    save_file(stored_weights(model), folder / "own" / "consolidated.safetensors")
    (folder / "own" / "params.json").write_text(json.dumps(make_params(model, **text_keys)))
    return model, processor


def open_llm(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", device="cpu", max_model_len=512, max_num_seqs=4, block_size=4)


@contextmanager
def recorded(llm: LLM) -> Iterator[list[torch.Tensor]]:
    """Collect the logits that the model computes."""
    model, rows = llm.engine.loop.core.executor.runner.model, list[torch.Tensor]()
    compute = model.compute_logits
    model.compute_logits = lambda hidden: rows.append(compute(hidden)) or rows[-1]
    yield rows
    model.compute_logits = compute


def answer(llm: LLM, samples: np.ndarray) -> tuple[list[int], torch.Tensor]:
    """Return the tokens of prompt and answer, and the logits of all but the last."""
    asked = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, prompt_logprobs=0)
    prompt = {"prompt": "[STREAMING_PAD]", "multi_modal_data": {"audio": (samples, RATE)}}
    with recorded(llm) as rows:
        (output,) = llm.generate(prompt, asked, use_tqdm=False)
    assert output.error is None
    return list(output.prompt_token_ids) + list(output.outputs[0].token_ids), torch.cat(rows)


def oracle_logits(model: Any, processor: Any, samples: np.ndarray, ids: list[int], delay: int) -> torch.Tensor:
    inputs = family.load_rows()["voxtral_realtime"].call(processor, "", {"audio": [samples]})
    prompt = inputs["input_ids"][0].tolist()
    assert ids[: len(prompt)] == prompt
    with torch.inference_mode():
        frames = model.model.audio_tower.embedder(inputs["input_features"])[:, : 4 * (len(ids) - 1)]
        known = torch.tensor([ids[:-1]])
        return model(input_ids=known, encoder_inputs_embeds=frames, num_delay_tokens=delay).logits[0].float()


async def streamed_text(llm: LLM, samples: np.ndarray) -> list[str]:
    async def blocks() -> Any:
        for block in np.split(samples, range(7777, len(samples), 7777)):
            yield block

    events = AsyncLLM(llm).stream_transcribe(blocks(), vad=False, pause=30.0, max_window=30.0)
    return [event.text async for event in events if event.kind == "final"]


@pytest.mark.parametrize(("delay", "left", "changes"), [(2, 32, {}), (4, 20, {"sliding_window": "24"})])
def test_it_answers_as_the_same_weights_in_the_other_layout(tmp_path, delay, left, changes):
    model, processor = make(tmp_path, delay, left, **changes)
    samples = family.make_media("audio", (20_000,), 3)
    with open_llm(tmp_path / "own") as own:
        assert own.engine.loop.core.executor.runner.model.__class__.__name__ == "VoxtralRealtimeConsolidated"
        ids, logits = answer(own, samples)
        text = own.transcribe((samples, RATE), use_tqdm=False)[0].text
        assert asyncio.run(streamed_text(own, samples)) == [text]
    want = oracle_logits(model, processor, samples, ids, delay)
    torch.testing.assert_close(logits, want, atol=2e-4 * max(1.0, float(want.std())), rtol=0)
    spoken = ids[-(len(ids) - 1 - left - delay) :]
    assert [int(token) for token in want[-len(spoken) :].argmax(-1)] == spoken
    if left == 32:
        with open_llm(tmp_path / "hub") as hub:
            assert answer(hub, samples)[0] == ids
            assert hub.transcribe((samples, RATE), use_tqdm=False)[0].text == text


def test_a_missing_factor_of_a_norm_is_named(tmp_path):
    make(tmp_path, 2, 32)
    file = tmp_path / "own" / "consolidated.safetensors"
    weights = load_file(file)
    for part in (0, 2):
        del weights[f"layers.1.ada_rms_norm_t_cond.{part}.weight"]
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=r"layers\.1\.ada_rms_norm\.linear1\.weight"):
        open_llm(tmp_path / "own")


def test_the_published_settings():
    kind, config = hub_config(params_of(ENCODER), {"audio": SPEECH | {"transcription_delay_ms": 240}})
    assert kind == "causal audio"
    assert (config["default_num_delay_tokens"], config["streaming_n_left_pad_tokens"]) == (3, 32)
    assert (config["downsample_factor"], config["audio_length_per_tok"]) == (4, 8)
    assert config["feature_extractor"] == {
        "feature_size": 128, "sampling_rate": RATE, "hop_length": 160, "n_fft": 400, "global_log_mel_max": 1.5,
    }  # fmt: skip
    text, audio = config["text_config"], config["audio_config"]
    assert (text["max_position_embeddings"], text["sliding_window"], text["tie_word_embeddings"]) == (131072, 8192, True)
    assert (audio["hidden_size"], audio["rope_theta"], audio["sliding_window"], audio["num_mel_bins"]) == (1280, 1e6, 750, 128)
    assert hub_config(params_of(ENCODER), {})[1].get("default_num_delay_tokens") is None  # the model has the published one


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ada_rms_norm_t_cond": False}, "causal in params.json is set without ada_rms_norm_t_cond"),
        ({"lora": {"rank": 8}}, "lora in params.json is not supported"),
        ({"use_biases": True}, "use_biases in params.json is not supported"),
        ({"encoder": {"causal": False}}, "ada_rms_norm_t_cond in params.json is not supported"),
        ({"encoder": {"pos_embed": "sinusoidal"}}, "pos_embed in params.json is 'sinusoidal'"),
        ({"encoder": {"ffn_type": "mlp"}}, "ffn_type in params.json is 'mlp'"),
        ({"encoder": {"norm_type": "layer_norm"}}, "norm_type in params.json is 'layer_norm'"),
        ({"encoder": {"use_biases": False}}, "use_biases in params.json is 'False'"),
        ({"encoder": {"sliding_window": None}}, "params.json lacks 'sliding_window'"),
        ({"encoder": {"sliding_window": "wide"}}, "sliding_window in params.json is 'wide'"),
        ({"encoder": {"n_heads": None}}, "params.json lacks 'n_heads'"),
        ({"encoder": {"audio_encoding_args": {"global_log_mel_max": "x"}}}, "global_log_mel_max in params.json is 'x'"),
        ({"encoder": {"audio_encoding_args": {"frame_rate": 25}}}, "frame_rate in params.json is 25; it must be 12.5"),
        ({"speech": {"frame_rate": 25.0}}, "frame_rate in tekken.json is 25.0; it must be 12.5"),
        (
            {"speech": {"transcription_delay_ms": 100}},
            "transcription_delay_ms in tekken.json is 100; it must be a multiple of 80",
        ),
        ({"speech": {"transcription_delay_ms": 0}}, "transcription_delay_ms in tekken.json is 0;"),
        ({"speech": {"transcription_delay_ms": "80"}}, "transcription_delay_ms in tekken.json is '80'"),
        ({"speech": {"streaming_n_left_pad_tokens": 1.5}}, "streaming_n_left_pad_tokens in tekken.json is 1.5"),
        ({"speech": [1]}, "audio in tekken.json is a list"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(tmp_path, change, said):
    encoder, speech = ENCODER | change.get("encoder", {}), change.get("speech", {})
    text = {key: value for key, value in change.items() if key not in ("encoder", "speech")}
    (tmp_path / "params.json").write_text(json.dumps(params_of(encoder, **text)))
    tekken = {"audio": SPEECH | speech if isinstance(speech, dict) else speech}
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    with pytest.raises(ConfigError, match=said):
        load_model_files(tmp_path)
